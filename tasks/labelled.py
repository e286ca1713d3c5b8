"""Pairs with a label: (sentence1, sentence2, 1 or 0) as positives and hard negatives.

    left   right labelled positive   [rights labelled negative of the same left]

Rows are grouped by their left text, wherever they lie in the file. A left text without
a positive is left out.
"""

import collections
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import seqio

from sentence_t5 import names
from sentence_t5.tasks import files, records, text_pairs

_logger = logging.getLogger(__name__)


def task(
    path: files.Paths | Mapping[str, files.Paths],
    vocabulary: seqio.Vocabulary,
    left: str = "sentence1",
    right: str = "sentence2",
    label: str = "label",
    positive: Sequence[str | int] = (1,),
    negative: Sequence[str | int] = (0,),
    name: str | None = None,
) -> seqio.Task:
    """Makes a task of labelled pairs.

    Args:
      path: a TSV or JSONL file, or several, for the split "train"; or a mapping from
        split to files.
      vocabulary: turns texts into ids.
      left: the column of the left texts.
      right: the column of the right texts.
      label: the column of the labels.
      positive: labels of pairs that belong together.
      negative: labels of pairs that don't. Rows with other labels are left out.
      name: the task's name; from the file's name by default.

    Returns:
      A SeqIO task with inputs, targets and negative_targets.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a column does not exist, or a label is in both lists.
    """
    meaning = {str(value): True for value in positive}
    meaning |= {str(value): False for value in negative}
    if len(meaning) != len(positive) + len(negative):
        raise ValueError(f"A label is repeated: {positive=}, {negative=}.")
    # The reader of plain files checks paths, columns and texts.
    columns = files.Columns(left, right, subset=label)
    plain = files.make_source(path, columns, "train")
    by_split = path if isinstance(path, Mapping) else {"train": path}

    def rows(split: str) -> Iterator[text_pairs.Row]:
        given = by_split[split]
        paths = [given] if isinstance(given, str) else given
        return group(_read(paths, left, right, label, meaning))

    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: {
            **plain.identity(split),
            "source": "labelled",
            "meaning": meaning,
            "grouped": text_pairs.source_sha256(__file__),
        },
        splits=tuple(by_split),
        negatives=True,
        streams=False,
    )
    return text_pairs.task(
        name or files.default_name("labelled", path), source, vocabulary
    )


def group(pairs: Iterable[tuple[str, str, bool]]) -> Iterator[text_pairs.Row]:
    """Groups labelled pairs by their left text.

    Args:
      pairs: (left, right, whether they belong together), in any order.

    Yields:
      One row for each pair that does, with the left text's other pairs as negatives.
      A pair counts once; one with both labels is a positive.
    """
    rights: dict[str, dict[str, bool]] = collections.defaultdict(dict)
    for left, right, belongs in pairs:
        rights[left][right] = belongs or rights[left].get(right, False)
    num_lonely = 0
    for left, labels in rights.items():
        negatives = [right for right, belongs in labels.items() if not belongs]
        num_lonely += len(negatives) == len(labels)
        for right in [right for right, belongs in labels.items() if belongs]:
            yield {
                names.INPUTS: left,
                names.TARGETS: right,
                names.NEGATIVE_TARGETS: negatives,
            }
    if num_lonely:
        _logger.warning("%d left texts without a positive are left out.", num_lonely)


def _read(
    paths: Sequence[str], left: str, right: str, label: str, meaning: Mapping[str, bool]
) -> Iterator[tuple[str, str, bool]]:
    for path in paths:
        for where, record in records.Reader(path):
            texts = record.get(left), record.get(right)
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(
                    f"{where}: columns {left!r} and {right!r} must hold text, got "
                    f"{texts[0]!r} and {texts[1]!r}."
                )
            if str(record.get(label)) in meaning:
                yield *texts, meaning[str(record[label])]
