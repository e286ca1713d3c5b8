"""Rows with instructions, in the form of MEDI, as one SeqIO task per data set.

    {"query": [instruction, text], "pos": [instruction, text],
     "neg": [instruction, text], "task_id": ...}        one JSON object per line

`neg` may also be a list of such pairs, an empty list, null or absent. `medi.mixture`
mixes the file's tasks; with `DatasetConfig.mix_by = 'batches'` each batch is of one.

Source: the training data published with INSTRUCTOR (Su et al. 2022, arXiv 2212.09741).
"""

import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from sentence_t5 import names, permutation
from sentence_t5.tasks import medi_rows, mixtures, records, text_pairs

_logger = logging.getLogger(__name__)

_SPLIT = "train"


@dataclasses.dataclass(frozen=True)
class File:
    """Where the rows of each task lie in a file.

    Attributes:
      path: JSONL, plain or gzipped.
      sha256: of its contents.
      places: task_id -> line numbers and offsets, int64 [n 2], in the file's order.
      has_negatives: whether any row has a negative.
    """

    path: str
    sha256: str
    places: Mapping[str, np.ndarray]
    has_negatives: bool


def mixture(
    path: str,
    vocabulary: seqio.Vocabulary,
    max_rows: int | None = None,
    min_rows: int = 1,
    temperature: float = 1.0,
    only: Sequence[str] | None = None,
    without_in_batch: Sequence[str] = (),
    with_instructions: bool = True,
    seed: int = 0,
    name: str = "medi",
) -> seqio.Mixture:
    """Makes a mixture of the tasks of a file, by their sizes.

    Args:
      path: JSONL, plain or gzipped. A gzipped file is unpacked anew for each task; of
        hundreds of tasks, a plain one is quicker to tokenize.
      vocabulary: turns texts into ids.
      max_rows: larger tasks are sampled down to so many rows, the same in every epoch.
      min_rows: smaller tasks are left out, and named in the log. Batches of one task
        need at least as many rows as a batch.
      temperature: see `mixtures.mixture`; sizes count after the sampling.
      only: the `task_id`s to take; all by default.
      without_in_batch: `task_id`s whose rows are no negatives to each other, such as
        classification, where many rows share a label.
      with_instructions: False leaves all instructions away.
      seed: chooses the rows of large tasks.
      name: the mixture's name, and the beginning of its tasks' names.

    Returns:
      A SeqIO mixture of tasks with inputs, targets, negative_targets and instructions.

    Raises:
      ValueError: a row of another form (file and line are named), an unknown task_id,
        or no task left.
    """
    file = scan(path)
    for given in (only or (), without_in_batch):
        unknown = sorted(set(given) - set(file.places))
        if unknown:
            raise ValueError(
                f"{path} has no task_id {', '.join(unknown)}; it has "
                f"{', '.join(file.places)}."
            )
    kept = {
        task_id: sample(places, max_rows, seed)
        for task_id, places in file.places.items()
        if (only is None or task_id in only) and _is_large(file, task_id, min_rows)
    }
    if not kept:
        raise ValueError(f"{path}: no task has min_rows={min_rows} rows.")
    tasks = [
        _task(
            file,
            task_id,
            places,
            vocabulary,
            name=name,
            in_batch_negatives=task_id not in without_in_batch,
            with_instructions=with_instructions,
        )
        for task_id, places in kept.items()
    ]
    return mixtures.mixture(tasks, [len(p) for p in kept.values()], temperature, name)


def scan(path: str) -> File:
    """Reads a file once, checks each row and notes where it lies.

    Raises:
      ValueError: a row of another form, with file and line.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    has_negatives = False
    for number, offset, record in records.Reader(path).places():
        where = f"{path}, line {number}"
        row = medi_rows.parse(where, record)
        task_id = medi_rows.task_id_of(where, record)
        places.setdefault(task_id, []).append((number, offset))
        has_negatives |= bool(row[names.NEGATIVE_TARGETS])
    if not places:
        raise ValueError(f"{path}: the file is empty.")
    return File(
        path,
        text_pairs.file_sha256(path),
        {task_id: np.array(found, np.int64) for task_id, found in places.items()},
        has_negatives,
    )


def _is_large(file: File, task_id: str, min_rows: int) -> bool:
    """Says whether a task has enough rows, and in the log if it hasn't."""
    num_rows = len(file.places[task_id])
    if num_rows < min_rows:
        _logger.warning(
            "%s: task %s is left out: %d rows, min_rows is %d.",
            file.path, task_id, num_rows, min_rows,
        )  # fmt: skip
    return num_rows >= min_rows


def sample(places: np.ndarray, max_rows: int | None, seed: int) -> np.ndarray:
    """Returns at most `max_rows` of the rows, drawn by `seed`, in their order."""
    if max_rows is None or len(places) <= max_rows:
        return places
    draw = np.arange(max_rows, dtype=np.int64)
    key = permutation.mix(seed, len(places))
    return places[np.sort(permutation.permute(draw, len(places), key))]


def _task(
    file: File,
    task_id: str,
    places: np.ndarray,
    vocabulary: seqio.Vocabulary,
    *,
    name: str,
    in_batch_negatives: bool,
    with_instructions: bool,
) -> seqio.Task:
    """Makes the task of some rows of a file."""
    of_instructions = [text_pairs.instruction_key(k) for k in medi_rows.SIDES.values()]

    def rows(split: str) -> Iterator[text_pairs.Row]:
        for where, record in records.Reader(file.path).picked(places.tolist()):
            row = dict(medi_rows.parse(where, record))
            if not with_instructions:
                for key in of_instructions:
                    del row[key]
            yield row

    def identity(split: str) -> Mapping[str, Any]:
        return {
            "source": "medi",
            "contents": file.sha256,
            "task_id": task_id,
            "lines": hashlib.sha256(places.tobytes()).hexdigest(),
            "with_instructions": with_instructions,
            "reader": text_pairs.source_sha256(
                __file__, medi_rows.__file__, records.__file__
            ),
        }

    source = text_pairs.RowSource(
        rows=rows,
        identity=identity,
        splits=(_SPLIT,),
        negatives=file.has_negatives,
        instructions=with_instructions,
        in_batch_negatives=in_batch_negatives,
        streams=False,
    )
    safe = re.sub(r"[^0-9A-Za-z_]", "_", task_id)
    return text_pairs.task(f"{name}_{safe}", source, vocabulary)
