"""STS files: scored sentence pairs read from TSV, with every bad line named.

Reads what papers call STS12 to STS16, STS-B and SICK-R once they are one TSV each, with
a header and, if the set has them, a column of subsets. The metric is in ``sts``.
"""

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

# Pairs in the sets that papers score. STS13 is without SMT, which is not public.
KNOWN_SIZES = {
    "STS12": 3108,
    "STS13": 1500,
    "STS14": 3750,
    "STS15": 3000,
    "STS16": 1186,
}

_COLUMN_NAMES = {
    "score": ("score", "similarity_score", "relatedness_score", "relatedness", "label"),
    "sentence1": ("sentence1", "sentence_1", "sentence_a", "text1", "left"),
    "sentence2": ("sentence2", "sentence_2", "sentence_b", "text2", "right"),
    "subset": ("subset", "genre", "split_name"),
}
_OPTIONAL_COLUMNS = ("subset",)


@dataclasses.dataclass(frozen=True)
class StsSet:
    """Pairs of sentences with gold scores, as read from one file.

    Attributes:
        name: the file's name without folder and ending.
        sentences1: first sentences.
        sentences2: second sentences, as many.
        scores: gold scores, float64 [n].
        subsets: the subset of each pair; one name for all where the file has no column.
        sha256: hex digest of the file.
    """

    name: str
    sentences1: tuple[str, ...]
    sentences2: tuple[str, ...]
    scores: np.ndarray
    subsets: tuple[str, ...]
    sha256: str

    def by_subset(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Splits one value per pair [n] by subset, in order of appearance."""
        values, subsets = np.asarray(values), np.asarray(self.subsets)
        return {name: values[subsets == name] for name in dict.fromkeys(self.subsets)}


def size_problem(sts_set: StsSet) -> str | None:
    """Says how a set named like STS12 to STS16 differs from what papers score."""
    match = re.search(r"STS[-_ ]?(?:20)?(1[2-6])", sts_set.name, re.IGNORECASE)
    if match is None:
        return None
    known_name = f"STS{match.group(1)}"
    expected, got = KNOWN_SIZES[known_name], len(sts_set.scores)
    if got == expected:
        return None
    return (
        f"{sts_set.name} has {got} pairs, published {known_name} has {expected}: its "
        "scores are not comparable with published ones."
    )


def load_tsv(
    path: str | os.PathLike, columns: Mapping[str, str] | None = None
) -> StsSet:
    """Reads scored pairs from a UTF-8 TSV with a header, without quoting.

    Args:
        path: the file.
        columns: header names by role (``score``, ``sentence1``, ``sentence2``,
            ``subset``); roles left out are found by their usual names.

    Returns:
        The set, named after the file.

    Raises:
        ValueError: a missing column, no rows, or a bad line, which is named.
    """
    with open(path, "rb") as file:
        content = file.read()
    name = os.path.splitext(os.path.basename(path))[0]
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    if len(rows) < 2:
        raise ValueError(f"{path}: 0 rows; expected a header and at least one pair.")
    header = rows[0]
    index = {
        role: _find_column(path, header, role, (columns or {}).get(role))
        for role in _COLUMN_NAMES
    }
    scores, cells = [], {"sentence1": [], "sentence2": [], "subset": []}
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {number}: got {len(row)} fields, the header has "
                f"{len(header)}."
            )
        scores.append(_parse_score(path, number, row[index["score"]]))
        for role, values in cells.items():
            values.append(name if index[role] is None else row[index[role]])
    return StsSet(
        name=name,
        sentences1=tuple(cells["sentence1"]),
        sentences2=tuple(cells["sentence2"]),
        scores=np.array(scores),
        subsets=tuple(cells["subset"]),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _decode(path: str | os.PathLike, number: int, line: bytes) -> list[str]:
    """Splits one line into fields."""
    try:
        return line.removesuffix(b"\r").decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: byte {error.start} is not UTF-8 "
            f"(0x{line[error.start]:02x}). Convert the file to UTF-8."
        ) from error


def _find_column(
    path: str | os.PathLike, header: Sequence[str], role: str, name: str | None
) -> int | None:
    """Returns the position of a role's column; None for an absent optional one."""
    lower = [cell.strip().lower() for cell in header]
    if name is not None:
        if name not in header:
            raise ValueError(
                f"{path}: no column {name!r} for {role}; the header has "
                f"{', '.join(header)}."
            )
        return list(header).index(name)
    for candidate in _COLUMN_NAMES[role]:
        if candidate in lower:
            return lower.index(candidate)
    if role in _OPTIONAL_COLUMNS:
        return None
    raise ValueError(
        f"{path}: no column for {role}; the header has {', '.join(header)}, expected "
        f"one of {', '.join(_COLUMN_NAMES[role])}. Name it with --{role}_column."
    )


def _parse_score(path: str | os.PathLike, number: int, cell: str) -> float:
    """Reads a gold score, which must be a finite number."""
    try:
        score = float(cell)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(
            f"{path}, line {number}: the score is {cell!r}, expected a number."
        )
    return score
