"""STS files: scored sentence pairs read from TSV, with every bad line named.

Reads what papers call STS12 to STS16, STS-B and SICK-R once they are one TSV each, with
a header and, if the set has them, a column of subsets. The metric is in ``sts``.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from sentence_t5.evals import tsv_files

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


@dataclasses.dataclass(frozen=True)
class StsSet:
    """Pairs of sentences with gold scores, as read from one file.

    Attributes:
        name: the file's name without folder and ending; with folders, if need be, to
            differ from another's.
        sentences1: first sentences.
        sentences2: second sentences, as many.
        scores: gold scores, float64 [n]; NaN where the file has no such column.
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
    # A name may begin with folders; what they are called says nothing.
    name = os.path.basename(sts_set.name)
    match = re.search(r"STS[-_ ]?(?:20)?(1[2-6])", name, re.IGNORECASE)
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
    path: str | os.PathLike,
    columns: Mapping[str, str] | None = None,
    optional: Sequence[str] = ("subset",),
) -> StsSet:
    """Reads scored pairs from a UTF-8 TSV with a header, without quoting.

    Args:
        path: the file.
        columns: header names by role (``score``, ``sentence1``, ``sentence2``,
            ``subset``); roles left out are found by their usual names.
        optional: roles that a file may lack, of ``score`` and ``subset``.

    Returns:
        The set, named after the file.

    Raises:
        ValueError: a missing column, no rows, or a bad line, which is named.
    """
    table = tsv_files.read(path, "pair")
    name = os.path.splitext(os.path.basename(path))[0]
    index = {
        role: _find_column(table, role, (columns or {}).get(role), role in optional)
        for role in _COLUMN_NAMES
    }
    num_rows = len(table.rows)
    scores, subsets = (math.nan,) * num_rows, (name,) * num_rows
    if index["score"] is not None:
        cells = enumerate(table.column(index["score"]), start=2)
        scores = [_parse_score(path, number, cell) for number, cell in cells]
    if index["subset"] is not None:
        subsets = table.column(index["subset"])
    return StsSet(
        name=name,
        sentences1=table.column(index["sentence1"]),
        sentences2=table.column(index["sentence2"]),
        scores=np.array(scores),
        subsets=subsets,
        sha256=table.sha256,
    )


def _find_column(
    table: tsv_files.Table, role: str, name: str | None, optional: bool
) -> int | None:
    """Returns the position of a role's column; None for an absent optional one."""
    if name is not None:
        if name not in table.header:
            raise ValueError(
                f"{table.path}: no column {name!r} for {role}; the header has "
                f"{', '.join(table.header)}."
            )
        return table.header.index(name)
    found = table.find(_COLUMN_NAMES[role])
    if found is None and not optional:
        raise ValueError(
            f"{table.path}: no column for {role}; the header has "
            f"{', '.join(table.header)}, expected one of "
            f"{', '.join(_COLUMN_NAMES[role])}. Name it with --{role}_column."
        )
    return found


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
