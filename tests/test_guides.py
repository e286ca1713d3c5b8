"""A guide: which candidates it leaves out, and that its vectors are its model's."""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2
from test_inference import CONFIG, MAX_LENGTH, VOCABULARY, random_params
from test_losses import differences

from sentence_t5 import (
    candidate_masks,
    checkpoints,
    encoder,
    guides,
    losses,
    names,
    optim,
    partitioning,
    pretrained,
    steps,
)
from sentence_t5.pretrained import vocabulary_files
from sentence_t5.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
B, N = 6, 2
SCALE = 5.0


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def brute_force(left, right, negatives, *, guide, margin, rows):
    """Returns the loss in float64; the guide is asked about each candidate."""
    total, num_left_out = 0.0, 0
    for i in np.flatnonzero(rows):
        limit = guide[0][i] @ guide[1][i] - margin
        own = left[i] @ right[i]
        forward, backward = [own], [own]
        for j in np.flatnonzero(rows):
            if i != j and guide[0][i] @ guide[1][j] <= limit:
                forward.append(left[i] @ right[j])
            if i != j and guide[0][j] @ guide[1][i] <= limit:
                backward.append(left[j] @ right[i])
            for n in range(N):
                if guide[0][i] @ guide[2][j, n] <= limit:
                    forward.append(left[i] @ negatives[j, n])
        num_left_out += rows.sum() * (2 + N) - len(forward) - len(backward)
        for cosines in (forward, backward):
            total += math.log(sum(math.exp(SCALE * (x - own)) for x in cosines))
    assert 10 < num_left_out < 80
    return total / rows.sum()


def test_false_negatives_equal_brute_force():
    rng = np.random.default_rng(0)
    sides = [unit(rng, B, 4), unit(rng, B, 4), unit(rng, B, N, 4)]
    guide = [unit(rng, B, 3), unit(rng, B, 3), unit(rng, B, N, 3)]
    rows, margin = np.array([1, 1, 0, 1, 1, 1], bool), 0.1

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss_and_gradients(left, right, negatives):
        candidates = candidate_masks.make_candidates(
            B, np.ones((B, N), bool), None, row_mask=jax.numpy.array(rows),
            guide=tuple(map(jax.numpy.array, guide)), guide_margin=margin,
        )  # fmt: skip
        return losses.contrastive_loss(
            left, right, negatives, candidates,
            logit_scale=SCALE, bidirectional=True, block_rows=3,
        ).loss  # fmt: skip

    expected = functools.partial(brute_force, guide=guide, margin=margin, rows=rows)
    loss, gradients = loss_and_gradients(*sides)
    np.testing.assert_allclose(loss, expected(*sides), rtol=1e-5)
    for ours, theirs in zip(gradients, differences(expected, sides), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_candidate_as_close_as_the_positive_stays():
    rng = np.random.default_rng(1)
    guide = [unit(rng, B, 768), unit(rng, B, 768)]
    guide[1][3] = guide[1][0]
    own = np.eye(B, dtype=bool)

    def mask(margin):
        made = candidate_masks.make_candidates(
            B, None, None, guide=(*guide, None), guide_margin=margin
        )
        return np.asarray(made.mask(own).rights)

    cosines = guide[0] @ guide[1].T
    closer = cosines > np.diagonal(cosines)[:, None] + 1e-5
    np.testing.assert_array_equal(mask(0.0), ~closer)
    assert closer.any() and mask(0.0)[0, 3] and mask(0.0)[3, 0]
    assert not mask(1e-3)[0, 3]  # With a margin it is too close.


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    checkpoints.write_description(folder, CONFIG, Tokenizer(VOCABULARY), MAX_LENGTH)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as saver:
        params = random_params(CONFIG)
        saver.save(3, params=params, train={"step": np.int32(3)}, meta={})
    return folder


@pytest.mark.slow
def test_the_vectors_are_those_of_its_model(model_dir):
    partitioner = partitioning.Partitioner(
        partitioning.MeshConfig(fsdp=2), jax.devices()[:2]
    )
    tokens = np.random.default_rng(0).integers(2, 99, (2, 2 + N, 8), np.int32)
    tokens[:, :, 6:] = 0
    batch = {
        names.LEFT_TOKENS: tokens[:, 0],
        names.RIGHT_TOKENS: tokens[:, 1],
        names.NEGATIVE_TOKENS: tokens[:, 2:],
    }
    guide = guides.make_guide(str(model_dir), partitioner)
    got = guide(partitioner.put_batch(batch))
    rows = tokens.reshape(-1, 8)
    apply = jax.jit(encoder.SentenceEncoder(CONFIG).apply)
    expected = np.asarray(apply({"params": random_params(CONFIG)}, rows))
    expected = expected.reshape(2, 2 + N, -1)
    np.testing.assert_allclose(got[names.LEFT_GUIDE], expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(got[names.RIGHT_GUIDE], expected[:, 1], atol=1e-5)
    np.testing.assert_allclose(got[names.NEGATIVE_GUIDE], expected[:, 2:], atol=1e-5)
    assert got.keys() > batch.keys()


def test_a_guide_with_another_vocabulary_is_refused(model_dir):
    proto = sentencepiece_model_pb2.ModelProto.FromString(VOCABULARY.read_bytes())
    proto.pieces[50].piece = "another"
    other = Tokenizer(proto.SerializeToString())
    refused = r"another vocabulary: id 50 is '.*' there and 'another' in the data's"
    with pytest.raises(ValueError, match=refused):
        guides.check_guide(str(model_dir), other)


def test_a_guide_with_the_same_ids_in_other_bytes_is_taken(model_dir, tmp_path):
    """As of a folder that has its vocabulary in tokenizer.json alone."""
    ours = pretrained.Vocabulary(VOCABULARY.read_bytes(), 100)
    content = vocabulary_files.to_tokenizer_json(ours)
    made = vocabulary_files.from_tokenizer_json(content)
    theirs = Tokenizer(made.model_bytes, made.extra_ids)
    assert theirs.sha256 != Tokenizer(VOCABULARY).sha256
    checkpoints.write_description(tmp_path, CONFIG, theirs, MAX_LENGTH)
    (tmp_path / "checkpoints").symlink_to(model_dir / "checkpoints")
    guides.check_guide(str(tmp_path), Tokenizer(VOCABULARY))
    guides.check_guide(str(tmp_path), Tokenizer(VOCABULARY, 7))


def test_checking_a_guide_loads_nothing(model_dir, tmp_path, monkeypatch):
    monkeypatch.delattr(checkpoints, "load_params")
    tokenizer = Tokenizer(VOCABULARY)
    guides.check_guide(None, tokenizer)
    guides.check_guide(str(model_dir), tokenizer)
    with pytest.raises(FileNotFoundError, match=r"No encoder.json in .*/nothing"):
        guides.check_guide(str(tmp_path / "nothing"), tokenizer)
    checkpoints.write_description(tmp_path, CONFIG, tokenizer, MAX_LENGTH)
    with pytest.raises(FileNotFoundError, match="No checkpoint in"):
        guides.check_guide(str(tmp_path), tokenizer)


def test_without_its_vectors_nothing_is_trained():
    partitioner = partitioning.Partitioner(devices=jax.devices()[:1])
    model = steps.Model(
        CONFIG, losses.LossConfig(guide="/g"), optim.sgd(optim.constant(0.1))
    )
    with pytest.raises(ValueError, match="guide is /g, but the batch has no vectors"):
        steps.Trainer(model, partitioner)._train_step(None, {})


@pytest.mark.slow
@pytest.mark.entry
def test_a_guided_run(tmp_path):
    """Trains a guide, then guided by it, in chunks on 8 devices and on one."""

    def run(name, num_devices, *arguments):
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="
        command = [
            *(sys.executable, "-m", "sentence_t5.train"),
            *("--gin_file=gin/st5_tiny_mean.gin", f"--model_dir={tmp_path / name}"),
            *("--gin.STATS_PERIOD=1", "--eval_period=1000", *arguments),
        ]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "XLA_FLAGS": f"{flags}{num_devices}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-5000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "train/loss" in line]

    plain = run("guide", 1, "--train_steps=40")
    assert {line["train/negatives_per_query"] for line in plain} == {127}
    guided = ["--train_steps=4", f"--gin.LossConfig.guide='{tmp_path / 'guide'}'"]
    one = run("one", 1, *guided)
    chunked = "--gin.engine.trainer.microbatch_size=16"
    eight = run("eight", 8, *guided, chunked, "--gin.LossConfig.block_rows=8")
    for first, other in zip(one, eight, strict=True):
        assert first["train/negatives_per_query"] < 126
        for key in ("train/loss", "train/negatives_per_query"):
            assert first[key] == pytest.approx(other[key], rel=1e-4)
    assert one[0]["train/loss"] < plain[0]["train/loss"]
