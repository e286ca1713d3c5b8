"""Mixtures of tasks, by given rates or by the tasks' sizes, with a temperature.

    share of task t  =  rate_t ** (1 / temperature)  /  the sum of these

Whether a batch holds rows of every task or of one is `DatasetConfig.mix_by`.
"""

import math
import re
from collections.abc import Sequence

import seqio

from sentence_t5.tasks import adapted, text_pairs


def mixture(
    tasks: Sequence[seqio.Task],
    rates: Sequence[float] | None = None,
    temperature: float = 1.0,
    name: str | None = None,
    split: str = "train",
) -> seqio.Mixture:
    """Makes a mixture of tasks.

    Args:
      tasks: what to mix.
      rates: one for each task; by default the number of its rows.
      temperature: 1 leaves the rates as they are; larger ones bring them closer to each
        other.
      name: the mixture's name; made of the tasks' by default.
      split: whose rows are counted where there are no rates.

    Returns:
      A SeqIO mixture that is in no registry.

    Raises:
      ValueError: other numbers of tasks and rates, two tasks of one name, or a rate or
        temperature that is not a positive number.
    """
    if rates is None:
        rates = [_num_rows(task, split) for task in tasks]
    if len(rates) != len(tasks) or not tasks:
        raise ValueError(
            f"A mixture needs one rate for each task, got {len(rates)} rates for "
            f"{len(tasks)} tasks."
        )
    names = [task.name for task in tasks]
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(
            f"Two tasks of the mixture are called {', '.join(twice)}. Give each its "
            "own `name`."
        )
    for each, rate in (*zip(names, rates, strict=True), ("temperature", temperature)):
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"{each}: got {rate}, expected a positive number.")
    weights = [float(rate) ** (1.0 / temperature) for rate in rates]
    own = [t for t in tasks if isinstance(t.source, text_pairs.RowSource)]
    if any(t.source.has_instructions for t in own):
        tasks = [
            adapted.with_lengths(t) if t in own and not t.source.has_instructions else t
            for t in tasks
        ]
    if name is None:
        name = re.sub(r"[^0-9A-Za-z_]", "_", "_".join(["mixture", *names]))[:100]
    return seqio.Mixture(name, list(zip(tasks, weights, strict=True)))


def _num_rows(task: seqio.Task, split: str) -> int:
    if not isinstance(task.source, text_pairs.RowSource):
        raise ValueError(
            f"The rows of task {task.name!r} can't be counted. Give the mixture rates."
        )
    return sum(len(block) for block in task.source.blocks(split))
