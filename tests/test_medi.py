"""Rows with instructions: read, sampled, tokenized, mixed and batched."""

import gzip
import json
import logging

import numpy as np
import pytest
import seqio

from sentence_t5 import datasets, names, token_cache, vocabularies
from sentence_t5.tasks import adapted, files, labelled, medi, mixtures, text_pairs

SIDES = ("inputs", "targets")
ASK, ANSWER = "Represent the question:", "Represent the answer:"


@pytest.fixture(scope="module")
def vocabulary():
    return vocabularies.synthetic()


@pytest.fixture(autouse=True)
def own_cache_and_log(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SENTENCE_T5_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)


@pytest.fixture
def quick(monkeypatch):
    """Leaves out the check against SeqIO, which costs seconds for each task."""
    monkeypatch.setattr(
        token_cache,
        "_seqio_rows",
        lambda task, split: token_cache._rows(
            text_pairs.encode(task, next(task.source.blocks(split)))
        ),
    )


def record(i, task_id="a", neg="one"):
    neg = {
        "one": [ANSWER, f"cup {i}"],
        "two": [[ANSWER, f"cup {i}"], ["", f"mug {i}"]],
        "none": None,
    }[neg]
    return {
        "query": [ASK, f"red box {i}"],
        "pos": [f" {ANSWER} ", f"box {i}"],
        "neg": neg,
        "task_id": task_id,
    }


def write(path, records):
    data = "".join(json.dumps(r) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def rows_of(task):
    return [row for block in task.source.blocks("train") for row in block]


def config(task, **options):
    lengths = {"inputs": 24, "targets": 24}
    return datasets.DatasetConfig(task, **{"task_feature_lengths": lengths} | options)


# --- rows -----------------------------------------------------------------------------


def test_rows_of_each_task_in_the_files_order(tmp_path, vocabulary):
    made = [record(i, "ab"[i % 2], ("one", "two", "none")[i % 3]) for i in range(12)]
    for name in ("m.jsonl", "m.jsonl.gz"):
        mixture = medi.mixture(write(tmp_path / name, made), vocabulary)
        assert [task.name for task in mixture.tasks] == ["medi_a", "medi_b"]
        first, second = map(rows_of, mixture.tasks)
        assert [row["inputs"] for row in second] == [
            f"red box {i}" for i in range(1, 12, 2)
        ]
        assert first[0] == {
            "inputs": "red box 0",
            "inputs_instruction": ASK,
            "targets": "box 0",
            "targets_instruction": ANSWER,
            "negative_targets": ["cup 0"],
            "negative_targets_instruction": [ANSWER],
        }
        assert first[2]["negative_targets"] == ["cup 4", "mug 4"]
        assert first[2]["negative_targets_instruction"] == [ANSWER, ""]
        assert first[1]["negative_targets"] == []


def test_seqio_gives_the_same_ids(tmp_path, vocabulary):
    made = [record(i, neg=("two", "none", "one")[i % 3]) for i in range(6)]
    (task,) = medi.mixture(write(tmp_path / "m.jsonl", made), vocabulary).tasks
    rows = token_cache._seqio_rows(task, "train")
    assert rows == token_cache._rows(text_pairs.encode(task, rows_of(task)))
    for i, row in enumerate(rows):
        ask, text = vocabulary.encode(ASK), vocabulary.encode(f"red box {i}")
        assert row["inputs"] == [*ask, *text, 1]
        assert row["inputs_instruction_length"] == len(ask)
        lengths = row["negative_targets_instruction_length"]
        assert lengths == [len(vocabulary.encode(ANSWER)), 0][: (2, 0, 1)[i % 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": "text"}, r"line 2: 'query' must be \[instruction, text\], got 'tex"),
        ({"pos": ["a", "b", "c"]}, "line 2: 'pos' must be"),
        ({"neg": [["a", None]]}, "line 2: 'neg' must be"),
        ({"task_id": None}, "line 2: no task_id, got None"),
        ({"query": ["", "\ud800"]}, "line 2: 'query' holds half a surrogate pair"),
    ],
)
def test_row_of_another_form(tmp_path, change, message):
    path = write(tmp_path / "m.jsonl", [record(0), record(1) | change])
    with pytest.raises(ValueError, match=message):
        medi.scan(path)


def test_file_of_another_form(tmp_path):
    with pytest.raises(ValueError, match="line 1: 'query' must be"):
        medi.scan(write(tmp_path / "m.json", [[record(0)]]))
    with pytest.raises(ValueError, match="expected a JSONL file"):
        medi.scan(write(tmp_path / "m.tsv", []))
    with pytest.raises(ValueError, match="the file is empty"):
        medi.scan(write(tmp_path / "m.jsonl", []))


def test_large_tasks_are_sampled_and_small_ones_left_out(tmp_path, vocabulary, caplog):
    made = [record(i, "large") for i in range(100)]
    made += [record(i, "middle") for i in range(20)] + [record(0, "small")]
    path = write(tmp_path / "m.jsonl", made)

    def make(**options):
        options = {"max_rows": 30, "min_rows": 5} | options
        return medi.mixture(path, vocabulary, **options)

    large, middle = make().tasks
    texts = [row["inputs"] for row in rows_of(large)]
    assert len(set(texts)) == 30 and texts != [f"red box {i}" for i in range(30)]
    assert [int(text.split()[-1]) for text in texts] == sorted(
        int(text.split()[-1]) for text in texts
    )
    assert texts == [row["inputs"] for row in rows_of(make().tasks[0])]
    assert texts != [row["inputs"] for row in rows_of(make(seed=1).tasks[0])]
    assert "task small is left out: 1 rows, min_rows is 5" in caplog.text
    assert [make().get_rate(task) for task in (large, middle)] == [30, 20]
    warm = make(temperature=2)
    assert warm.get_rate(warm.tasks[0]) == pytest.approx(30**0.5)
    (only,) = make(only=["middle"]).tasks
    assert only.name == "medi_middle"
    with pytest.raises(ValueError, match="no task_id smal; it has large, middle, sm"):
        make(without_in_batch=["smal"])
    with pytest.raises(ValueError, match="no task has min_rows=101 rows"):
        make(min_rows=101)


# --- instructions for any task --------------------------------------------------------


def plain_task(tmp_path, vocabulary, name="plain", num=6):
    made = [
        {"anchor": f"red box {i}", "positive": f"box {i}", "negative": ["cup", "mug"]}
        for i in range(num)
    ]
    path = write(tmp_path / f"{name}.jsonl", made)
    return files.task(path, vocabulary, negatives="negative", name=name)


def test_instruction_on_one_side_both_or_none(tmp_path, vocabulary, quick):
    plain = plain_task(tmp_path, vocabulary)
    text = [*vocabulary.encode("red box 0"), 1], [*vocabulary.encode("box 0"), 1]
    ask, answer = vocabulary.encode(ASK), vocabulary.encode(ANSWER)
    for left, right in ((ASK, None), (None, ANSWER), (ASK, ANSWER)):
        task = adapted.task(plain, left, right)
        row = datasets.load_examples(config(task, num_negatives=2)).row(0)
        expected = [ask if left else [], answer if right else []]
        for key, before, own in zip(SIDES, expected, text, strict=True):
            assert row[key] == [*before, *own]
            assert row[f"{key}_instruction_length"] == len(before)
        before = expected[1]
        for ids, word in zip(row["negative_targets"], ("cup", "mug"), strict=True):
            assert ids == [*before, *vocabulary.encode(word), 1]
        lengths = row["negative_targets_instruction_length"]
        assert lengths == [len(before)] * 2
    again = adapted.task(adapted.task(plain, ASK, ANSWER), left_instruction="")
    row = datasets.load_examples(config(again, num_negatives=2)).row(0)
    assert row["inputs"] == text[0] and row["targets"] == [*answer, *text[1]]


def test_empty_instructions_are_the_plain_task(tmp_path, vocabulary, quick):
    plain = plain_task(tmp_path, vocabulary)
    cfg = config(plain, num_negatives=1, batch_size=4)
    expected = datasets.make_batches(cfg, datasets.load_examples(cfg)).batch(3)[0]
    for empty in (None, "", "  \n"):
        cfg = config(adapted.task(plain, empty, empty), num_negatives=1, batch_size=4)
        batch = datasets.make_batches(cfg, datasets.load_examples(cfg)).batch(3)[0]
        assert batch.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(batch[key], values)


def test_only_own_tasks_can_be_adapted(vocabulary):
    source = seqio.FunctionDataSource(lambda split, shuffle_files: None, ["train"])
    feature = seqio.Feature(vocabulary)
    foreign = seqio.Task("foreign", source, {"inputs": feature})
    with pytest.raises(ValueError, match="'foreign' is not of this package's own kind"):
        adapted.task(foreign, ASK)
    with pytest.raises(ValueError, match=r"can't be counted\. Give the mixture"):
        mixtures.mixture([foreign])


@pytest.mark.parametrize("name", ["p.tsv", "p.jsonl"])
def test_labelled_pairs_become_triples(tmp_path, vocabulary, name, caplog):
    pairs = [("a", "b", 1), ("x", "y", 0), ("a", "c", 0), ("a", "d", 1), ("a", "e", 2)]
    columns = ("sentence1", "sentence2", "label")
    if name == "p.tsv":
        lines = ["\t".join(columns), *("\t".join(map(str, p)) for p in pairs)]
    else:
        lines = [json.dumps(dict(zip(columns, p, strict=True))) for p in pairs]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    task = labelled.task(str(tmp_path / name), vocabulary)
    assert rows_of(adapted.task(task, ASK)) == [
        {
            "inputs": "a",
            "inputs_instruction": ASK,
            "targets": right,
            "targets_instruction": "",
            "negative_targets": ["c"],
            "negative_targets_instruction": [""],
        }
        for right in ("b", "d")
    ]
    assert "1 left texts without a positive are left out" in caplog.text
    other = labelled.task(str(tmp_path / name), vocabulary, positive=[2], negative=[1])
    (row,) = rows_of(other)
    assert (row["targets"], row["negative_targets"]) == ("e", ["b", "d"])
    with pytest.raises(ValueError, match="A label is repeated"):
        labelled.task(str(tmp_path / name), vocabulary, negative=[1])


# --- batches --------------------------------------------------------------------------


def test_batches_of_one_task_each_with_instructions(tmp_path, vocabulary, quick):
    made = [record(i, "a", "two") for i in range(60)]
    made += [record(i, "b") for i in range(20)]
    path = write(tmp_path / "m.jsonl", made)
    mixture = medi.mixture(path, vocabulary, without_in_batch=["b"])
    cfg = config(mixture, batch_size=8, num_negatives=2, mix_by="batches")
    batches = datasets.make_batches(cfg, datasets.load_examples(cfg))
    ask, answer = len(vocabulary.encode(ASK)), len(vocabulary.encode(ANSWER))
    num_a = 0
    for step in range(80):
        batch, rows = batches.batch(step)
        (of_a,) = set((rows < 60).tolist())
        num_a += of_a
        assert (batch[names.IN_BATCH] == of_a).all()
        assert (batch[names.LEFT_INSTRUCTION_LENGTHS] == ask).all()
        assert (batch[names.RIGHT_INSTRUCTION_LENGTHS] == answer).all()
        lengths = batch[names.NEGATIVE_INSTRUCTION_LENGTHS]
        assert lengths.tolist() == [[answer, 0]] * 8
        assert batch[names.NEGATIVE_MASK].tolist() == [[True, bool(of_a)]] * 8
    assert num_a == 60
    cfg = config(mixture, batch_size=32, mix_by="batches")
    with pytest.raises(ValueError, match=r"'medi_b' .* has 20 examples, the glob"):
        datasets.make_batches(cfg, datasets.load_examples(cfg))


def test_tasks_with_and_without_instructions_in_one_batch(tmp_path, vocabulary, quick):
    plain = plain_task(tmp_path, vocabulary, num=20)
    with_instructions = adapted.task(plain, ASK, in_batch_negatives=False, name="z")
    mixture = mixtures.mixture([plain, with_instructions], rates=[3, 1])
    cfg = config(mixture, batch_size=8)
    batch, rows = datasets.make_batches(cfg, datasets.load_examples(cfg)).batch(0)
    assert (rows < 20).tolist() == [True] * 6 + [False] * 2
    ask = len(vocabulary.encode(ASK))
    lengths = batch[names.LEFT_INSTRUCTION_LENGTHS].tolist()
    assert lengths == [0] * 6 + [ask] * 2
    assert batch[names.IN_BATCH].tolist() == [True] * 6 + [False] * 2
    assert not batch[names.RIGHT_INSTRUCTION_LENGTHS].any()


def test_task_of_a_mixture_without_any_negative(tmp_path, vocabulary, quick, caplog):
    made = [record(i, "a") for i in range(4)] + [record(i, "b", "none") for i in "xyz"]
    path = write(tmp_path / "m.jsonl", made)
    cfg = config(medi.mixture(path, vocabulary), num_negatives=1)
    datasets.load_examples(cfg)
    assert "No row of task 'medi_b' has hard negatives" in caplog.text
    alone = medi.mixture(path, vocabulary, without_in_batch=["b"])
    with pytest.raises(ValueError, match=r"'medi_b' has any .*no in-batch negatives"):
        datasets.load_examples(config(alone, num_negatives=1))


def test_mixtures_by_size_and_temperature(tmp_path, vocabulary):
    tasks = [
        plain_task(tmp_path, vocabulary, name, num)
        for name, num in (("p", 16), ("q", 4))
    ]
    by_size = mixtures.mixture(tasks)
    assert [by_size.get_rate(task) for task in tasks] == [16, 4]
    warm = mixtures.mixture(tasks, temperature=2.0)
    assert [warm.get_rate(task) for task in tasks] == [4, 2]
    for wrong, message in (
        ({"rates": [1]}, "got 1 rates for 2 tasks"),
        ({"rates": [1, 0]}, "q: got 0, expected a positive number"),
        ({"temperature": float("nan")}, "temperature: got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            mixtures.mixture(tasks, **wrong)
    with pytest.raises(ValueError, match="Two tasks of the mixture are called p"):
        mixtures.mixture([tasks[0], tasks[0]])


# --- instructions that leave no room --------------------------------------------------


def test_instruction_that_crowds_its_text_out(tmp_path, vocabulary, quick, caplog):
    plain = plain_task(tmp_path, vocabulary)
    task = adapted.task(plain, "red box " * 9)
    before, text = vocabulary.encode("red box " * 9), vocabulary.encode("red box 0")
    lengths = {"inputs": 8, "targets": 8}
    cfg = config(task, task_feature_lengths=lengths, batch_size=2, shuffle=False)
    examples = datasets.load_examples(cfg)
    with pytest.raises(ValueError, match=r"6 of 6 texts of 'inputs' .* half of 8 tok"):
        datasets.make_batches(cfg, examples)
    with pytest.raises(ValueError, match="on_crowding to 'keep_text'"):
        datasets.eval_batches(cfg, examples)
    cfg = config(
        task,
        task_feature_lengths=lengths,
        batch_size=2,
        shuffle=False,
        on_crowding="keep_text",
    )
    batch, _ = datasets.make_batches(cfg, examples).batch(0)
    assert "it is cut for them" in caplog.text
    kept = max(8 - len(text) - 1, 4)
    row = [*before[:kept], *text, 1]
    assert len(row) > 8  # The text is cut too: it has half of the tokens.
    assert batch[names.LEFT_TOKENS][0].tolist() == [*row[:7], 1]
    assert batch[names.LEFT_INSTRUCTION_LENGTHS][0] == kept


def test_text_is_cut_and_not_a_short_instruction(tmp_path, vocabulary, quick):
    task = adapted.task(plain_task(tmp_path, vocabulary), "red")
    lengths = {"inputs": 4, "targets": 8}
    cfg = config(task, task_feature_lengths=lengths, batch_size=2, shuffle=False)
    batch, _ = datasets.make_batches(cfg, datasets.load_examples(cfg)).batch(0)
    row = [*vocabulary.encode("red"), *vocabulary.encode("red box 0")]
    assert batch[names.LEFT_TOKENS][0].tolist() == [*row[:3], 1]
    assert batch[names.LEFT_INSTRUCTION_LENGTHS][0] == len(vocabulary.encode("red"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mix_by": "task"},
            r"mix_by must be one of \('rows', 'batches'\), got 'task'",
        ),
        ({"on_crowding": "drop"}, "on_crowding must be one of .*, got 'drop'"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        config("t", **options)
