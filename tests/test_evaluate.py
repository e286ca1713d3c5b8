"""The evaluate command: table, report, undefined scores, sizes of known sets."""

import hashlib
import json
import os
import pathlib

import flax.linen as nn
import jax
import numpy as np
import pytest

from sentence_t5 import (
    checkpoints,
    encoder,
    evaluate,
    evaluate_geometry,
    evaluate_inputs,
    truncation,
)
from sentence_t5.evals import geometry_plots, sts, sts_sets
from sentence_t5.inference import SentenceT5
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
T5 = T5Config(
    vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1
)
CONFIG = encoder.EncoderConfig(t5=T5, pooling="first", projection_dim=None)


pytestmark = pytest.mark.usefixtures("quick_compilation")


class FakeModel:
    """Turns the text of an angle into the unit vector of that angle."""

    config = CONFIG
    tokenizer = Tokenizer(VOCABULARY)
    max_length = 16
    step = 3
    default_prompt = None
    embedding_dim = CONFIG.embedding_dim
    fingerprint = "angles"

    def __init__(self, collapsed=False):
        self.collapsed = collapsed
        self.encoded = []
        self.prompts = {}

    def encode(self, texts, **options):
        self.encoded += texts
        angles = np.array([0.0 if self.collapsed else float(t) for t in texts])
        vectors = np.zeros((len(texts), self.embedding_dim), np.float32)
        vectors[:, 0], vectors[:, 1] = np.cos(angles), np.sin(angles)
        return vectors

    def truncated(self, texts, max_length, instruction):
        assert instruction == ""
        return np.array([len(text) > max_length for text in texts])


def make_set(name, rows):
    """Makes a set from rows of (subset, score, angle between the two sentences)."""
    return sts_sets.StsSet(
        name=name,
        sentences1=("0",) * len(rows),
        sentences2=tuple(str(angle) for _, _, angle in rows),
        scores=np.array([score for _, score, _ in rows], float),
        subsets=tuple(subset for subset, _, _ in rows),
        sha256="0" * 64,
    )


# Smaller angles are more similar: ranks of -angle against the scores.
ROWS = [
    ("a", 1, 1.5),
    ("a", 2, 0.5),
    ("a", 3, 1.0),
    ("b", 5, 0.1),
    ("b", 1, 0.9),
    ("b", 2, 0.8),
    ("b", 3, 0.3),
    ("b", 4, 0.6),
]


def test_report_of_known_angles():
    model = FakeModel()
    report = evaluate.make_report(model, [make_set("own", ROWS)], max_length=9)
    entry = report["sts"][0]
    assert entry["subsets"]["a"]["spearman"] == pytest.approx(50.0, abs=1e-6)
    assert entry["subsets"]["b"]["spearman"] == pytest.approx(90.0, abs=1e-6)
    assert entry["mean"]["spearman"] == pytest.approx(70.0, abs=1e-6)
    assert entry["wmean"]["spearman"] == pytest.approx((150 + 450) / 8, abs=1e-6)
    angles = np.array([angle for _, _, angle in ROWS])
    gold = np.array([score for _, score, _ in ROWS])
    assert entry["all"]["spearman"] == pytest.approx(
        sts.spearman(np.cos(angles), gold), abs=1e-6
    )
    assert entry["pairs"] == 8
    # Each distinct sentence was encoded once.
    assert sorted(model.encoded) == sorted({"0", *(str(a) for a in angles)})
    table = evaluate.format_table(report)
    assert "own  a           " in table
    for row in ("mean of 2", "wmean of 2"):
        assert row in table
    assert "90.00" in table
    assert "first pooling, projection None, float32, max_length 9" in table


def test_average_over_sets():
    half = make_set("half", [row for row in ROWS if row[0] == "a"])
    most = make_set("most", [row for row in ROWS if row[0] == "b"])
    report = evaluate.make_report(FakeModel(), [half, most])
    assert report["average"]["spearman"] == pytest.approx(70.0, abs=1e-6)
    assert "mean of 2 sets' all" in evaluate.format_table(report)


def test_sets_of_one_name_are_refused():
    sets = [make_set("test", ROWS[:4]), make_set("test", ROWS[3:])]
    with pytest.raises(ValueError, match="got 2 sets called 'test'"):
        evaluate.make_report(FakeModel(), sets)


def test_files_of_one_name_are_told_apart_and_all_count(tmp_path, capsys, monkeypatch):
    model = FakeModel()
    monkeypatch.setattr(SentenceT5, "load", lambda *args, **options: model)
    header, paths = "score\tsentence1\tsentence2", []
    for folder, scores in (("STS16", (3, 2, 1)), ("B", (1, 2, 3)), ("C", (3, 1, 2))):
        path = tmp_path / folder / "test.tsv"
        path.parent.mkdir()
        rows = [f"{s}\t0\t{a}" for s, a in zip(scores, (0.1, 0.5, 1), strict=True)]
        path.write_text("\n".join([header, *rows]) + "\n")
        paths.append(str(path))
    other = tmp_path / "C" / "dev.tsv"
    other.write_text(pathlib.Path(paths[0]).read_text())
    target = tmp_path / "report.json"
    command = ["--model_dir=m", f"--json={target}", "--sts", *paths, str(other)]
    assert evaluate.main([*command, "--geometry", *paths[:2]]) == 0
    report = json.loads(target.read_text())
    found = {e["name"]: e["all"]["spearman"] for e in report["sts"]}
    want = {"STS16/test": 100, "B/test": -100, "C/test": 50, "dev": 100}
    assert found == pytest.approx(want)
    # STS16 is a folder's name here: no published set.
    assert report["sts"][0]["notes"] == []
    assert report["average"]["spearman"] == pytest.approx((100 - 100 + 50 + 100) / 4)
    assert [e["name"] for e in report["geometry"]] == ["STS16/test", "B/test"]
    capsys.readouterr()
    assert evaluate.main([*command, paths[0]]) == 1
    message = f"--sts: got {paths[0]} 2 times, expected it once"
    assert message in capsys.readouterr().err


def test_names_are_the_shortest_ends_that_differ():
    names = evaluate_inputs._told_apart
    assert names("a", ["x/a.tsv", "x/a.txt"]) == ["a.tsv", "a.txt"]
    assert names("a", ["1/x/a.tsv", "2/x/a.tsv"]) == ["1/x/a", "2/x/a"]
    both = ["x/a.tsv", "y/a.tsv", "y/a.txt"]
    assert names("a", both) == both


def test_sentences_are_encoded_once_for_scores_and_geometry(tmp_path):
    path = tmp_path / "own.tsv"
    lines = [f"{score}\t0\t{angle}" for _, score, angle in ROWS]
    path.write_text("\n".join(["score\tsentence1\tsentence2", *lines]) + "\n")
    sets, model, again = [sts_sets.load_tsv(path)], FakeModel(), FakeModel()
    cache = tmp_path / "vectors"
    first = evaluate.make_report(model, sets, cache_dir=cache)
    assert len(model.encoded) == 9  # "0" and eight angles.
    assert evaluate.make_report(again, sets, cache_dir=cache) == first
    assert evaluate.make_report(again, sets)["sts"] == first["sts"]
    assert len(again.encoded) == 9  # By the second report alone.
    encoding = {"prompt": "", "max_length": 16, "batch_size": 64, "cache_dir": cache}
    evaluate_geometry.make_entry(again, evaluate_geometry.load(path), encoding)
    assert len(again.encoded) == 9


def test_a_collapsed_model_is_undefined_everywhere():
    report = evaluate.make_report(
        FakeModel(collapsed=True), [make_set("one", ROWS), make_set("two", ROWS)]
    )
    entry = report["sts"][0]
    assert entry["collapsed"]
    for over in ("all", "mean", "wmean"):
        assert entry[over]["spearman"] is None
        assert entry[over]["pearson"] is None
    assert report["average"]["spearman"] is None
    assert report["average"]["reason"] == "undefined on one, two"
    table = evaluate.format_table(report)
    assert "undefined" in table
    assert "one: collapsed embeddings: every pair has the cosine 1" in table
    json.dumps(report, allow_nan=False)


def test_one_constant_set_is_not_left_out_of_the_average():
    flat = make_set("flat", [("a", 2, 0.3), ("a", 2, 0.5)])
    report = evaluate.make_report(FakeModel(), [make_set("own", ROWS), flat])
    assert report["sts"][0]["all"]["spearman"] is not None
    assert report["average"]["spearman"] is None
    assert "flat: all is undefined: all gold scores are 2." in evaluate.format_table(
        report
    )


def test_a_published_set_of_another_size_says_so():
    report = evaluate.make_report(FakeModel(), [make_set("STS16.test", ROWS)])
    assert report["sts"][0]["comparable"] is False
    assert "has 8 pairs, published STS16 has 1186" in evaluate.format_table(report)


def test_truncated_texts_are_counted():
    report = evaluate.make_report(FakeModel(), [make_set("own", ROWS)], max_length=2)
    assert report["sts"][0]["texts_truncated"] == 8
    assert "8 of 16 texts truncated (max 2 tokens)" in evaluate.format_table(report)


def test_truncation_is_counted_and_noted_in_one_way():
    assert truncation.count(FakeModel(), ["1", "22", "333"], 1, "") == 2
    (note,) = truncation.notes(2, 3, 1, "query texts")
    assert note == "2 of 3 query texts truncated (max 1 tokens)."
    assert truncation.notes(0, 3, 1) == []


def test_the_settings_are_what_all_parts_are_encoded_with(tmp_path, monkeypatch):
    """STS and geometry get one prompt, length and batch size, and the report has it."""
    model = FakeModel()
    model.prompts, model.default_prompt = {"zero": "0"}, "zero"
    asked = []

    def encode(texts, **options):
        asked.append(options)
        return FakeModel.encode(model, texts)

    model.encode = encode
    model.truncated = lambda texts, *_, **__: np.zeros(len(texts), bool)
    monkeypatch.setattr(SentenceT5, "load", lambda *args, **options: model)
    angles, target = tmp_path / "angles.tsv", tmp_path / "report.json"
    angles.write_text("score\tsentence1\tsentence2\n5\t0\t0.5\n1\t0\t1.5\n2\t1\t2\n")
    flags = ["--model_dir=m", f"--sts={angles}", f"--geometry={angles}"]
    flags += [f"--json={target}", "--batch_size=5", "--max_length=7"]
    for more, prompt in ([], "0"), (["--instruction="], None):
        assert evaluate.main([*flags, *more]) == 0
        settings = json.loads(target.read_text())["settings"]
        of_sts, of_geometry = asked[-2:]
        assert of_sts == of_geometry
        assert of_sts["instruction"] == (prompt or "")
        assert settings["prompt"] == prompt
        for name, value in (("batch_size", 5), ("max_length", 7)):
            assert settings[name] == of_sts[name] == value


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    checkpoints.write_description(folder, CONFIG, Tokenizer(VOCABULARY), 16)
    init = encoder.SentenceEncoder(CONFIG).init
    shapes = jax.eval_shape(init, jax.random.key(0), np.ones((1, 8), np.int32))
    shapes = nn.unbox(shapes["params"])
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as saver:
        for step in (0, 4):
            rng = np.random.default_rng(step)
            params = jax.tree.map(
                lambda x, rng=rng: rng.normal(0.0, 0.5, x.shape).astype(x.dtype), shapes
            )
            saver.save(step, params=params, train={"s": step}, meta={})
    return folder


@pytest.fixture(scope="module")
def sts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    rng = np.random.default_rng(0)
    words = ["a", "small", "dog", "runs", "two", "cats", "sleep"]
    lines = ["subset\tscore\tsentence1\tsentence2"]
    for i in range(20):
        left, right = (" ".join(rng.choice(words, 3)) for _ in range(2))
        lines.append(f"{'xy'[i % 2]}\t{i % 7}\t{left}\t{right}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_command_writes_what_it_scored_and_how(model_dir, sts_file, tmp_path, capsys):
    target = tmp_path / "report.json"
    flags = [f"--model_dir={model_dir}", f"--sts={sts_file}", f"--json={target}"]
    more = ["--batch_size=2", f"--geometry={sts_file}"]
    assert evaluate.main([*flags, *more]) == 0
    table = capsys.readouterr().out
    report = json.loads(target.read_text())
    model, entry = report["model"], report["sts"][0]
    assert (model["path"], model["step"]) == (str(model_dir), 4)
    assert (model["pooling"], model["projection_dim"]) == ("first", None)
    assert (model["dtype"], model["num_params"]) == ("float32", CONFIG.num_params())
    assert report["settings"]["max_length"] == 16
    assert entry["file"] == str(sts_file)
    assert entry["sha256"] == hashlib.sha256(sts_file.read_bytes()).hexdigest()
    assert entry["pairs"] == 20
    assert {k: v["n"] for k, v in entry["subsets"].items()} == {"x": 10, "y": 10}
    assert f"{entry['all']['spearman']:.2f}" in table
    # The scores are those of the vectors, whatever the batch size.
    sts_set = sts_sets.load_tsv(sts_file)
    loaded = SentenceT5.load(model_dir)
    left = loaded.encode(sts_set.sentences1)
    right = loaded.encode(sts_set.sentences2)
    want = sts.spearman((left * right).sum(1), sts_set.scores)
    assert entry["all"]["spearman"] == pytest.approx(want, abs=1e-4)
    (cloud,) = report["geometry"]
    sentences = list(dict.fromkeys(sts_set.sentences1 + sts_set.sentences2))
    cosines = (vectors := loaded.encode(sentences)) @ vectors.T
    n = len(sentences)
    assert (cloud["texts"], cloud["sha256"]) == (n, entry["sha256"])
    mean = (cosines.sum() - np.trace(cosines)) / (n * (n - 1))
    assert cloud["average_cosine"] == pytest.approx(mean, abs=1e-4)
    assert "dimensions" not in table
    # Step 0 is another model.
    assert evaluate.main([*flags, "--step=0", "--dim=7"]) == 0
    assert f"first 7 of {CONFIG.t5.d_model} dimensions" in capsys.readouterr().out
    untrained = json.loads(target.read_text())
    assert untrained["model"]["step"] == 0
    assert untrained["model"]["embedding_dim"] == 7
    assert untrained["sts"][0]["all"] != entry["all"]


def test_command_errors_name_the_place(
    model_dir, sts_file, tmp_path, capsys, monkeypatch
):
    bad = tmp_path / "bad.tsv"
    bad.write_text("score\tsentence1\tsentence2\n1\ta\tb\n2\ta\n")
    assert evaluate.main([f"--model_dir={model_dir}", f"--sts={bad}"]) == 1
    assert "bad.tsv, line 3: got 2 fields" in capsys.readouterr().err
    assert evaluate.main([f"--model_dir={tmp_path}", f"--sts={sts_file}"]) == 1
    assert "No encoder.json" in capsys.readouterr().err
    for flag, message in (
        ("--sts=gone.tsv", "there is no such file, expected a TSV of scored pairs."),
        ("--medi=gone", "there is no such file, expected a JSONL file of rows with"),
        (f"--geometry={tmp_path}", "that is a folder, expected a TSV of pairs or"),
        ("--beir=gone", "there is no such folder, expected a retrieval set in BEIR's"),
        (f"--transfer={bad}", "there is no such folder, expected one of files of"),
    ):
        assert evaluate.main([f"--model_dir={model_dir}", flag]) == 1
        assert f"evaluate: {flag}: {message}" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert evaluate.main([f"--model_dir={model_dir}", f"--sts={sts_file}"]) == 1
    assert f"--sts={sts_file}: it may not be read" in capsys.readouterr().err
    monkeypatch.undo()
    flags = [f"--model_dir={model_dir}", f"--sts={sts_file}", "--score_column=grade"]
    assert evaluate.main(flags) == 1
    assert "no column 'grade'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_what_cannot_be_written_is_said_before_the_model_is_loaded(
    flag, sts_file, tmp_path, capsys, monkeypatch
):
    def load(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(SentenceT5, "load", load)
    flags = ["--model_dir=m", f"--geometry={sts_file}"]
    assert evaluate.main([*flags, f"{flag}={tmp_path}/gone/report"]) == 1
    message = f"{flag}={tmp_path}/gone/report: there is no folder {tmp_path}/gone"
    assert message in capsys.readouterr().err
    assert evaluate.main([*flags, f"{flag}={tmp_path}"]) == 1
    assert f"{flag}={tmp_path}: that is no file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert evaluate.main([*flags, f"{flag}={tmp_path}/report"]) == 1
    assert f"{tmp_path} takes no files" in capsys.readouterr().err


def test_a_plot_that_fails_does_not_cost_the_report(
    sts_file, tmp_path, capsys, monkeypatch
):
    model = FakeModel()
    monkeypatch.setattr(SentenceT5, "load", lambda *args, **options: model)
    monkeypatch.setattr(geometry_plots, "check_installed", lambda: None)
    angles = tmp_path / "angles.tsv"
    angles.write_text("score\tsentence1\tsentence2\n5\t0\t0.5\n1\t0\t1.5\n")

    def draw(path, entries, hues):
        raise ValueError("Format 'xyz' is not supported")

    monkeypatch.setattr(geometry_plots, "draw", draw)
    target = tmp_path / "report.json"
    target.write_text("an older report")
    flags = ["--model_dir=m", f"--geometry={angles}", f"--json={target}"]
    assert evaluate.main([*flags, f"--plot={tmp_path}/a.xyz"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "evaluate: Format 'xyz' is not supported\n"
    assert "geometry" in printed.out
    (entry,) = json.loads(target.read_text())["geometry"]
    assert (entry["texts"], entry["positive_pairs"]) == (3, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["angles.tsv", "report.json"]
