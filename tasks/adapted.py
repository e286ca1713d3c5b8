"""A task's rows with instructions, or as no negatives to each other.

    TASK = @adapted.task()
    adapted.task.task = @files.task()
    adapted.task.left_instruction = 'Represent the question for retrieving an answer:'

An instruction goes before each text of a side; see `text_pairs` for how the two become
tokens. Give one side alone its instruction, or each its own.
"""

from collections.abc import Iterator, Mapping

import seqio

from sentence_t5 import names
from sentence_t5.tasks import text_pairs


def task(
    task: seqio.Task,
    left_instruction: str | None = None,
    right_instruction: str | None = None,
    in_batch_negatives: bool | None = None,
    name: str | None = None,
) -> seqio.Task:
    """Makes a task of the same rows with other settings.

    Args:
      task: a task of this package.
      left_instruction: put before each left text. White space around it doesn't count.
        "" takes the rows' own away; None leaves all as it is.
      right_instruction: put before each right text and each hard negative.
      in_batch_negatives: False if the other rows of a batch may be as right as a row's
        own right text, as where rows share labels: only its hard negatives are
        negatives then. None leaves it as it is.
      name: the new task's name; the old one's by default.

    Returns:
      A SeqIO task. Without any instruction it is the old one, id for id.

    Raises:
      ValueError: a task of another kind.
    """
    if not text_pairs.is_plain(task):
        raise ValueError(
            f"Task {task.name!r} is not of this package's own kind: its preprocessors "
            "may do anything. Put instructions into its rows where they are made."
        )
    given = {
        names.INPUTS: left_instruction,
        names.TARGETS: right_instruction,
        names.NEGATIVE_TARGETS: right_instruction,
    }
    instructions = {k: text.strip() for k, text in given.items() if text is not None}
    source = _source(task.source, instructions, in_batch_negatives)
    vocabulary = task.output_features[names.INPUTS].vocabulary
    return text_pairs.task(name or task.name, source, vocabulary)


def with_lengths(task: seqio.Task) -> seqio.Task:
    """Makes a task that has the features of one with instructions, all of them empty.

    SeqIO mixes only tasks with the same features.
    """
    vocabulary = task.output_features[names.INPUTS].vocabulary
    source = _source(task.source, {names.INPUTS: ""}, None, has_instructions=True)
    return text_pairs.task(task.name, source, vocabulary)


def _source(
    old: text_pairs.RowSource,
    instructions: Mapping[str, str],
    in_batch_negatives: bool | None,
    has_instructions: bool = False,
) -> text_pairs.RowSource:
    """Returns a source of the same rows with other settings."""
    if in_batch_negatives is None:
        in_batch_negatives = old.in_batch_negatives
    has_instructions |= old.has_instructions or any(instructions.values())
    if not has_instructions:
        instructions = {}

    def rows(split: str) -> Iterator[text_pairs.Row]:
        for row in old.rows(split):
            yield _instruct(row, instructions)

    return text_pairs.RowSource(
        rows=rows if instructions else old.rows,
        identity=lambda split: {**old.identity(split), "instructions": instructions},
        splits=old.splits,
        negatives=old.has_negatives,
        scores=old.has_scores,
        instructions=has_instructions,
        in_batch_negatives=in_batch_negatives,
        streams=old.streams,
    )


def _instruct(row: text_pairs.Row, instructions: Mapping[str, str]) -> text_pairs.Row:
    """Puts instructions into a row, and empty ones where it has none yet."""
    more = {}
    for key in (names.INPUTS, names.TARGETS, names.NEGATIVE_TARGETS):
        where = text_pairs.instruction_key(key)
        if key not in row or (key not in instructions and where in row):
            continue
        text = instructions.get(key, "")
        is_list = key == names.NEGATIVE_TARGETS
        more[where] = [text] * len(row[key]) if is_list else text
    return {**row, **more}
