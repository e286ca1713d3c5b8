"""The tasks: rows as they should be, and every bad row named with file and line."""

import gzip
import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.stats
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from sentencepiece import sentencepiece_model_pb2

from sentence_t5 import vocabularies, whole_files
from sentence_t5.tasks import (
    community_qa,
    files,
    msmarco,
    nli,
    prepared,
    records,
    sts,
    synthetic,
    text_pairs,
)


@pytest.fixture(autouse=True)
def log_reaches_pytest(monkeypatch):
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)


@pytest.fixture(scope="module")
def vocabulary():
    return vocabularies.synthetic()


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def rows_of(task, split="train"):
    """The rows of a task's source, as text."""
    return [row for block in task.source.blocks(split) for row in block]


def ids_of(task, split, sequence_length=None):
    dataset = task.get_dataset(sequence_length, split, shuffle=False)
    return [
        {
            k: (v.to_list() if hasattr(v, "to_list") else v.numpy())
            for k, v in row.items()
        }
        for row in dataset
    ]


# Synthetic.


def test_synthetic_is_deterministic_and_quick():
    start = time.process_time()
    rows = list(synthetic.triples(20_000, seed=0))
    assert time.process_time() - start < 2
    assert rows[:50] == list(synthetic.triples(50, seed=0))
    assert rows[:50] != list(synthetic.triples(50, seed=1))
    assert rows[0] == {
        "inputs": "There was one joyful soldier who concealed the dry rug in the "
        "forest during the heat.",
        "targets": "It was the mat that just one happy soldier buried during the heat "
        "in the forest.",
        "negative_targets": [
            "During the heat, the dry rug was concealed by a pair of joyful soldiers "
            "in the forest."
        ],
    }
    assert len({row["targets"] for row in rows}) > 19_900


def test_synthetic_validation_holds_out_combinations():
    def combinations(held_out):
        rng = synthetic.random.Random("x")
        events = [synthetic._event(rng, held_out) for _ in range(3000)]
        return {
            (e[synthetic.AGENT], e[synthetic.ACTION], e[synthetic.OBJECT])
            for e in events
        }

    train, validation = combinations(False), combinations(True)
    assert len(train) > 1000 and len(validation) > 500
    assert not train & validation


def test_synthetic_concepts_share_no_form():
    for slot in synthetic.SLOTS:
        forms = [form for concept in slot.concepts for form in concept]
        assert len(forms) == len(set(forms))
        for concept, opposite in enumerate(slot.opposites):
            assert opposite == -1 or slot.opposites[opposite] == concept != opposite


def test_synthetic_scores_are_the_weighted_share_of_agreeing_slots():
    rows = list(synthetic.scored_pairs(2000, seed=0))
    scores = np.array([row["scores"] for row in rows])
    assert scores.min() == 0 and scores.max() == 5
    np.testing.assert_allclose(scores * 11 / 5, np.round(scores * 11 / 5), atol=1e-9)
    counts = np.bincount(np.round(scores).astype(int), minlength=6)
    assert counts.min() > 150


def test_synthetic_shared_words_say_little_about_the_score():
    """So a model that has learnt nothing has room for 25 points and more."""

    def overlap(row):
        left, right = (
            set(row[key].lower().strip(".").replace(",", "").split())
            for key in ("inputs", "targets")
        )
        return len(left & right) / np.sqrt(len(left) * len(right))

    rows = list(synthetic.scored_pairs(1000, seed=0))
    scores = [row["scores"] for row in rows]
    correlation = scipy.stats.spearmanr(
        [overlap(row) for row in rows], scores
    ).statistic
    assert abs(correlation) < 0.2


def test_synthetic_task_through_seqio(vocabulary):
    lengths = {"inputs": 8, "targets": 32, "negative_targets": 8}
    task = synthetic.task(num_triples=5)
    texts = list(synthetic.triples(5, seed=0))
    for row, text in zip(ids_of(task, "train", lengths), texts, strict=True):
        assert row["inputs"].tolist() == [*vocabulary.encode(text["inputs"])[:7], 1]
        assert row["targets"].tolist() == [*vocabulary.encode(text["targets"]), 1]
        negative = vocabulary.encode(text["negative_targets"][0])[:7]
        assert row["negative_targets"] == [[*negative, 1]]
    assert len(ids_of(task, "validation")) == 1
    scored = ids_of(synthetic.sts_task(num_pairs=3), "validation", lengths)
    expected = [row["scores"] for row in synthetic.scored_pairs(3, seed=0)]
    np.testing.assert_allclose([row["scores"] for row in scored], expected, rtol=1e-6)


def test_committed_vocabulary_is_what_its_generator_makes(tmp_path):
    folder = pathlib.Path(__file__).parent.parent / "tasks" / "data"
    script = tmp_path / "make.py"
    script.write_text((folder / "make_synthetic_vocabulary.py").read_text())
    namespace = {"__file__": str(script), "__name__": "make"}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    namespace["main"]()
    made, committed = (
        sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
        for path in (tmp_path / "synthetic.model", folder / "synthetic.model")
    )
    assert list(made.pieces) == list(committed.pieces)
    assert made.normalizer_spec == committed.normalizer_spec
    assert (folder / "synthetic.model").stat().st_size < 50_000


# Files.

TSV = "anchor\tpositive\tnegative\na\tb\tc\nd\te\t\n"


def test_tsv(tmp_path, vocabulary):
    path = write(tmp_path / "my pairs.tsv", TSV)
    task = files.task(path, vocabulary, negatives="negative")
    assert task.name == "files_my_pairs"
    assert task.splits == ("train",)
    assert rows_of(task) == [
        {"inputs": "a", "targets": "b", "negative_targets": ["c"]},
        {"inputs": "d", "targets": "e", "negative_targets": []},
    ]
    assert set(files.task(path, vocabulary).output_features) == {"inputs", "targets"}


def test_tsv_cells_are_taken_as_they_are(tmp_path, vocabulary):
    text = '\ufeffanchor\tpositive\r\n"a\t b\\n \r\nc\u2028d\t"e"'
    task = files.task(write(tmp_path / "x.tsv", text), vocabulary)
    assert rows_of(task) == [
        {"inputs": '"a', "targets": " b\\n "},
        {"inputs": "c\u2028d", "targets": '"e"'},
    ]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz"])
def test_jsonl_with_lists_of_negatives(tmp_path, vocabulary, name):
    lines = [
        {"q": "é", "a": "", "n": ["x", "y"], "other": 3},
        {"q": "b", "a": "c", "n": "z"},
        {"q": "b", "a": "c", "n": None},
        {"q": "b", "a": "c"},
    ]
    path = write(tmp_path / name, "".join(json.dumps(line) + "\n" for line in lines))
    rows = rows_of(files.task(path, vocabulary, "q", "a", "n"))
    assert [row["negative_targets"] for row in rows] == [["x", "y"], ["z"], [], []]
    assert rows[0]["inputs"] == "é" and rows[0]["targets"] == ""


def test_several_columns_files_and_splits(tmp_path, vocabulary):
    one = write(tmp_path / "one.tsv", "q\ta\tn1\tn2\n1\t2\t3\t4\n")
    two = write(tmp_path / "two.tsv.gz", "n2\tn1\ta\tq\n8\t7\t6\t5\n")
    paths = {"train": [one, two], "validation": two}
    task = files.task(paths, vocabulary, "q", "a", ["n1", "n2"])
    assert [list(row.values()) for row in rows_of(task)] == [
        ["1", "2", ["3", "4"]],
        ["5", "6", ["7", "8"]],
    ]
    assert [row["inputs"] for row in rows_of(task, "validation")] == ["5"]


def test_bytes_that_are_not_utf8(tmp_path, vocabulary, caplog):
    path = write(tmp_path / "x.tsv", b"anchor\tpositive\na\tb\nz\tcaf\xe9\nc\td\n")
    with pytest.raises(
        ValueError, match=r"x\.tsv, line 3: byte 0xe9 at offset 25 "
    ) as e:
        rows_of(files.task(path, vocabulary))
    assert 'errors="replace"' in str(e.value)
    rows = rows_of(files.task(path, vocabulary, errors="replace"))
    assert [row["targets"] for row in rows] == ["b", "caf\ufffd", "d"]
    assert "1 line repaired" in caplog.text


def test_utf8_does_not_depend_on_the_locale(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"anchor": "é", "positive": "ü"}\n')
    code = (
        "from sentence_t5.tasks import records; "
        f"print([ascii(row) for _, row in records.Reader({path!r})])"
    )
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert rb"'anchor': '\\xe9', 'positive': '\\xfc'" in result.stdout


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.tsv", ["a\tb\tc"], "line 2: 3 cells, but the header has 2"),
        ("x.tsv", ["a\tb", "", "c\td"], "line 3: the line is empty"),
        ("x.tsv", ["a\tb", "c\t"], "line 3: column 'positive' has no text"),
        ("x.jsonl", ['{"anchor": "a", "positive": "b"}', "{"], "line 2: not JSON"),
        ("x.jsonl", ['{"anchor": "a", "positive": "b"}', "3"], "line 2: expected a J"),
        ("x.jsonl", ['{"anchor": "a", "positive": "b"}', "[]"], "line 2: no column"),
        (
            "x.jsonl",
            ['{"anchor": "a", "positive": null}'],
            "line 1: column 'positive' h",
        ),
        ("x.jsonl", ['{"anchor": NaN, "positive": "b"}'], "line 1: .* got nan .float"),
        ("x.jsonl", ['{"anchor": 3, "positive": "b"}'], "line 1: .* got 3 .int"),
        ("x.jsonl", ['{"anchor": "\\ud800", "positive": "b"}'], "half a surrogate"),
        (
            "x.jsonl",
            ['{"anchor": "a", "positive": "b"}', '{"anchor": "a"}'],
            r"line 2: no column 'positive'; there are \['anchor'\]",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, vocabulary, name, lines, message):
    header = ["anchor\tpositive"] if name == "x.tsv" else []
    path = write(tmp_path / name, "\n".join(header + lines) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        rows_of(files.task(path, vocabulary))
    assert str(error.value).startswith(f"{path}, line ")


def test_rows_without_a_text_can_be_dropped_or_kept(tmp_path, vocabulary, caplog):
    path = write(tmp_path / "x.tsv", "anchor\tpositive\na\tb\n\tc\nd\t\n")
    assert len(rows_of(files.task(path, vocabulary, on_missing="drop"))) == 1
    assert "2 rows dropped" in caplog.text
    rows = rows_of(files.task(path, vocabulary, on_missing="keep"))
    assert [row["inputs"] for row in rows] == ["a", "", "d"]


def test_missing_columns_and_files_are_found_at_once(tmp_path, vocabulary):
    path = write(tmp_path / "x.tsv", TSV)
    with pytest.raises(ValueError, match="no column 'question'; there are 'anchor', "):
        files.task(path, vocabulary, left="question")
    with pytest.raises(
        ValueError, match=r"no column 'wrong'.* --left, --right and --n"
    ):
        files.task(path, vocabulary, negatives="wrong")
    with pytest.raises(FileNotFoundError, match=r"absent\.tsv"):
        files.task(str(tmp_path / "absent.tsv"), vocabulary)
    with pytest.raises(ValueError, match="the file is empty"):
        files.task(write(tmp_path / "empty.tsv", ""), vocabulary)
    with pytest.raises(ValueError, match="cannot tell the format"):
        files.task(write(tmp_path / "x.csv", TSV), vocabulary)
    with pytest.raises(ValueError, match="on_missing must be one of"):
        files.task(path, vocabulary, on_missing="ignore")


def test_files_without_a_row_are_named(tmp_path, vocabulary):
    paths = [
        write(tmp_path / "x.tsv", "anchor\tpositive\n"),
        write(tmp_path / "y.tsv", "anchor\tpositive\n\tb\n"),
    ]
    task = files.task(paths, vocabulary, on_missing="drop")
    with pytest.raises(
        ValueError, match=r"x.tsv, .*y.tsv: no row to use.*--train_file"
    ):
        rows_of(task)
    more = write(tmp_path / "z.tsv", "anchor\tpositive\na\tb\n")
    task = files.task([*paths, more], vocabulary, on_missing="drop")
    assert rows_of(task) == [{"inputs": "a", "targets": "b"}]


def test_long_lines_and_many_rows(tmp_path):
    text = "".join(f"{i}\t{'x' * (i % 7)}y\n" for i in range(5000))
    path = write(tmp_path / "x.tsv", "anchor\tpositive\n" + text)
    rows = list(files.read([path], files.Columns("anchor", "positive")))
    assert [row["inputs"] for row in rows] == [str(i) for i in range(5000)]
    assert records.Reader(path).columns() == ["anchor", "positive"]


# STS.


def test_sts_from_tsv(tmp_path, vocabulary):
    text = "part\tgold\ts1\ts2\nx\t0.5\ta\tb\ny\t4\tc\td\nx\t5\te\tf\n"
    path = write(tmp_path / "x.tsv", text)
    task = sts.task(path, vocabulary, "s1", "s2", "gold")
    assert [row["scores"] for row in rows_of(task, "validation")] == [0.5, 4.0, 5.0]
    only = sts.task(path, vocabulary, "s1", "s2", "gold", "part", "x")
    assert [row["inputs"] for row in rows_of(only, "validation")] == ["a", "e"]
    with pytest.raises(ValueError, match="subset and subset_column go together"):
        sts.task(path, vocabulary, "s1", "s2", "gold", subset="x")


@pytest.mark.parametrize("score", ["high", "nan", "inf", ""])
def test_sts_score_that_is_no_number(tmp_path, vocabulary, score):
    text = f"score\tsentence1\tsentence2\n1\ta\tb\n{score}\tc\td\n"
    task = sts.task(write(tmp_path / "x.tsv", text), vocabulary)
    with pytest.raises(ValueError, match="line 3: column 'score' must hold a number"):
        rows_of(task, "validation")


# TFDS.


def store(folder, name, version, splits, features, config=None):
    """Writes a TFDS data set that is read offline."""
    specs = {"int": tf.int64, "float": tf.float32}
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version=version,
        config=config,
        data_dir=folder,
        split_datasets={
            split: tf.data.Dataset.from_tensor_slices(
                {key: [row[i] for row in rows] for i, key in enumerate(features)}
            )
            for split, rows in splits.items()
        },
        features=tfds.features.FeaturesDict(
            {
                key: tfds.features.Text() if kind == "text" else specs[kind]
                for key, kind in features.items()
            }
        ),
        disable_shuffling=True,
    )


NLI = {"premise": "text", "hypothesis": "text", "label": "int"}


def test_nli_from_tfds(tmp_path, vocabulary):
    snli = [
        ("p", "e1", 0),
        ("q", "neutral", 1),
        ("p", "c1", 2),
        ("p", "unlabelled", -1),
        ("q", "e", 0),
        ("p", "e2", 0),
        ("p", "e1", 0),
        ("p", "c2", 2),
    ]
    multi = [("é", "e", 0), ("é", "c", 2)]
    store(tmp_path, "snli", "1.1.0", {"train": snli, "validation": snli[:3]}, NLI)
    parts = ("train", "validation_matched", "validation_mismatched")
    store(tmp_path, "multi_nli", "1.1.0", dict.fromkeys(parts, multi), NLI)
    task = nli.task(vocabulary, data_dir=str(tmp_path))
    assert [list(row.values()) for row in rows_of(task)] == [
        ["p", "e1", ["c1", "c2"]],
        ["p", "e2", ["c2", "c1"]],
        ["é", "e", ["c"]],
    ]
    assert [row["inputs"] for row in rows_of(task, "validation")] == ["p", "é"]
    row = ids_of(task, "train", {"inputs": 8, "targets": 8, "negative_targets": 8})[1]
    assert row["negative_targets"] == [
        [*vocabulary.encode("c2"), 1],
        [*vocabulary.encode("c1"), 1],
    ]
    identity = json.dumps(task.source.identity("train"))
    assert "snli/1.1.0" in identity and "multi_nli/1.1.0" in identity


def test_stsb_from_tfds(tmp_path, vocabulary):
    rows = [("a", "b", 2.5), ("c", "d", 4.0)]
    features = {"sentence1": "text", "sentence2": "text", "label": "float"}
    store(tmp_path, "glue", "2.0.0", {"validation": rows}, features, config="stsb")
    task = sts.stsb(vocabulary, data_dir=str(tmp_path))
    assert rows_of(task, "validation") == [
        {"inputs": "a", "targets": "b", "scores": 2.5},
        {"inputs": "c", "targets": "d", "scores": 4.0},
    ]


def test_arrays_have_columns_by_number(tmp_path, vocabulary):
    path = write(tmp_path / "x.jsonl", '["q", "a", "n"]\n["r", "b", "m"]\n')
    task = files.task(path, vocabulary, left="0", right="1", negatives="2")
    assert rows_of(task)[1] == {
        "inputs": "r",
        "targets": "b",
        "negative_targets": ["m"],
    }


def test_msmarco_from_tfds(tmp_path, vocabulary):
    rows = [("q1", "d1", "how", "so", 1.0), ("q2", "d2", "why", "no", 0.0)]
    features = {"query_id": "text", "passage_id": "text", "query": "text"}
    features |= {"passage": "text", "score": "float"}
    splits = {"train": rows, "query": rows[:1], "passage": rows[:1]}
    store(tmp_path, "beir", "1.0.0", splits, features, config="msmarco")
    task = msmarco.task(vocabulary, data_dir=str(tmp_path))
    assert list(task.splits) == ["train"]
    # A judgement of 0 says that the passage is not relevant.
    assert rows_of(task) == [{"inputs": "how", "targets": "so"}]


def test_questions_and_answers_from_tfds(tmp_path, vocabulary):
    rows = [("Why?", "Because."), ("É?", "Oui.")]
    features = {"question": "text", "reply": "text"}
    store(tmp_path, "forum", "1.0.0", {"train": rows, "test": rows[:1]}, features)
    made = {"vocabulary": vocabulary, "data_dir": str(tmp_path)}
    task = community_qa.task("forum:1.0.0", right="reply", **made)
    assert rows_of(task)[1] == {"inputs": "É?", "targets": "Oui."}
    assert len(rows_of(task, "test")) == 1
    with pytest.raises(ValueError, match=r"no feature 'answer'; it has \['question'"):
        community_qa.task("forum:1.0.0", **made)


def test_msmarco_triples_have_no_header(tmp_path, vocabulary):
    path = write(tmp_path / "triples.tsv", "how\tso\tno\nwhy\tas\tif\n")
    assert rows_of(msmarco.triples(path, vocabulary)) == [
        {"inputs": "how", "targets": "so", "negative_targets": ["no"]},
        {"inputs": "why", "targets": "as", "negative_targets": ["if"]},
    ]
    bad = write(tmp_path / "bad.tsv", "how\tso\tno\nwhy\tas\n")
    with pytest.raises(ValueError, match=r"line 2: 2 cells, expected 3 \(query, pos"):
        rows_of(msmarco.triples(bad, vocabulary))
    with pytest.raises(FileNotFoundError, match="Set the task's `path`"):
        msmarco.triples("gone.tsv", vocabulary)


def test_a_beir_folder_gives_its_relevant_pairs(tmp_path, vocabulary):
    (tmp_path / "qrels").mkdir()
    corpus = '{"_id": "a", "title": "T", "text": "x"}\n{"_id": "b", "text": "y"}\n'
    write(tmp_path / "corpus.jsonl.gz", corpus)
    write(tmp_path / "queries.jsonl", '{"_id": 7, "text": "how"}\n')
    rows = "query-id\tcorpus-id\tscore\n7\ta\t2\n7\tb\t0\n7\tgone\t1\n"
    for split in ("train", "dev"):
        write(tmp_path / "qrels" / f"{split}.tsv", rows)
    task = msmarco.folder(str(tmp_path), vocabulary)
    assert set(task.splits) == {"train", "validation"}
    assert rows_of(task) == [{"inputs": "how", "targets": "T x"}]
    before = task.source.identity("train")
    write(tmp_path / "qrels" / "train.tsv", rows.replace("b\t0", "b\t1"))
    assert task.source.identity("train") != before
    with pytest.raises(FileNotFoundError, match=r"no qrels/\*\.tsv"):
        msmarco.folder(str(tmp_path / "qrels"), vocabulary)


@pytest.mark.parametrize("name", [nli.SNLI, nli.MULTI_NLI, sts.STSB])
def test_data_set_that_is_not_prepared_fails_at_once(tmp_path, name):
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match="download_and_prepare") as error:
        prepared.builder(name, str(tmp_path))
    assert time.monotonic() - start < 10
    assert f"tfds.builder('{name}', data_dir={str(tmp_path)!r})" in str(error.value)


# What all tasks share.


def test_task_that_is_not_plain(vocabulary):
    task = synthetic.task(num_triples=2)
    assert text_pairs.is_plain(task)
    other = seqio.Task("t", task.source, task.output_features, [text_pairs.tokenize])
    assert not text_pairs.is_plain(other)


def test_source_has_one_shard():
    source = synthetic.task(num_triples=2).source
    assert source.list_shards("train") == ["train"]
    with pytest.raises(ValueError, match="one shard"):
        source.get_dataset("train", shard_info=seqio.ShardInfo(0, 2))


@pytest.mark.parametrize("size", [0, 7, 8, 21])
def test_a_files_hash_is_that_of_all_its_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(whole_files, "_CHUNK_BYTES", 8)
    path = tmp_path / "file"
    content = bytes(range(size))
    path.write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert whole_files.sha256(path) == expected
    assert text_pairs.file_sha256(str(path)) == expected
