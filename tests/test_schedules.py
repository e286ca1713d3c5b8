"""Whole batches of one task: shares, order, hosts and resuming, against a count."""

import collections
import itertools

import numpy as np
import pytest

from sentence_t5 import batching, names, schedules
from sentence_t5.tokenized import Texts, TokenizedExamples

RATES = [10, 5.5, 3, 1, 0.7, 0.25, 0.05]
EOS = 1


def make_schedule(rates=RATES, **options):
    return schedules.Schedule(rates, **{"seed": 0, "shuffle": True} | options)


def test_shares_hold_from_the_first_cycles_on():
    schedule = make_schedule()
    shares = np.array(RATES) / sum(RATES)
    counts = np.zeros(7)
    for step in range(20_000):
        task, before = schedule.at(step)
        # The number of a task's batch is a count of those that came before it.
        assert before == counts[task]
        counts[task] += 1
        if (step + 1) % schedule.cycle == 0:
            assert abs(counts - shares * (step + 1)).max() <= 1
    np.testing.assert_allclose(counts / 20_000, shares, atol=1e-3)
    np.testing.assert_allclose(counts / counts.sum() / shares, 1, atol=0.01)


def test_far_steps_are_a_seek_and_exact():
    schedule = make_schedule([1, 2])
    start = 10**12 // schedule.cycle * schedule.cycle
    counts = schedule.counts(start)
    assert counts.sum() == start and abs(counts[0] - start / 3) <= 1
    first = {}
    for step in range(start, start + schedule.cycle):
        first.setdefault(*schedule.at(step))
    assert first == dict(enumerate(counts.tolist()))


def test_order_depends_on_the_seed_and_not_on_what_was_asked_before():
    steps = range(1000)

    def asked(steps, **options):
        schedule = make_schedule(**options)
        return [schedule.at(step) for step in steps]

    whole = asked(steps)
    assert asked(reversed(steps)) == whole[::-1]
    assert asked(steps, seed=1) != whole
    tasks = [task for task, _ in whole]
    # At random, and not in turns: a task may follow itself.
    assert sum(a == b for a, b in itertools.pairwise(tasks)) > 200
    unshuffled = [task for task, _ in asked(range(8), rates=[1, 1], shuffle=False)]
    assert unshuffled == [0, 0, 1, 1] * 2


def test_order_is_pinned():
    """A resumed run must find the order it left, whatever was upgraded since."""
    schedule = make_schedule([3, 2, 1])
    pinned = [schedule.at(step) for step in range(8)]
    assert pinned == [(1, 0), (0, 0), (1, 1), (0, 1), (0, 2), (1, 2), (0, 3), (2, 0)]


def test_task_too_rare_to_be_seen():
    with pytest.raises(ValueError, match=r"Task 1 .* has 1e-07 of the batches"):
        make_schedule([1, 1e-7])


# --- the batches ----------------------------------------------------------------------


def texts(rows):
    tokens = np.array([token for row in rows for token in row], np.uint16)
    return Texts(tokens, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def examples(num, first):
    columns = {"inputs": texts([[first + i, EOS] for i in range(num)])}
    columns["targets"] = columns["inputs"]
    return TokenizedExamples("t", "train", "f", 9999, 9998, columns)


def make_batches(sizes=(90, 60, 45, 30, 21, 16, 9), batch_size=8, **options):
    starts = np.cumsum([0, *sizes])
    parts = [
        batching.Part(examples(num, 10 + int(start)), batch_size, int(start))
        for num, start in zip(sizes, starts, strict=False)
    ]
    return batching.TrainBatches(
        parts,
        {"inputs": 3, "targets": 3},
        **{
            "seed": 0,
            "shuffle": True,
            "num_negatives": 0,
            "process_index": 0,
            "process_count": 1,
            "schedule": schedules.Schedule(sizes, seed=0, shuffle=True),
        }
        | options,
    )


def test_no_batch_mixes_tasks_and_each_task_has_epochs_of_its_own():
    sizes = (90, 60, 45, 30, 21, 16, 9)
    source = make_batches(sizes)
    bounds = np.cumsum(sizes)
    seen = collections.defaultdict(list)
    for step in range(600):
        batch, rows = source.batch(step)
        (task,) = set(np.searchsorted(bounds, rows, side="right").tolist())
        assert batch[names.LEFT_TOKENS][:, 0].tolist() == (10 + rows).tolist()
        seen[task] += rows.tolist()
    shares = np.array([len(seen[task]) for task in range(7)]) / (600 * 8)
    np.testing.assert_allclose(shares, np.array(sizes) / sum(sizes), atol=0.01)
    for task, size in enumerate(sizes):
        per_epoch = size // 8 * 8
        for start in range(0, len(seen[task]) - per_epoch + 1, per_epoch):
            epoch = seen[task][start : start + per_epoch]
            assert len(set(epoch)) == per_epoch
    # The largest task's 11 batches are a third of all.
    assert source.steps_per_epoch == int(11 / (90 / 271))


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_share_and_resume_one_order(num_hosts):
    whole = make_batches()
    hosts = [
        make_batches(process_index=host, process_count=num_hosts)
        for host in range(num_hosts)
    ]
    for step in (0, 1, 57, 10_001):
        batch, rows = whole.batch(step)
        parts = [host.batch(step) for host in hosts]
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), rows)
        for key, values in batch.items():
            joined = np.concatenate([part[0][key] for part in parts])
            np.testing.assert_array_equal(joined, values)
