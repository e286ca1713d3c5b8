"""Dataset configs: from a task to batches, and mistakes refused before training."""

import json
import logging
import os
import pathlib
import time

import numpy as np
import pytest
import seqio

from sentence_t5 import datasets, schedules, vocabularies
from sentence_t5.tasks import files, sts, synthetic, text_pairs

DATA = pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", ""))
LENGTHS = {"inputs": 8, "targets": 8}


@pytest.fixture(autouse=True)
def own_cache_and_log(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SENTENCE_T5_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(logging.getLogger("sentence_t5"), "propagate", True)


@pytest.fixture(scope="module")
def vocabulary():
    return vocabularies.synthetic()


def rows(num, negatives=None):
    made = [{"anchor": f"red box {i}", "positive": f"box {i}"} for i in range(num)]
    if negatives is not None:
        for row, texts in zip(made, negatives, strict=True):
            row["negative"] = texts
    return made


@pytest.fixture
def make_task(tmp_path, vocabulary, monkeypatch):
    """Makes a task of rows in a file; the check against SeqIO is for other tests."""
    monkeypatch.setattr(
        datasets.token_cache,
        "_seqio_rows",
        lambda task, split: datasets.token_cache._rows(
            text_pairs.encode(task, next(task.source.blocks(split)))
        ),
    )

    def make(made, name="t", negatives="negative", vocabulary=vocabulary):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        has_negatives = any("negative" in row for row in made)
        return files.task(
            str(path),
            vocabulary,
            negatives=negatives if has_negatives else None,
            name=name,
        )

    return make


def config(task, **options):
    return datasets.DatasetConfig(task, **{"task_feature_lengths": LENGTHS} | options)


def test_from_a_task_to_batches(make_task, vocabulary):
    made = rows(12, [["a", "b"], ["c"], []] * 4)
    cfg = config(make_task(made), batch_size=4, num_negatives=2)
    examples = datasets.load_examples(cfg)
    batches = datasets.make_batches(cfg, examples)
    seen = []
    with datasets.prefetch(batches, 3, put=lambda batch: batch) as ahead:
        for step, batch, ids in ahead:
            for i, index in enumerate(ids):
                encoded = [*vocabulary.encode(made[index]["anchor"]), 1]
                np.testing.assert_array_equal(
                    batch["left_tokens"][i], encoded + [0] * (8 - len(encoded))
                )
                negatives = made[index]["negative"]
                assert batch["negative_mask"][i].sum() == len(negatives)
                for n, text in enumerate(negatives):
                    expected = [*vocabulary.encode(text), 1]
                    found = batch["negative_tokens"][i, n, : len(expected)]
                    assert found.tolist() == expected
            seen.append((step, ids.tolist()))
            if step == 5:
                break
    assert [step for step, _ in seen] == [3, 4, 5]
    assert sorted(index for _, ids in seen for index in ids) == list(range(12))


def test_scores_reach_the_evaluation_batches(tmp_path, vocabulary):
    path = tmp_path / "x.tsv"
    lines = [f"{i / 2}\tred {i}\tbox {i}" for i in range(10)]
    path.write_text("\n".join(["score\tsentence1\tsentence2", *lines]))
    cfg = config(sts.task(str(path), vocabulary), split="validation", batch_size=4)
    examples = datasets.load_examples(cfg)
    batches = list(datasets.eval_batches(cfg, examples))
    mask = np.concatenate([batch["row_mask"] for batch in batches])
    scores = np.concatenate([batch["scores"] for batch in batches])
    assert mask.tolist() == [True] * 10 + [False] * 2
    np.testing.assert_array_equal(scores[mask], np.arange(10) / 2)


def test_evaluation_has_negatives_as_training_has(make_task):
    task = make_task(rows(3, [["a", "b", "c"], [], ["d"]]))
    cfg = config(task, batch_size=2, num_negatives=2)
    first, second = datasets.eval_batches(cfg, datasets.load_examples(cfg))
    assert first["negative_mask"].tolist() == [[True, True], [False, False]]
    assert second["negative_mask"].tolist() == [[True, False], [False, False]]
    assert second["row_mask"].tolist() == [True, False]


# Mistakes.


def test_dataset_smaller_than_the_batch(make_task):
    cfg = config(make_task(rows(3)), batch_size=8)
    message = r"has 3 examples, the global batch is 8"
    with pytest.raises(ValueError, match=message):
        datasets.make_batches(cfg, datasets.load_examples(cfg))
    assert datasets.make_batches(
        config(make_task(rows(3)), batch_size=3), datasets.load_examples(cfg)
    )


def test_batch_that_hosts_cannot_share(make_task):
    cfg = config(make_task(rows(12)), batch_size=10)
    examples = datasets.load_examples(cfg)
    for call in (datasets.make_batches, datasets.eval_batches):
        with pytest.raises(ValueError, match=r"by 4 hosts evenly.*\[8, 12\]"):
            call(cfg, examples, process_index=0, process_count=4)
    small = config(make_task(rows(12)), batch_size=2)
    with pytest.raises(ValueError, match=r"nearest sizes that can are \[4\]"):
        datasets.make_batches(small, examples, process_count=4)


def test_negatives_wanted_and_absent(make_task):
    cfg = config(make_task(rows(4)), num_negatives=1)
    with pytest.raises(ValueError, match="'t' has no feature 'negative_targets'") as e:
        datasets.load_examples(cfg)
    assert "DatasetConfig.num_negatives=1" in str(e.value)
    empty = make_task(rows(4, [[]] * 4), negatives="misspelt")
    with pytest.raises(ValueError, match="no row of task 't' has any"):
        datasets.load_examples(config(empty, num_negatives=1))


def test_negatives_present_and_unused(make_task, caplog):
    examples = datasets.load_examples(config(make_task(rows(2, [["a", "b"], ["c"]]))))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "3 hard negatives that are NOT USED" in warnings[0]
    cfg = config("t", batch_size=2)
    assert set(datasets.make_batches(cfg, examples).batch(0)[0]) == {
        "left_tokens",
        "right_tokens",
    }


def test_unused_and_truncated_texts_are_counted(make_task, caplog):
    caplog.set_level(logging.INFO, "sentence_t5")
    made = rows(3, [["a", "b", "c"], [], ["d"]])
    made[0]["anchor"] = "red box " * 9
    cfg = config(make_task(made), batch_size=3, num_negatives=1)
    batches = datasets.make_batches(cfg, datasets.load_examples(cfg))
    assert batches.num_unused_negatives == 2
    assert batches.num_truncated == {"inputs": 1, "targets": 0, "negative_targets": 0}
    assert "1 of 3 texts of 'inputs' are longer than 8 tokens" in caplog.text
    assert "2 hard negatives are left out of each epoch" in caplog.text


def test_missing_feature_and_split_name_the_task(make_task):
    task = make_task(rows(2))
    with pytest.raises(ValueError, match="'t' has no split 'validation'; it has"):
        datasets.load_examples(config(task, split="validation"))
    feature = seqio.Feature(vocabularies.synthetic())
    lacking = seqio.Task("lacking", task.source, {"inputs": feature})
    with pytest.raises(ValueError, match="'lacking' has no feature 'targets'"):
        datasets.load_examples(config(lacking))


def test_table_too_small_for_the_vocabulary(make_task):
    examples = datasets.load_examples(config(make_task(rows(2))))
    datasets.check_token_ids(examples, 1380)
    # The pieces alone are not enough: a text may hold a sentinel.
    with pytest.raises(ValueError, match="vocab_size=1280 rows") as error:
        datasets.check_token_ids(examples, 1280)
    assert "at least 1380" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task_feature_lengths": {"inputs": 8}}, "must have .*'targets'"),
        ({"task_feature_lengths": LENGTHS | {"target": 8}}, "got .*'target': 8"),
        ({"task_feature_lengths": {"inputs": 1, "targets": 8}}, "at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_negatives": -1}, "num_negatives must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_config_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        config("t", **options)


def test_config_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"batch_size must be an integer, got 2\.0"):
        config("t", batch_size=2.0)
    with pytest.raises(TypeError, match=r"call it: `@files\.task"):
        config(files.task).tasks()


def test_registered_names_and_modules(make_task, tmp_path, monkeypatch):
    name = "registered_by_a_module"
    (tmp_path / "my_tasks.py").write_text(
        "import seqio\nfrom sentence_t5.tasks import synthetic\n"
        f"seqio.TaskRegistry.add_provider({name!r}, synthetic.task(4, name={name!r}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=name):
        config(name).tasks()
    try:
        ((task, rate),) = config(name, module="my_tasks").tasks()
        assert (task.name, rate) == (name, 1.0)
    finally:
        seqio.TaskRegistry.remove(name)


def test_far_resume_is_a_seek(make_task, monkeypatch):
    """Nothing before the step is read or tokenized again."""
    cfg = config(make_task(rows(20_000)), batch_size=64)
    datasets.load_examples(cfg)
    encoded = []
    encode = text_pairs.encode
    monkeypatch.setattr(
        text_pairs,
        "encode",
        lambda task, block: encoded.append(len(block)) or encode(task, block),
    )
    start = time.process_time()
    batches = datasets.make_batches(cfg, datasets.load_examples(cfg))
    with datasets.prefetch(batches, 20_000, put=lambda batch: batch) as ahead:
        assert next(ahead)[0] == 20_000
    assert time.process_time() - start < 2
    assert sum(encoded) <= 8


# Mixtures.


def test_mixture_by_rate(make_task):
    one, two = make_task(rows(20), "one"), make_task(rows(5), "two")
    mixture = seqio.Mixture("both", [(one, 3.0), (two, 1.0)])
    cfg = config(mixture, batch_size=8)
    examples = datasets.load_examples(cfg)
    assert len(examples) == 25
    assert examples.task_name == "one+two"
    assert examples.row(20) == examples.row(0)
    batches = datasets.make_batches(cfg, examples)
    for step in range(10):
        ids = batches.batch(step)[1]
        assert (ids < 20).sum() == 6 and (ids >= 20).sum() == 2
        assert len(set(ids.tolist())) == 8
    other = seqio.Mixture("both", [(one, 1.0), (two, 1.0)])
    fingerprint = datasets.load_examples(config(other)).fingerprint
    assert fingerprint != examples.fingerprint
    datasets.check_token_ids(examples, 1380)
    with pytest.raises(ValueError, match="evaluate its tasks one by one"):
        datasets.eval_batches(cfg, examples)
    with pytest.raises(ValueError, match="evaluate its tasks one by one"):
        datasets.scores(examples)
    with pytest.raises(IndexError, match="25 rows"):
        examples.row(25)


@pytest.mark.parametrize(
    ("rates", "batch_size", "expected"),
    [
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([0.7, 0.3], 10, [7, 3]),
        ([1, 1000], 8, [0, 8]),
        ([1], 5, [5]),
    ],
)
def test_batch_shares(rates, batch_size, expected):
    assert schedules.batch_shares(rates, batch_size) == expected


def test_mixture_that_cannot_be(make_task):
    one, two = make_task(rows(20), "one"), make_task(rows(3), "two")
    rare = seqio.Mixture("rare", [(one, 1000), (two, 1)])
    cfg = config(rare, batch_size=8)
    with pytest.raises(
        ValueError, match=r"'two' has rate 0\.000999: less than one row"
    ):
        datasets.make_batches(cfg, datasets.load_examples(cfg))
    small = seqio.Mixture("small", [(one, 1), (two, 1)])
    cfg = config(small, batch_size=8)
    with pytest.raises(ValueError, match=r"'two' .* has 3 examples.* \(4 of it from"):
        datasets.make_batches(cfg, datasets.load_examples(cfg))
    other = make_task(rows(3), "other", vocabulary=vocabularies.synthetic(extra_ids=0))
    mixture = seqio.Mixture("two_vocabularies", [(one, 1), (other, 1)])
    with pytest.raises(ValueError, match=r"'one' and 'other'.* different vocab"):
        datasets.load_examples(config(mixture))


def test_mixture_with_a_task_that_lacks_a_feature(make_task):
    one, two = make_task(rows(2, [["a"], ["b"]]), "one"), make_task(rows(2), "two")
    with pytest.raises(ValueError, match=r"(?s)one: .*negative_targets.*two: "):
        seqio.Mixture("uneven", [(one, 1), (two, 1)])


@pytest.mark.skipif(
    not (DATA / "nli/triplets.train.tsv").is_file(),
    reason="SENTENCE_T5_TEST_DATA names no folder with nli/triplets.train.tsv",
)
def test_real_triples():
    vocabulary = vocabularies.sentencepiece(str(DATA / "vocab/spiece.model"))
    task = files.task(
        str(DATA / "nli/triplets.train.tsv"), vocabulary, negatives="hard_negative"
    )
    cfg = config(
        task,
        task_feature_lengths={"inputs": 24, "targets": 24},
        batch_size=128,
        num_negatives=1,
    )
    examples = datasets.load_examples(cfg)
    assert len(examples) == 11_860
    datasets.check_token_ids(examples, 32_128)
    batch, ids = datasets.make_batches(cfg, examples).batch(92)
    assert batch["negative_mask"].all() and len(set(ids.tolist())) == 128
    first = (DATA / "nli/triplets.train.tsv").read_text("utf-8").splitlines()[1]
    expected = [*vocabulary.encode(first.split("\t")[0]), 1]
    assert examples.row(0)["inputs"] == expected


def test_synthetic_task_is_what_the_default_config_trains_on():
    cfg = config(synthetic.task(num_triples=200), batch_size=64, num_negatives=1)
    examples = datasets.load_examples(cfg)
    batch, _ = datasets.make_batches(cfg, examples).batch(2)
    assert batch["negative_mask"].all()
    assert (batch["left_tokens"] != batch["right_tokens"]).any()
