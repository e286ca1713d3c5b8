"""The part of ``sentence-t5 evaluate`` for held-out rows with instructions.

Each row is scored within its task, with its own instructions (MEDI's form): is the
query nearer to the right text than to the row's hard negative (pairs), and at what
rank is the right text among the task's (retrieval)? Both × 100, means over rows, so
that a task of twenty rows doesn't weigh as much as one of a thousand.
"""

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from sentence_t5 import inference, names, truncation, whole_files
from sentence_t5.evals import aligned, pair_ranks
from sentence_t5.tasks import medi_rows, records

_METRICS = ("pairs", "retrieval")
# Instructions of a task that a report lists.
_LISTED = 10


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one file holds.

    Attributes:
        name: the file's name without folder and endings.
        tasks: task_id -> its rows, in the file's order.
        sha256: hex digest of the file.
    """

    name: str
    tasks: Mapping[str, Sequence[medi_rows.Row]]
    sha256: str


def load(path: str | os.PathLike) -> Rows:
    """Reads a JSONL file of rows in MEDI's form, plain or gzipped.

    Raises:
        ValueError: a row of another form, or none at all.
    """
    path = os.fspath(path)
    tasks = collections.defaultdict(list)
    for where, record in records.Reader(path):
        row = medi_rows.parse(where, record)
        tasks[medi_rows.task_id_of(where, record)].append(row)
    if not tasks:
        raise ValueError(f"{path}: the file is empty.")
    name = os.path.basename(path).removesuffix(".gz")
    return Rows(os.path.splitext(name)[0], dict(tasks), whole_files.sha256(path))


def check_labelled(labelled: Set[str], files: Sequence[Rows]) -> None:
    """Refuses names of tasks that no file has.

    Raises:
        ValueError: naming them.
    """
    known = {task for rows in files for task in rows.tasks}
    if unknown := sorted(labelled - known):
        raise ValueError(
            f"--labelled: no task {', '.join(unknown)}; the files have "
            f"{', '.join(sorted(known)) or 'none'}."
        )


def make_entry(
    model: inference.SentenceT5,
    rows: Rows,
    *,
    max_length: int,
    batch_size: int,
    labelled: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Scores a model on one file and records how.

    Args:
        model: the model.
        rows: the file.
        max_length: tokens a text is trimmed to, its instruction's included.
        batch_size: texts computed at once.
        labelled: tasks whose rows share labels, so that the right text isn't the only
            right one: they are not scored by retrieval.

    Returns:
        A JSON-able entry; scores × 100, None where no row has them.
    """
    options = {"max_length": max_length, "batch_size": batch_size}
    tasks = {
        task_id: _score(model, of_task, task_id not in labelled, options)
        for task_id, of_task in rows.tasks.items()
    }
    num_truncated = sum(task["texts_truncated"] for task in tasks.values())
    num_texts = sum(task["texts"] for task in tasks.values())
    return {
        "name": rows.name,
        "sha256": rows.sha256,
        "rows": sum(map(len, rows.tasks.values())),
        "max_length": max_length,
        "similarity": "dot",
        "labelled": sorted(labelled & set(rows.tasks)),
        "texts_truncated": num_truncated,
        **mean(tasks),
        "tasks": tasks,
        "notes": truncation.notes(num_truncated, num_texts, max_length),
    }


def mean(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Averages both scores over the rows of those tasks that have them.

    Args:
        tasks: entries of tasks, all of a report's or some.
    """
    means = {}
    for metric in _METRICS:
        scored = [task for task in tasks.values() if task[metric] is not None]
        total = sum(task[f"{metric}_rows"] for task in scored)
        means[metric] = (
            sum(task[metric] * task[f"{metric}_rows"] for task in scored) / total
            if total
            else None
        )
    return means


def _score(
    model: inference.SentenceT5,
    rows: Sequence[medi_rows.Row],
    by_retrieval: bool,
    options: Mapping[str, int],
) -> dict[str, Any]:
    """Scores one task."""
    with_negative = [i for i, row in enumerate(rows) if row[names.NEGATIVE_TARGETS]]
    sides = {
        names.INPUTS: [_pair(row, names.INPUTS) for row in rows],
        names.TARGETS: [_pair(row, names.TARGETS) for row in rows],
        names.NEGATIVE_TARGETS: [
            tuple(first for first, *_ in _pair(rows[i], names.NEGATIVE_TARGETS))
            for i in with_negative
        ],
    }
    # Texts recur: each is encoded once with each instruction.
    distinct = list(dict.fromkeys(pair for side in sides.values() for pair in side))
    vectors, num_truncated = _encode(model, distinct, options)
    place = {pair: i for i, pair in enumerate(distinct)}
    left, right, negative = (
        vectors[np.array([place[pair] for pair in side], int)]
        for side in sides.values()
    )
    pairs = retrieval = None
    if with_negative:
        pairs = 100.0 * pair_ranks.share_before(
            left[with_negative], right[with_negative], negative
        )
    if by_retrieval:
        retrieval = 100.0 * pair_ranks.mean_reciprocal_rank(
            left, right, [row[names.TARGETS] for row in rows], negative
        )
    return {
        "rows": len(rows),
        "texts": len(distinct),
        "texts_truncated": num_truncated,
        "pairs": pairs,
        "pairs_rows": len(with_negative),
        "retrieval": retrieval,
        "retrieval_rows": len(rows) if by_retrieval else 0,
        "instructions": {
            side: sorted({before for before, _ in sides[key]})[:_LISTED]
            for side, key in medi_rows.SIDES.items()
        },
    }


def _pair(row: medi_rows.Row, key: str) -> tuple[Any, Any]:
    """Returns a side's instruction and its text, or the lists of both."""
    return row[key + names.INSTRUCTION], row[key]


def _encode(
    model: inference.SentenceT5,
    pairs: Sequence[tuple[str, str]],
    options: Mapping[str, int],
) -> tuple[np.ndarray, int]:
    """Returns the vectors [n E] of texts after instructions, and how many were cut."""
    befores, texts = zip(*pairs, strict=True)
    vectors = model.encode(
        texts,
        instruction=befores,
        on_truncate="ignore",
        on_crowding="keep_text",
        show_progress=False,
        **options,
    )
    return vectors, truncation.count(model, texts, options["max_length"], befores)


def format_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the entries as a table for people, scores × 100."""
    rows = [("set", "task", "rows", *_METRICS)]
    for entry in entries:
        for task_id, task in entry["tasks"].items():
            cells = [_cell(task[metric]) for metric in _METRICS]
            rows.append((entry["name"], task_id, str(task["rows"]), *cells))
        cells = [_cell(entry[metric]) for metric in _METRICS]
        rows.append((entry["name"], "mean over rows", str(entry["rows"]), *cells))
    lines = ["rows with instructions, each within its task"]
    lines += aligned.lines(rows, to_left=(0, 1))
    lines += [f"NOTE {e['name']}: {note}" for e in entries for note in e["notes"]]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
