"""How a mixture's tasks share the batches, or the rows of each batch.

Of whole batches, when no batch mixes tasks:

    after n batches, task t has had  C(t, n) - C(t - 1, n)  of them,
    C(t, n) = the integer next to n * (rate 0 + ... + rate t)

Counts are exact integers of that formula at the end of every cycle, so that a task is
never a batch away from its share there, however long a run is. Within a cycle the order
is a keyed permutation. Everything is a pure function of (seed, step).
"""

import functools
from collections.abc import Sequence

import numpy as np

from sentence_t5 import permutation

# Rates are rounded to this part of their sum.
_RESOLUTION = 1 << 40
# A cycle has at least this many batches of the rarest task ...
_RAREST_BATCHES = 2
# ... and no more batches than can be listed at once.
_LONGEST_CYCLE = 1_000_000
# Apart from the keys of the tasks' own orders, which begin with their number.
_KEY = 0x5C4ED


class Schedule:
    """Says of each step which task it is of.

    Attributes:
      shares: of the tasks, summing to 1.
    """

    def __init__(self, rates: Sequence[float], *, seed: int, shuffle: bool):
        """Makes a schedule.

        Args:
          rates: of the tasks; their sum does not matter.
          seed: chooses the order within each cycle.
          shuffle: False gives each task's batches of a cycle in a row.

        Raises:
          ValueError: a task is so rare that a run would hardly see it.
        """
        total = sum(rates)
        self.shares = [rate / total for rate in rates]
        rarest = min(self.shares)
        if rarest * _LONGEST_CYCLE < _RAREST_BATCHES:
            index = self.shares.index(rarest)
            raise ValueError(
                f"Task {index} of the mixture has {rarest:.3g} of the batches: less "
                f"than {_RAREST_BATCHES} in {_LONGEST_CYCLE:,}. Raise its rate, or "
                "leave it out."
            )
        # Each task has at least one batch in a cycle: its ends are rounded by less.
        self.cycle = int(np.ceil(_RAREST_BATCHES / rarest))
        self._seed = seed
        self._shuffle = shuffle
        bounds = [round(sum(self.shares[:i]) * _RESOLUTION) for i in range(len(rates))]
        self._bounds = [*bounds, _RESOLUTION]
        self._listed = functools.lru_cache(maxsize=4)(self._list)

    def at(self, step: int) -> tuple[int, int]:
        """Returns the task of a step, and how many batches it had before."""
        cycle, place = divmod(step, self.cycle)
        tasks, before = self._listed(cycle)
        return int(tasks[place]), int(before[place])

    def counts(self, num_steps: int) -> np.ndarray:
        """Returns how many of the first steps are of each task, at a cycle's end.

        Args:
          num_steps: a multiple of `cycle`.

        Returns:
          int64, one number per task, summing to `num_steps`.
        """
        # Python's integers: exact however long the run is.
        ends = [
            (2 * bound * num_steps + _RESOLUTION) // (2 * _RESOLUTION)
            for bound in self._bounds
        ]
        return np.diff(np.array(ends, np.int64))

    def _list(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the task of each place of a cycle, and its batches before."""
        start, end = (self.counts(c * self.cycle) for c in (cycle, cycle + 1))
        tasks = np.repeat(np.arange(len(start)), end - start)
        if self._shuffle:
            places = np.arange(self.cycle, dtype=np.int64)
            key = permutation.mix(self._seed, _KEY, cycle)
            tasks = tasks[permutation.permute(places, self.cycle, key)]
        # Within each task in turn: its first place has number 0, and so on.
        order = np.argsort(tasks, kind="stable")
        before = np.empty(self.cycle, np.int64)
        firsts = np.cumsum(end - start) - (end - start)
        before[order] = np.arange(self.cycle) - np.repeat(firsts - start, end - start)
        return tasks, before


def batch_shares(rates: Sequence[float], batch_size: int) -> list[int]:
    """Splits a batch by rates: the largest remainders get the rows left over.

    Args:
      rates: of the tasks of a mixture; their sum does not matter.
      batch_size: rows to share out.

    Returns:
      Rows of each task in every batch, summing to `batch_size`.
    """
    total = sum(rates)
    exact = [rate / total * batch_size for rate in rates]
    shares = [int(value) for value in exact]
    order = sorted(range(len(rates)), key=lambda i: (shares[i] - exact[i], i))
    for index in order[: batch_size - sum(shares)]:
        shares[index] += 1
    return shares
