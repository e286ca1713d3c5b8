"""Tasks over text files: TSV with a header, or JSONL, plain or gzipped.

    files.task(path="pairs.tsv", left="question", right="answer", negatives="wrong")

A row that cannot be used is an error with file and line. Nothing is skipped or repaired
unless `on_missing` or `errors` says so, and then it is counted in the log.
"""

import dataclasses
import logging
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import seqio
import tensorflow as tf

from sentence_t5 import names, options
from sentence_t5.tasks import records, text_pairs

_logger = logging.getLogger(__name__)

OnMissing = Literal["error", "drop", "keep"]
Errors = records.Errors
Paths = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns (TSV) or fields (JSONL) hold what.

    Attributes:
      left: the texts that become `inputs`.
      right: the texts that become `targets`.
      negatives: hard negatives: texts or, in JSONL, also lists of texts. An empty cell,
        an empty list, null or an absent field means that the row has none.
      score: numbers.
      subset: names of subsets.
      only_subset: keeps only the rows of this subset.
    """

    left: str
    right: str
    negatives: tuple[str, ...] = ()
    score: str | None = None
    subset: str | None = None
    only_subset: str | None = None


def task(
    path: Paths | Mapping[str, Paths],
    vocabulary: seqio.Vocabulary,
    left: str = "anchor",
    right: str = "positive",
    negatives: str | Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    errors: Errors = "strict",
    name: str | None = None,
) -> seqio.Task:
    """Makes a task of text pairs, with hard negatives or without.

    Args:
      path: a file, or several, for the split "train"; or a mapping from split to files.
        Names end in .tsv, .jsonl or .json, then optionally .gz.
      vocabulary: turns texts into ids.
      left: the column of the left texts.
      right: the column of the right texts.
      negatives: the column(s) of hard negatives: texts or, in JSONL, also lists.
      on_missing: what to do with a row whose left or right text is missing (null, or an
        empty TSV cell): "error", "drop" the row, or "keep" it as an empty text.
      errors: "strict", or "replace" bytes that are not UTF-8 by U+FFFD.
      name: the task's name; from the file's name by default.

    Returns:
      A SeqIO task with inputs, targets and, if named, negative_targets.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a column does not exist (the ones that do are listed).
    """
    if isinstance(negatives, str):
        negatives = (negatives,)
    columns = Columns(left, right, tuple(negatives or ()))
    source = make_source(path, columns, "train", on_missing, errors)
    return text_pairs.task(name or default_name("files", path), source, vocabulary)


def make_source(
    path: Paths | Mapping[str, Paths],
    columns: Columns,
    split: str,
    on_missing: OnMissing = "error",
    errors: Errors = "strict",
) -> text_pairs.RowSource:
    """Makes the source of a task over files, checking that files and columns exist.

    Args:
      path: file(s) for `split`, or a mapping from split to files.
      columns: what to read.
      split: the name of the split if `path` is no mapping.
      on_missing: see `task`.
      errors: see `task`.
    """
    options.check_choice("on_missing", on_missing, ("error", "drop", "keep"))
    options.check_choice("errors", errors, ("strict", "replace"))
    by_split = path if isinstance(path, Mapping) else {split: path}
    paths = {key: _as_list(value) for key, value in by_split.items()}
    for file in (file for files in paths.values() for file in files):
        _check_file(file, columns)
    return text_pairs.RowSource(
        rows=lambda key: read(paths[key], columns, on_missing, errors),
        identity=lambda key: {
            "source": "files",
            "contents": [text_pairs.file_sha256(file) for file in paths[key]],
            "formats": [records.file_format(file) for file in paths[key]],
            "columns": dataclasses.astuple(columns),
            "policies": [on_missing, errors],
            "reader": text_pairs.source_sha256(__file__, records.__file__),
        },
        splits=tuple(paths),
        negatives=bool(columns.negatives),
        scores=columns.score is not None,
    )


def read(
    paths: Sequence[str],
    columns: Columns,
    on_missing: OnMissing = "error",
    errors: Errors = "strict",
) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of files as dicts of `inputs`, `targets` and so on.

    Args:
      paths: the files, read one after the other.
      columns: what to read.
      on_missing: see `task`.
      errors: see `task`.

    Raises:
      ValueError: a bad row, with file and line; or there is no row at all.
    """
    is_empty = True
    for path in paths:
        for row in rows(records.Reader(path, errors), columns, on_missing):
            is_empty = False
            yield row
    if is_empty:
        raise ValueError(
            f"{', '.join(paths)}: no row to use. Expected lines of texts below a TSV's "
            "header, or JSONL objects. Set the task's `path` to another file; "
            "--train_file and --eval_file set it."
        )


def rows(
    reader: records.Reader, columns: Columns, on_missing: OnMissing = "error"
) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of one file; see `read`."""
    path = reader.path
    num_dropped = 0
    for where, record in reader:
        if columns.subset and record.get(columns.subset) != columns.only_subset:
            continue
        row = _row(where, record, columns, on_missing)
        if row is None:
            num_dropped += 1
        else:
            yield row
    if num_dropped:
        _logger.warning("%s: %s dropped (no text).", path, _rows(num_dropped))
    if num := reader.num_repaired:
        lines = "1 line" if num == 1 else f"{num} lines"
        _logger.warning("%s: %s repaired (not UTF-8).", path, lines)


def default_name(kind: str, path: Paths | Mapping[str, Paths]) -> str:
    """Makes a task's name from its kind and the name of its first file."""
    paths = next(iter(path.values())) if isinstance(path, Mapping) else path
    stem = pathlib.PurePath(_as_list(paths)[0]).name.split(".")[0]
    return f"{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', stem)}"


def _row(
    where: str, record: Mapping[str, Any], columns: Columns, on_missing: OnMissing
) -> Mapping[str, Any] | None:
    """Turns a record into a row; None drops it."""
    row: dict[str, Any] = {}
    for key, column in ((names.INPUTS, columns.left), (names.TARGETS, columns.right)):
        text = _field(where, record, column)
        if text is None and on_missing == "drop":
            return None
        if text is None and on_missing == "error":
            raise ValueError(
                f"{where}: column {column!r} has no text. Complete it, or set "
                'on_missing to "drop" or "keep".'
            )
        row[key] = _text(where, column, "" if text is None else text)
    if columns.negatives:
        row[names.NEGATIVE_TARGETS] = [
            _text(where, column, text)
            for column in columns.negatives
            for text in _negatives(record.get(column))
        ]
    if columns.score is not None:
        row[names.SCORES] = _score(where, record, columns.score)
    return row


def _field(where: str, record: Mapping[str, Any], column: str) -> Any:
    if column not in record:
        raise ValueError(f"{where}: no column {column!r}; there are {list(record)}.")
    return record[column]


def _text(where: str, column: str, value: Any) -> str:
    """Checks that a value is a text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column {column!r} must hold text, got {value!r} "
            f"({type(value).__name__})."
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{where}: column {column!r} holds half a surrogate pair: {value!r}."
        ) from None
    return value


def _negatives(value: Any) -> list[Any]:
    """Returns the negatives in one column: none, one or a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _score(where: str, record: Mapping[str, Any], column: str) -> float:
    value = _field(where, record, column)
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(
            f"{where}: column {column!r} must hold a number, got {value!r}."
        )
    return score


def _check_file(path: str, columns: Columns) -> None:
    """Checks that a file exists and that its first row has the columns."""
    if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
        raise FileNotFoundError(
            f"No file at {path!r}. Set the task's `path` to a TSV or JSONL file; "
            "--train_file and --eval_file set it."
        )
    found = records.Reader(path, "replace").columns()
    needed = [columns.left, columns.right, columns.score, columns.subset]
    if records.file_format(path) == records.TSV:
        needed += columns.negatives
    missing = [column for column in needed if column and column not in found]
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, missing))}; there are "
            f"{', '.join(map(repr, found))}. Name the columns in the task; of a "
            "--train_file they are --left, --right and --negatives."
        )


def _as_list(paths: Paths) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"
