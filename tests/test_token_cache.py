"""The token cache: the ids are SeqIO's, made once, and made anew when they must be."""

import errno
import functools
import json
import logging
import pathlib
import shutil
import threading

import numpy as np
import pytest
import seqio
import tensorflow as tf

from sentence_t5 import task_identity, token_cache, tokenized, tokenizer, vocabularies
from sentence_t5.tasks import files, synthetic, text_pairs

AWKWARD = [
    "",
    " ",
    "   two  spaces   ",
    "A small dog runs.",
    "tab\tand\nnewline\r\n",
    "no\u00a0break\u3000ideographic",
    "\u0000 null, \u0085 next line, \ufeff mark",
    "▁meta▁symbol ▁",
    "e\u0301 \u00e9 ﬁ Ⅳ ½ 👩‍👩‍👧 你好",
    "</s> <pad> <unk> <s>",
    "<extra_id_0>",
    "<extra_id_0> and <extra_id_99>.",
    "a<extra_id_0>b <extra_id_1><extra_id_2>",
    "ab" * 500,
]


@pytest.fixture(autouse=True)
def own_cache_and_log(monkeypatch):
    monkeypatch.delenv("SENTENCE_T5_CACHE", raising=False)
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)


@pytest.fixture
def calls(monkeypatch):
    """Counts the rows that are tokenized straight."""
    counted = []
    encode = text_pairs.encode
    monkeypatch.setattr(
        text_pairs,
        "encode",
        lambda t, rows: counted.append(len(rows)) or encode(t, rows),
    )
    return counted


@pytest.fixture
def quick(monkeypatch):
    """Leaves out the comparison with SeqIO, which other tests are about."""

    def first_rows(task, split):
        rows = next(task.source.blocks(split))[:8]
        return token_cache._rows(text_pairs.encode(task, rows))

    monkeypatch.setattr(token_cache, "_seqio_rows", first_rows)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(num):
    return [{"anchor": f"red box {i}", "positive": f"box {i}"} for i in range(num)]


def rows_of(examples):
    return [examples.row(index) for index in range(len(examples))]


def seqio_rows(task, split):
    dataset = task.get_dataset(None, split, shuffle=False)
    return [
        {
            k: v.to_list() if hasattr(v, "to_list") else v.numpy().tolist()
            for k, v in r.items()
        }
        for r in dataset
    ]


def test_ids_are_seqios_and_the_tokenizers(tmp_path):
    rows = [
        {"l": text, "r": AWKWARD[-i], "n": AWKWARD[: i % 3]}
        for i, text in enumerate(AWKWARD)
    ]
    path = write(tmp_path / "x.jsonl", rows)
    task = files.task(path, vocabularies.synthetic(), "l", "r", "n")
    examples = token_cache.load(task, "train", str(tmp_path))
    assert rows_of(examples) == seqio_rows(task, "train")
    model = vocabularies.synthetic().sentencepiece_model_file
    expected = tokenizer.Tokenizer(model).encode(AWKWARD)
    assert [row["inputs"] for row in rows_of(examples)] == expected
    assert examples.row(0)["inputs"] == [1]
    assert all(row["inputs"][-1] == 1 for row in rows_of(examples))
    assert examples.vocabulary_size == 1380
    assert examples.max_id == 1379
    with pytest.raises(IndexError, match=f"Row {len(AWKWARD)} of"):
        examples.row(len(AWKWARD))


def test_scores_and_more_rows_than_a_block(tmp_path):
    examples = token_cache.load(synthetic.sts_task(1500), "validation", str(tmp_path))
    expected = [row["scores"] for row in synthetic.scored_pairs(1500, seed=0)]
    np.testing.assert_allclose(examples.scores, expected, rtol=1e-6)
    encode = vocabularies.synthetic().encode
    last = list(synthetic.scored_pairs(1500, seed=0))[-1]
    assert examples.row(1499)["targets"] == [*encode(last["targets"]), 1]


def test_second_start_tokenizes_a_few_rows_only(tmp_path, calls):
    task = synthetic.task(num_triples=3000)
    first = token_cache.load(task, "train", str(tmp_path))
    assert sum(calls) == 3000 + 8
    del calls[:]
    again = token_cache.load(synthetic.task(num_triples=3000), "train", str(tmp_path))
    assert calls == [8]
    assert isinstance(again.texts["inputs"].tokens, np.memmap)
    assert again.fingerprint == first.fingerprint
    assert again.row(2999) == first.row(2999)


def test_changed_contents_and_options_are_noticed(tmp_path, quick):
    path = tmp_path / "x.jsonl"
    vocabulary = vocabularies.synthetic()

    def load(**options):
        task = files.task(str(path), options.pop("vocabulary", vocabulary), **options)
        return token_cache.load(task, "train", str(tmp_path / "cache"))

    write(path, pairs(3))
    first = load()
    assert load().fingerprint == first.fingerprint
    assert load(right="anchor").row(0)["targets"] == first.row(0)["inputs"]
    no_sentinels = vocabularies.synthetic(extra_ids=0)
    assert load(vocabulary=no_sentinels).vocabulary_size == 1280
    write(path, [*pairs(2), {"anchor": "a", "positive": "b"}])
    second = load()
    assert second.fingerprint != first.fingerprint
    assert second.row(0) == first.row(0) and second.row(2) != first.row(2)


def test_equal_examples_have_equal_fingerprints_wherever_they_come_from(
    tmp_path, quick
):
    vocabulary = vocabularies.synthetic()
    one = files.task(write(tmp_path / "one.jsonl", pairs(3)), vocabulary)
    tsv = tmp_path / "two.tsv"
    lines = ["anchor\tpositive", *("\t".join(row.values()) for row in pairs(3))]
    tsv.write_text("\n".join(lines))
    two = files.task(str(tsv), vocabulary)
    fingerprints = {
        token_cache.load(task, "train", str(tmp_path)).fingerprint
        for task in (one, two)
    }
    assert len(fingerprints) == 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache folder that holds 20 triples, and its rows."""
    folder = tmp_path_factory.mktemp("made")
    examples = token_cache.load(synthetic.task(num_triples=20), "train", str(folder))
    return folder, rows_of(examples)


@pytest.mark.parametrize("damage", ["truncate", "remove", "garble", "other ids"])
def test_damaged_folder_is_made_anew(tmp_path, made, damage, caplog, quick):
    shutil.copytree(made[0], tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    tokens = folder / "targets.tokens"
    if damage == "truncate":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif damage == "remove":
        tokens.unlink()
    elif damage == "garble":
        (folder / "description.json").write_text("{")
    else:
        ids = np.fromfile(tokens, "<u2")
        ids[0] += 1
        ids.tofile(tokens)
    task = synthetic.task(num_triples=20)
    examples = token_cache.load(task, "train", str(tmp_path / "cache"))
    assert rows_of(examples) == made[1]
    warning = "no longer gives the ids" if damage == "other ids" else "Damaged token"
    assert warning in caplog.text


def test_lock_lets_one_process_tokenize(tmp_path, calls, quick):
    """A second loader that waits for the lock finds the work done."""
    task = synthetic.task(num_triples=50)
    key = task_identity.cache_key(task, "train", tokenized.FORMAT)
    lock = open(tmp_path / f"{key}.lock", "w")  # noqa: SIM115
    with lock, token_cache._exclusive(lock):
        result = []
        thread = threading.Thread(
            target=lambda: result.append(token_cache.load(task, "train", str(tmp_path)))
        )
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not result and not calls
    thread.join(30)
    assert len(result[0]) == 50


def test_without_locks_the_slower_of_two_uses_what_is_there(
    tmp_path, monkeypatch, quick
):
    def no_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    task = synthetic.task(num_triples=20)
    root = tmp_path / "cache"
    build = token_cache._build
    faster = []

    def build_and_be_overtaken(*args):
        build(*args)
        if not faster:
            faster.append(1)
            token_cache.load(task, "train", str(root))

    monkeypatch.setattr(token_cache.fcntl, "flock", no_lock)
    monkeypatch.setattr(token_cache, "_build", build_and_be_overtaken)
    monkeypatch.setattr(token_cache.shutil, "rmtree", lambda *_, **__: None)
    examples = token_cache.load(task, "train", str(root))
    key = task_identity.cache_key(task, "train", tokenized.FORMAT)
    assert faster and len(examples) == 20
    found = pathlib.Path(examples.texts["inputs"].tokens.filename)
    assert found.parent == root / key


def test_what_a_killed_build_left_is_removed(tmp_path, caplog, quick):
    task = synthetic.task(num_triples=20)
    key = task_identity.cache_key(task, "train", tokenized.FORMAT)
    (tmp_path / f"{key}.abcd" / "new").mkdir(parents=True)
    (tmp_path / f"{key}.abcd" / "new" / "inputs.tokens").write_bytes(b"half")
    (tmp_path / "another.abcd").mkdir()
    token_cache.load(task, "train", str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([key, f"{key}.lock", "another.abcd"])
    assert "its building was interrupted" in caplog.text


def test_environment_variable_wins(tmp_path, monkeypatch, quick):
    monkeypatch.setenv("SENTENCE_T5_CACHE", str(tmp_path / "wins"))
    token_cache.load(synthetic.task(num_triples=3), "train", str(tmp_path / "loses"))
    assert [path.name for path in tmp_path.iterdir()] == ["wins"]
    monkeypatch.setenv("SENTENCE_T5_CACHE", "gs://bucket/tokens")
    with pytest.raises(ValueError, match="must be a local folder"):
        token_cache.load(synthetic.task(num_triples=3), "train", None)


def test_folder_that_cannot_be_written(tmp_path, caplog, quick):
    (tmp_path / "file").write_text("in the way")
    task = synthetic.task(num_triples=3)
    examples = token_cache.load(task, "train", str(tmp_path / "file"))
    assert len(examples) == 3
    assert "cannot be written" in caplog.text
    folder = pathlib.Path(examples.texts["inputs"].tokens.filename).parent
    assert folder.exists()
    del examples
    assert not folder.exists()


# Tasks of other kinds.


def seqio_task(rows, preprocessors, **source_options):
    """A task as a user may write it, on nothing of ours."""

    def dataset_fn(split, shuffle_files):
        del split, shuffle_files
        return tf.data.Dataset.from_tensor_slices(
            {key: [row[key] for row in rows] for key in rows[0]}
        )

    feature = seqio.Feature(vocabularies.synthetic(), add_eos=True)
    return seqio.Task(
        "of_a_user",
        seqio.FunctionDataSource(dataset_fn, splits=["train"], **source_options),
        output_features={"inputs": feature, "targets": feature},
        preprocessors=preprocessors,
    )


PLAIN_STEPS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
ROWS = [{"inputs": f"red {i}", "targets": f"box {i}"} for i in range(12)]


def test_task_of_a_user(tmp_path):
    examples = token_cache.load(seqio_task(ROWS, PLAIN_STEPS), "train", str(tmp_path))
    encode = vocabularies.synthetic().encode
    assert rows_of(examples) == [
        {key: [*encode(text), 1] for key, text in row.items()} for row in ROWS
    ]
    assert list(tmp_path.iterdir()) == []  # Nobody knows what the function reads.


def test_padding_within_a_text_is_refused(tmp_path):
    def pad_in_the_middle(row):
        ids = tf.constant([5, 0, 7, 1])
        return {"inputs": ids, "targets": tf.constant([5, 1])}

    steps = [lambda rows: rows.map(pad_in_the_middle)]
    with pytest.raises(
        ValueError, match=r"'inputs' has ids from 0 to 7, expected 1 to"
    ):
        token_cache.load(seqio_task(ROWS, steps), "train", str(tmp_path))


def test_text_without_eos_is_refused(tmp_path):
    task = seqio_task(ROWS, [seqio.preprocessors.tokenize])
    with pytest.raises(ValueError, match=r"'of_a_user'.*does not end in EOS") as error:
        token_cache.load(task, "train", str(tmp_path))
    assert "append_eos_after_trim" in str(error.value)


def test_random_step_would_be_frozen_and_is_refused(tmp_path):
    @seqio.map_over_dataset(num_seeds=1)
    def draw(row, seed):
        start = tf.random.stateless_uniform([], seed, 0, 1 << 20, tf.int32)
        return row | {"inputs": tf.strings.as_string(start)}

    task = seqio_task(ROWS, [draw, *PLAIN_STEPS])
    with pytest.raises(ValueError, match=r"frozen for all epochs.*num_negatives"):
        token_cache.load(task, "train", str(tmp_path))


def test_task_without_rows(tmp_path):
    path = write(tmp_path / "x.jsonl", pairs(1))
    task = files.task(path, vocabularies.synthetic())
    task.source.blocks = lambda split: iter([])
    with pytest.raises(ValueError, match="no rows in split 'train'"):
        token_cache.load(task, "train", str(tmp_path))
    assert not [each for each in tmp_path.iterdir() if each.is_dir()]


def test_bad_row_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "x.jsonl", [*pairs(1500), {"anchor": "a"}])
    task = files.task(path, vocabularies.synthetic())
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1501: no column 'positive'"):
        token_cache.load(task, "train", str(tmp_path / "cache"))
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]


def test_bad_row_is_named_through_tensorflow_too(tmp_path):
    path = write(tmp_path / "x.jsonl", [*pairs(3), {"anchor": "a"}])
    task = files.task(path, vocabularies.synthetic())

    def identity(dataset):
        return dataset

    task = task.replace(preprocessors=[*task.preprocessors, identity])
    with pytest.raises(ValueError, match=r"x\.jsonl, line 4: no column 'positive'"):
        token_cache.load(task, "train", str(tmp_path / "cache"))


def split_at(separator, dataset):
    def split(line):
        cells = tf.strings.split(line, separator)
        return {"inputs": cells[0], "targets": cells[1]}

    return dataset.map(split)


def test_file_source_of_a_user_is_cached_by_contents(tmp_path):
    def task(text):
        (tmp_path / "x.txt").write_text(text)
        feature = seqio.Feature(vocabularies.synthetic(), add_eos=True)
        split = functools.partial(split_at, "\t")
        return seqio.Task(
            "lines",
            seqio.TextLineDataSource({"train": str(tmp_path / "x.txt")}),
            {"inputs": feature, "targets": feature},
            [split, *PLAIN_STEPS],
        )

    def key(text):
        return task_identity.cache_key(task(text), "train", 1)

    assert key("a\tb\n") == key("a\tb\n") != key("a\tc\n")
    examples = token_cache.load(task("a\tb\n"), "train", str(tmp_path))
    assert examples.row(0)["targets"] == [*vocabularies.synthetic().encode("b"), 1]


def test_description_of_a_preprocessor_follows_its_arguments():
    def make(value):
        return lambda dataset: dataset.take(value)

    step = seqio.preprocessors.append_eos_after_trim
    described = [
        task_identity.describe(each)
        for each in (
            step,
            make(1),
            make(2),
            functools.partial(step, sequence_length=None),
            functools.partial(step, sequence_length={"inputs": 3}),
            seqio.CacheDatasetPlaceholder(required=True),
            seqio.CacheDatasetPlaceholder(required=False),
        )
    ]
    texts = [json.dumps(each, sort_keys=True) for each in described]
    assert len(set(texts)) == len(texts)
    assert json.dumps(task_identity.describe(make(1)), sort_keys=True) == texts[1]
