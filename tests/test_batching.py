"""Batches by index: the order, the padding and the negatives, against brute force."""

import collections
import threading
import time

import numpy as np
import pytest

from sentence_t5 import batching, permutation, prefetching, text_rows
from sentence_t5.tokenized import Texts, TokenizedExamples

EOS = 1


def texts(rows):
    tokens = np.array([token for row in rows for token in row], np.uint16)
    return Texts(tokens, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def examples(num, negatives=None, scores=None):
    """Row i: left [10+i, EOS], right [20+i, 30+i, EOS], negatives as given."""
    columns = {
        "inputs": texts([[10 + i, EOS] for i in range(num)]),
        "targets": texts([[20 + i, 30 + i, EOS] for i in range(num)]),
    }
    negative_rows = None
    if negatives is not None:
        columns["negative_targets"] = texts([text for row in negatives for text in row])
        negative_rows = np.cumsum([0, *map(len, negatives)], dtype=np.int64)
    return TokenizedExamples("t", "train", "f", 100, 99, columns, negative_rows, scores)


def batches(parts, lengths=4, **options):
    if isinstance(parts, TokenizedExamples):
        parts = [batching.Part(parts, options.pop("batch_size"))]
    names = ("inputs", "targets", "negative_targets")
    return batching.TrainBatches(
        parts,
        dict.fromkeys(names, lengths),
        **{
            "seed": 0,
            "shuffle": True,
            "num_negatives": 0,
            "process_index": 0,
            "process_count": 1,
        }
        | options,
    )


# The permutation.


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 12, 16, 17, 255, 256, 257, 5000])
def test_permutation_is_one(num):
    for key in (0, 1, 2**64 - 1):
        result = permutation.permute(np.arange(num), num, key)
        np.testing.assert_array_equal(np.sort(result), np.arange(num))


def test_permutation_is_pinned():
    """A resumed run must find the order it left, whatever was upgraded since."""
    pinned = permutation.permute(np.arange(10), 10, key=7)
    assert pinned.tolist() == [6, 3, 0, 5, 2, 7, 8, 1, 9, 4]
    assert permutation.permute(np.array([999_999_999_999]), 10**12, 3).tolist() == [
        399298539707
    ]
    assert permutation.mix(0, 1, 2) == 17650578182555822980


def test_many_permutations_at_once_are_those_one_by_one():
    nums = np.array([1, 2, 5, 16, 17, 1000, 10**12])
    keys = permutation.mix(3, np.arange(7), 2**64 - 1)
    assert keys.tolist() == [permutation.mix(3, i, 2**64 - 1) for i in range(7)]
    positions = np.stack([0 * nums, nums // 2, nums - 1], axis=1)
    at_once = permutation.permute(positions, nums[:, None], keys[:, None])
    for row, num, key, expected in zip(positions, nums, keys, at_once, strict=True):
        one = permutation.permute(row, int(num), int(key))
        np.testing.assert_array_equal(one, expected)


def test_permutation_looks_random():
    num, keys = 50, 1500
    where = np.array(
        [
            permutation.permute(np.arange(num), num, permutation.mix(k))
            for k in range(keys)
        ]
    )
    counts = np.stack([np.bincount(where[:, i], minlength=num) for i in range(num)])
    # Each of 2500 cells is binomial: mean 30, standard deviation 5.4.
    assert abs(counts - keys / num).max() < 27
    chi_square = ((counts - keys / num) ** 2 / (keys / num)).sum()
    assert abs(chi_square - 49 * 49) < 5 * np.sqrt(2 * 49 * 49)
    # Neighbours do not stay neighbours: |difference| is 1 for 2/n of random pairs.
    assert (np.abs(np.diff(where, axis=1)) == 1).mean() == pytest.approx(
        0.04, abs=0.004
    )


# The order.


def ids(source, steps):
    return [source.batch(step)[1].tolist() for step in steps]


def test_epochs_hold_each_row_once_and_differ():
    source = batches(examples(12), batch_size=4)
    assert source.steps_per_epoch == 3
    epochs = [
        [row for rows in ids(source, range(3 * e, 3 * e + 3)) for row in rows]
        for e in range(4)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_remainder_is_left_out_anew_each_epoch_and_no_batch_mixes_epochs():
    source = batches(examples(11), batch_size=4)
    seen = collections.Counter()
    for epoch in range(40):
        first, second = ids(source, (2 * epoch, 2 * epoch + 1))
        rows = first + second
        assert len(set(rows)) == 8
        seen.update(rows)
    assert set(seen) == set(range(11))


def test_order_is_a_pure_function_of_seed_and_step():
    steps = range(9)
    whole = ids(batches(examples(12), batch_size=4), steps)
    # A run that is stopped after step 5, in its second epoch, and started again.
    again = ids(batches(examples(12), batch_size=4), range(5, 9))
    assert again == whole[5:]
    # The same at an epoch boundary.
    assert ids(batches(examples(12), batch_size=4), range(6, 9)) == whole[6:]
    assert ids(batches(examples(12), batch_size=4), reversed(steps)) == whole[::-1]
    assert ids(batches(examples(12), batch_size=4, seed=1), steps) != whole
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        batches(examples(12), batch_size=4).batch(-1)


def test_without_shuffling():
    source = batches(examples(5), batch_size=2, shuffle=False)
    assert ids(source, range(3)) == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_hosts_share_one_global_order(num_hosts):
    negatives = [[[5 + i, EOS]] * (i % 3) for i in range(20)]
    whole = batches(examples(20, negatives), batch_size=8, num_negatives=2)
    hosts = [
        batches(
            examples(20, negatives),
            batch_size=8,
            num_negatives=2,
            process_index=host,
            process_count=num_hosts,
        )
        for host in range(num_hosts)
    ]
    for step in (0, 1, 7):
        batch, rows = whole.batch(step)
        parts = [host.batch(step) for host in hosts]
        assert all(len(part[1]) == 8 // num_hosts for part in parts)
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), rows)
        for key, value in batch.items():
            joined = np.concatenate([part[0][key] for part in parts])
            np.testing.assert_array_equal(joined, value)


def test_far_step_is_reached_at_once():
    num = 100_000
    column = Texts(np.full(num, EOS, np.uint16), np.arange(num + 1))
    many = TokenizedExamples(
        "t", "train", "f", 100, 1, {"inputs": column, "targets": column}
    )
    source = batches(many, batch_size=32)
    start = time.process_time()
    assert len(set(source.batch(20_000)[1])) == 32
    assert time.process_time() - start < 0.5


# The arrays.


def test_batch_against_brute_force():
    rng = np.random.default_rng(0)
    left, right = (
        [[*rng.integers(3, 90, rng.integers(0, 9)).tolist(), EOS] for _ in range(30)]
        for _ in range(2)
    )
    columns = {"inputs": texts(left), "targets": texts(right)}
    source = batches(
        TokenizedExamples("t", "train", "f", 100, 90, columns), lengths=5, batch_size=7
    )
    expected_truncated = sum(len(row) > 5 for row in left)
    assert source.num_truncated["inputs"] == expected_truncated > 0

    def padded(row):
        kept = row if len(row) <= 5 else [*row[:4], EOS]
        return kept + [0] * (5 - len(kept))

    for step in range(8):
        batch, rows = source.batch(step)
        assert batch["left_tokens"].dtype == np.int32
        assert batch["left_tokens"].tolist() == [padded(left[i]) for i in rows]
        assert batch["right_tokens"].tolist() == [padded(right[i]) for i in rows]


def test_long_text_ends_in_eos():
    long = texts([[*range(2, 1002), EOS]])
    row, _ = text_rows.pad(long, np.array([0]), 16)
    assert row.shape == (1, 16)
    assert row[0].tolist() == [*range(2, 17), EOS]


def test_empty_text_is_eos_alone():
    assert text_rows.pad(texts([[EOS]]), np.array([0]), 3)[0].tolist() == [[EOS, 0, 0]]


def test_trimmed_lengths_are_what_padding_leaves():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 14, 40)
    some = texts([[*rng.integers(3, 90, size - 1).tolist(), EOS] for size in sizes])
    for lengths in (None, rng.integers(0, sizes).astype(np.int32)):
        some = Texts(some.tokens, some.starts, lengths)
        padded, _ = text_rows.pad(some, np.arange(40), 6)
        counts = np.count_nonzero(padded, axis=1)
        assert counts.tolist() == np.minimum(sizes, 6).tolist()
        wanted = rng.integers(-1, 40, (9, 3))
        found = text_rows.trimmed_lengths(some, wanted, 6)
        np.testing.assert_array_equal(found, np.where(wanted < 0, 0, counts[wanted]))
    none = np.full((2, 3), -1)
    assert text_rows.trimmed_lengths(texts([]), none, 6).tolist() == [[0] * 3] * 2


def test_zero_one_and_five_negatives():
    negatives = [[], [[50, EOS]], [[60 + i, 70 + i, EOS] for i in range(5)]]
    source = batches(
        examples(3, negatives), batch_size=3, num_negatives=2, shuffle=False, lengths=3
    )
    assert source.num_unused_negatives == 3
    drawn = set()
    for epoch in range(20):
        batch, _ = source.batch(epoch)
        tokens, mask = batch["negative_tokens"], batch["negative_mask"]
        assert tokens.shape == (3, 2, 3) and mask.dtype == bool
        assert mask.tolist() == [[False, False], [True, False], [True, True]]
        assert tokens[0].tolist() == [[0, 0, 0], [0, 0, 0]]
        assert tokens[1].tolist() == [[50, EOS, 0], [0, 0, 0]]
        first, second = tokens[2].tolist()
        assert first != second
        assert first in negatives[2] and second in negatives[2]
        drawn.add((first[0], second[0]))
        again, _ = source.batch(epoch)
        np.testing.assert_array_equal(again["negative_tokens"], tokens)
    assert len(drawn) > 8  # Epochs draw different negatives.


def test_negatives_drawn_do_not_depend_on_the_batch():
    negatives = [[[10 * i + j, EOS] for j in range(2, 8)] for i in range(8)]
    small = batches(examples(8, negatives), batch_size=2, num_negatives=3)
    large = batches(examples(8, negatives), batch_size=8, num_negatives=3)

    def by_row(source, steps):
        drawn = {}
        for step in steps:
            batch, rows = source.batch(step)
            drawn |= dict(
                zip(rows.tolist(), batch["negative_tokens"].tolist(), strict=True)
            )
        return drawn

    assert by_row(small, range(4)) == by_row(large, [0])
    assert by_row(small, range(4, 8)) == by_row(large, [1]) != by_row(large, [0])


def test_no_negatives_no_arrays():
    batch, _ = batches(examples(3, [[[5, EOS]]] * 3), batch_size=3).batch(0)
    assert set(batch) == {"left_tokens", "right_tokens"}


# Mixtures.


def test_mixture_gives_each_task_its_share_and_epochs_of_its_own():
    parts = [
        batching.Part(examples(10), 3, first_id=0),
        batching.Part(examples(4), 2, first_id=10),
    ]
    source = batches(parts)
    assert source.steps_per_epoch == 3
    for step in range(12):
        batch, rows = source.batch(step)
        assert [row < 10 for row in rows] == [True] * 3 + [False] * 2
        assert len(set(rows.tolist())) == 5
        expected = [10 + row % 10 for row in rows]
        assert batch["left_tokens"][:, 0].tolist() == expected
    first = [source.batch(step)[1][:3].tolist() for step in range(3)]
    assert len({row for rows in first for row in rows}) == 9
    second = [source.batch(step)[1][3:].tolist() for step in (4, 5)]
    assert sorted(row for rows in second for row in rows) == [10, 11, 12, 13]


def test_hosts_share_a_mixture():
    parts = [
        batching.Part(examples(10), 3, first_id=0),
        batching.Part(examples(4), 3, first_id=10),
    ]
    whole, rows = batches(parts).batch(5)
    for host in range(2):
        part, part_rows = batches(parts, process_index=host, process_count=2).batch(5)
        own = slice(3 * host, 3 * host + 3)
        np.testing.assert_array_equal(part_rows, rows[own])
        np.testing.assert_array_equal(part["left_tokens"], whole["left_tokens"][own])


# Evaluation.


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("batch_size", [2, 4, 10, 16])
def test_evaluation_scores_every_row_once(batch_size, num_hosts):
    scores = np.arange(10, dtype=np.float32) / 2
    found = collections.defaultdict(list)
    counts = set()
    hosts = [
        list(
            batching.eval_batches(
                examples(10, scores=scores),
                {"inputs": 3, "targets": 3},
                batch_size=batch_size,
                num_negatives=0,
                process_index=host,
                process_count=num_hosts,
            )
        )
        for host in range(num_hosts)
    ]
    counts = {len(host) for host in hosts}
    assert counts == {-(-10 // batch_size)}
    for parts in zip(*hosts, strict=True):
        for key in parts[0]:
            found[key].append(np.concatenate([part[key] for part in parts]))
    assert {value.shape[0] for values in found.values() for value in values} == {
        batch_size
    }
    mask = np.concatenate(found["row_mask"])
    assert mask.sum() == 10
    assert mask[:10].all()
    np.testing.assert_array_equal(np.concatenate(found["scores"])[mask], scores)
    left = np.concatenate(found["left_tokens"])
    assert left[mask].tolist() == [[10 + i, EOS, 0] for i in range(10)]
    assert not left[~mask].any()


# Prefetching.


def test_prefetch_gives_the_steps_in_order():
    source = batches(examples(12), batch_size=4)
    with prefetching.Prefetcher(
        source, 5, put=lambda batch: batch | {"put": True}
    ) as ahead:
        for step in range(5, 25):
            got, batch, rows = next(ahead)
            assert got == step and batch["put"]
            np.testing.assert_array_equal(rows, source.batch(step)[1])
    assert list(ahead) == []


def test_prefetch_builds_only_what_is_wanted():
    steps = []

    class Counting:
        def batch(self, step):
            steps.append(step)
            return {}, np.array([step])

    before = threading.active_count()
    with prefetching.Prefetcher(
        Counting(), 7, put=lambda batch: batch, depth=2
    ) as ahead:
        next(ahead)
        deadline = time.monotonic() + 10
        while len(steps) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        # One taken, two waiting, one in hand.
        assert steps == [7, 8, 9, 10]
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        prefetching.Prefetcher(Counting(), 0, put=lambda batch: batch, depth=0)


def test_prefetch_raises_what_went_wrong_in_order():
    source = batches(examples(12), batch_size=4)

    def put(batch):
        put.calls += 1
        if put.calls == 3:
            raise RuntimeError("the device is full")
        return batch

    put.calls = 0
    ahead = prefetching.Prefetcher(source, 0, put)
    assert [next(ahead)[0], next(ahead)[0]] == [0, 1]
    with pytest.raises(RuntimeError, match="the device is full"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
