"""SentEval's transfer tasks as TSV files: which there are, and what a folder holds.

    DIR/CR.tsv                            MR, CR, SUBJ, MPQA: one file, cross-validated
    DIR/TREC.train.tsv, TREC.test.tsv     TREC, MRPC
    DIR/SST.train.tsv, .dev.tsv, .test.tsv

with a header: ``label`` and ``text``, or ``label``, ``sentence1`` and ``sentence2`` for
MRPC. How they are scored is in ``transfer``.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from sentence_t5.evals import tsv_files

_ALL, _TRAIN, _DEV, _TEST = "all", "train", "dev", "test"
_COLUMN_NAMES = {
    "label": ("label",),
    "text": ("text", "sentence"),
    "sentence1": ("sentence1", "sentence_1", "text1", "left"),
    "sentence2": ("sentence2", "sentence_2", "text2", "right"),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A transfer task, as SentEval defines it.

    Attributes:
        rows: split -> rows that papers score; the splits say how it is scored.
        columns: roles of a row's texts.
        positive: the label that F1 is of; None where no F1 is reported.
    """

    rows: Mapping[str, int]
    columns: tuple[str, ...] = ("text",)
    positive: str | None = None


TASKS = {
    "MR": Task({_ALL: 10662}),
    "CR": Task({_ALL: 3775}),
    "SUBJ": Task({_ALL: 10000}),
    "MPQA": Task({_ALL: 10606}),
    "SST": Task({_TRAIN: 67349, _DEV: 872, _TEST: 1821}),
    "TREC": Task({_TRAIN: 5452, _TEST: 500}),
    "MRPC": Task({_TRAIN: 4076, _TEST: 1725}, ("sentence1", "sentence2"), "1"),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Labelled rows of one file, in SentEval's order: by number of words, then label.

    Attributes:
        texts: the texts of each column, as many in each.
        labels: str [n].
        file: the file.
        sha256: its hex digest.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: np.ndarray
    file: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class TransferSet:
    """One task's data.

    Attributes:
        name: of ``TASKS``.
        splits: split -> rows.
    """

    name: str
    splits: Mapping[str, Split]

    @property
    def task(self) -> Task:
        """What is known of the task."""
        return TASKS[self.name]

    def size_problem(self) -> str | None:
        """Says how the rows differ in number from what papers score."""
        rows = {split: len(data.labels) for split, data in self.splits.items()}
        if rows == self.task.rows:
            return None
        got, published = (
            " / ".join(map(str, sizes.values())) for sizes in (rows, self.task.rows)
        )
        return (
            f"{self.name} has {got} rows, published {self.name} has {published}: its "
            "scores are not comparable with published ones."
        )


def load_folder(folder: str | os.PathLike) -> list[TransferSet]:
    """Reads the tasks that a folder has files of.

    Args:
        folder: of files named ``TASK.tsv`` or ``TASK.SPLIT.tsv``.

    Returns:
        The tasks, in the order of ``TASKS``.

    Raises:
        FileNotFoundError: no folder, no task's file in it, or one split is missing.
        ValueError: a file without rows, or a bad line, which is named.
    """
    folder, sets = pathlib.Path(folder), []
    for name, task in TASKS.items():
        paths = {split: folder / _file_name(name, split) for split in task.rows}
        missing = [path.name for path in paths.values() if not path.exists()]
        if len(missing) == len(paths):
            continue
        if missing:
            raise FileNotFoundError(
                f"{folder}: {name} lacks {', '.join(missing)}; it is scored with "
                f"{', '.join(path.name for path in paths.values())}."
            )
        splits = {split: _load(name, path) for split, path in paths.items()}
        sets.append(TransferSet(name, splits))
    if not sets:
        expected = [_file_name(n, split) for n, t in TASKS.items() for split in t.rows]
        raise FileNotFoundError(
            f"{folder}: no transfer task; expected files among {', '.join(expected)}."
        )
    return sets


def _file_name(name: str, split: str) -> str:
    return f"{name}.tsv" if split == _ALL else f"{name}.{split}.tsv"


def _load(name: str, path: pathlib.Path) -> Split:
    """Reads one file and sorts it as SentEval does, which decides the folds."""
    try:
        table = tsv_files.read(path)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    columns = {}
    for role in ("label", *TASKS[name].columns):
        index = table.find(_COLUMN_NAMES[role])
        if index is None:
            raise ValueError(
                f"{path}: no column for {role}; the header has "
                f"{', '.join(table.header)}, expected one of "
                f"{', '.join(_COLUMN_NAMES[role])}."
            )
        columns[role] = table.column(index)
    rows = sorted(
        zip(*columns.values(), strict=True),
        key=lambda row: (*(len(text.split()) for text in row[1:]), row[0]),
    )
    labels, *texts = zip(*rows, strict=True)
    positive = TASKS[name].positive
    if positive is not None and set(labels) - {"0", "1"}:
        raise ValueError(
            f"{path}: got the labels {', '.join(sorted(set(labels)))}, expected 0 and "
            f"{positive}."
        )
    return Split(tuple(texts), np.array(labels), str(path), table.sha256)
