"""What is refused before training, lest it fail late or quietly train on wrong things.

    tasks ─► features, vocabulary ─► examples ─► negatives ─► batches ─► share, crowding

Each check is given what it compares, and names the task and what to change. `datasets`
calls them all.
"""

import logging
from collections.abc import Mapping, Sequence

import seqio

from sentence_t5 import names, text_rows, vocabularies
from sentence_t5.tokenized import TEXTS, TokenizedExamples

_logger = logging.getLogger(__name__)


def check_features(task: seqio.Task, split: str, num_negatives: int) -> None:
    """Checks a task's split and features before anything is read.

    Args:
      task: what is to be read.
      split: the split asked for.
      num_negatives: hard negatives per pair asked for.

    Raises:
      ValueError: the task lacks the split or a feature.
    """
    if split not in task.splits:
        raise ValueError(
            f"Task {task.name!r} has no split {split!r}; it has {sorted(task.splits)}."
        )
    wanted = [*TEXTS[:2], *(TEXTS[2:] if num_negatives else [])]
    for feature in wanted:
        if feature in task.output_features:
            continue
        hint = ""
        if feature == names.NEGATIVE_TARGETS:
            hint = (
                f" DatasetConfig.num_negatives={num_negatives} needs it: name the "
                "column that holds negatives in the task, or set num_negatives to 0."
            )
        raise ValueError(
            f"Task {task.name!r} has no feature {feature!r}; it has "
            f"{sorted(task.output_features)}.{hint}"
        )


def check_one_vocabulary(tasks: Sequence[seqio.Task]) -> None:
    """Checks that all texts are turned into ids in one way.

    Raises:
      ValueError: two features have different vocabularies.
    """
    (first, vocabulary), *others = [
        (task.name, task.output_features[feature].vocabulary)
        for task in tasks
        for feature in TEXTS
        if feature in task.output_features
    ]
    for name, other in others:
        if vocabularies.sha256(other) != vocabularies.sha256(vocabulary):
            raise ValueError(
                f"Tasks {first!r} and {name!r} have texts with different vocabularies; "
                "one model has one. Give them the same."
            )


def check_negatives(parts: Sequence[TokenizedExamples], num_negatives: int) -> None:
    """Compares the negatives that are there with those that are asked for.

    It warns of negatives that aren't used, and of a task of a mixture that has none.

    Args:
      parts: the examples of each task.
      num_negatives: hard negatives per pair asked for.

    Raises:
      ValueError: a task has nothing to be told apart from, or no task has negatives.
    """
    having = [part for part in parts if part.negative_rows is not None]
    lacking = [part for part in having if not part.negative_rows[-1]]
    if not num_negatives:
        for part in (part for part in having if part.negative_rows[-1]):
            _logger.warning(
                "Task %r has %d hard negatives that are NOT USED, because "
                "DatasetConfig.num_negatives is 0. Set it to use them.",
                part.task_name,
                part.negative_rows[-1],
            )
        return
    for part in lacking:
        hint = "Set num_negatives to 0 or name another column."
        if not part.in_batch_negatives:
            hint = "It has no in-batch negatives either: leave it out."
        elif len(lacking) < len(parts):
            _logger.warning(
                "No row of task %r has hard negatives: it is told apart from other "
                "rows alone.",
                part.task_name,
            )
            continue
        raise ValueError(
            f"DatasetConfig.num_negatives={num_negatives}, but no row of task "
            f"{part.task_name!r} has any {names.NEGATIVE_TARGETS!r}. {hint}"
        )


def check_share(
    part: TokenizedExamples, rate: float, share: int, batch_size: int
) -> None:
    """Checks that a task fills its share of a batch, with rows of its own.

    Args:
      part: the task's examples.
      rate: its rate in the mixture.
      share: the rows that it gives to a batch.
      batch_size: pairs in the global batch.

    Raises:
      ValueError: it gives none, or has too few.
    """
    if share == 0:
        raise ValueError(
            f"Task {part.task_name!r} has rate {rate:.3g}: less than one row of a "
            f"batch of {batch_size}. Raise batch_size or the rate."
        )
    if len(part) < share:
        of = f" ({share} of it from this task)" if share < batch_size else ""
        raise ValueError(
            f"Dataset {part.task_name!r} ({part.split}) has {len(part)} examples, "
            f"the global batch is {batch_size}{of}: a batch would hold a row "
            "twice. Use a smaller batch_size or more data."
        )


def check_crowding(
    parts: Sequence[TokenizedExamples], lengths: Mapping[str, int], on_crowding: str
) -> None:
    """Counts the texts that their instruction leaves too little room for.

    Args:
      parts: the examples of each task.
      lengths: tokens per text of each feature.
      on_crowding: as in `datasets.DatasetConfig`; "keep_text" warns.

    Raises:
      ValueError: there are some, and `on_crowding` is "error".
    """
    for examples in parts:
        for feature, length in lengths.items():
            texts = examples.texts.get(feature)
            if texts is None or not (crowded := text_rows.count_crowded(texts, length)):
                continue
            line = (
                f"{crowded} of {len(texts)} texts of {feature!r} in task "
                f"{examples.task_name!r} have an instruction that leaves them less "
                f"than half of {length} tokens"
            )
            if on_crowding == "error":
                raise ValueError(
                    f"{line}. Shorten the instruction, raise task_feature_lengths "
                    f"(MAX_LENGTH), or set DatasetConfig.on_crowding to 'keep_text'."
                )
            _logger.warning("%s: it is cut for them.", line)


def check_process_count(batch_size: int, process_count: int) -> None:
    """Checks that the hosts can share the global batch evenly.

    Raises:
      ValueError: they can't; the message names the nearest sizes that they can.
    """
    below = batch_size // process_count * process_count
    if below == batch_size:
        return
    nearest = [size for size in (below, below + process_count) if size > 0]
    raise ValueError(
        f"The global batch_size {batch_size} cannot be shared by {process_count} "
        f"hosts evenly; the nearest sizes that can are {nearest}."
    )
