"""Mining and retrieval scores with a real model, through the command line."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import flax.linen as nn
import jax
import numpy as np
import pytest

from sentence_t5 import checkpoints, encoder, evaluate_retrieval, mining, retrieve
from sentence_t5.inference import SentenceT5
from sentence_t5.t5.config import T5Config
from sentence_t5.tasks import beir_folder
from sentence_t5.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
T5 = T5Config(
    vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1
)
CONFIG = encoder.EncoderConfig(t5=T5, projection_dim=8)
WORDS = ["a", "small", "dog", "runs", "two", "cats", "sleep", "here", "old", "man"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    checkpoints.write_description(folder, CONFIG, Tokenizer(VOCABULARY), 16)
    init = encoder.SentenceEncoder(CONFIG).init
    shapes = jax.eval_shape(init, jax.random.key(0), np.ones((1, 8), np.int32))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(0.0, 0.5, x.shape).astype(x.dtype),
        nn.unbox(shapes["params"]),
    )
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as saver:
        saver.save(1, params=params, train={"s": 1}, meta={})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)

    def draw():
        return " ".join(rng.choice(WORDS, rng.integers(2, 9)))

    rows = [{"_id": f"d{i}", "title": "", "text": draw()} for i in range(700)]
    queries = [{"_id": f"q{i}", "text": draw()} for i in range(2500)]
    for name, texts in (("corpus", rows), ("queries", queries)):
        lines = [json.dumps(row) + "\n" for row in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels").mkdir()
    lines = [f"q{i}\td{rng.integers(700)}\t1\n" for i in range(2500)]
    qrels = folder / "qrels" / "train.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def start(model_dir, folder, output):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "sentence_t5.mine", f"--model_dir={model_dir}"),
            *(f"--beir={folder}", f"--output={output}", "--num_negatives=3"),
            *("--relative_margin=0.02", "--sampling=random"),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.entry
def test_killed_and_started_again_gives_the_same_file(model_dir, folder, tmp_path):
    whole = tmp_path / "whole.jsonl.gz"
    process = start(model_dir, folder, whole)
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "2500 pairs of " in printed
    output = tmp_path / "mined.jsonl.gz"
    process = start(model_dir, folder, output)
    progress = tmp_path / "mined.jsonl.gz.work" / "progress.json"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if progress.exists() and json.loads(progress.read_text())["queries"]:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not output.exists()
    process = start(model_dir, folder, output)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert output.read_bytes() == whole.read_bytes()


def test_mined_file_equals_numpy_on_the_models_vectors(model_dir, folder, tmp_path):
    output = tmp_path / "mined.jsonl"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "sentence_t5.mine", f"--model_dir={model_dir}"),
            *(f"--beir={folder}", f"--output={output}", "--num_negatives=4"),
            *("--min_rank=3", "--max_rank=30", "--max_score=0.95"),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    found = beir_folder.load(folder, "train")
    model = SentenceT5.load(model_dir)
    # The first passage of those that are the same stands for them.
    first = {}
    for row, text in enumerate(found.passages):
        first.setdefault(mining.normalise(text), row)
    distinct = sorted(first.values())
    texts = [found.passages[row] for row in distinct]
    vectors = model.encode(texts).astype(float)
    known = {}
    for pair in beir_folder.relevant_pairs(found):
        same = known.setdefault(mining.normalise(pair.query), set())
        same.add(mining.normalise(pair.passage))
    row_of = {mining.normalise(text): i for i, text in enumerate(texts)}
    checked = 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    queries = model.encode([row["anchor"] for row in rows]).astype(float)
    for row, query in zip(rows, queries, strict=True):
        scores = vectors @ query
        own = mining.normalise(row["anchor"])
        for text in known[own] | ({own} & set(row_of)):
            scores[row_of[text]] = -np.inf
        order = np.argsort(-scores, kind="stable")[2:30]
        allowed = [i for i in order if scores[i] <= 0.95][:4]
        # Vectors of other batches differ in their last bits.
        near = np.abs(scores[allowed] - np.array(row["negative_scores"])).max(initial=0)
        assert near < 1e-5
        assert not {mining.normalise(t) for t in row["negatives"]} & known[own]
        checked += len(allowed)
    assert checked > 2000


def test_scores_are_the_same_for_any_batch_and_devices(model_dir, folder):
    found = beir_folder.load(folder, "train")
    one = SentenceT5.load(model_dir, devices=jax.devices()[:1])
    eight = SentenceT5.load(model_dir)
    entries = [
        evaluate_retrieval.make_entry(model, found, retrieve.Options(batch_size=size))
        for model, size in ((one, 2), (one, 64), (eight, 64))
    ]
    for entry in entries[1:]:
        assert entry["scores"] == pytest.approx(entries[0]["scores"], abs=1e-4)
    assert 0 < entries[0]["scores"]["ndcg@10"] < 1
