"""Texts as callers give them: checked, counted where too long, equal ones found.

Nothing is computed of them here; ``inference`` does that.
"""

import logging
from collections.abc import Iterable, Mapping, Set

import numpy as np

_logger = logging.getLogger(__name__)

_ON_TRUNCATE = ("warn", "error", "ignore")


def check(texts: Iterable[str]) -> list[str]:
    """Returns the texts as a list of strings.

    Raises:
        TypeError: naming what isn't one.
    """
    if isinstance(texts, Mapping | Set | bytes) or not isinstance(texts, Iterable):
        raise TypeError(
            f"texts is a {type(texts).__name__}, expected a list of str (or one str)."
        )
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"texts[{i}] is {text!r} ({type(text).__name__}), expected a str. Drop "
                "or replace missing values first."
            )
    return texts


def report_truncated(rows: list[list[int]], max_length: int, policy: str) -> None:
    """Says in one line how many rows are too long, or raises.

    Args:
        rows: token ids of n texts, untrimmed.
        max_length: tokens that a row is trimmed to.
        policy: ``warn``, ``error`` or ``ignore``.

    Raises:
        ValueError: another policy, or rows that are too long where that is an error.
    """
    if policy not in _ON_TRUNCATE:
        raise ValueError(
            f"on_truncate: got {policy!r}, expected one of {', '.join(_ON_TRUNCATE)}."
        )
    too_long = [i for i, row in enumerate(rows) if len(row) > max_length]
    if not too_long or policy == "ignore":
        return
    line = f"{len(too_long)} of {len(rows)} texts truncated (max {max_length} tokens)"
    if policy == "warn":
        _logger.warning("%s", line)
        return
    raise ValueError(
        f"{line}: texts[{too_long[0]}] has {len(rows[too_long[0]])}. Shorten the "
        "texts, raise max_length, or pass on_truncate='warn'."
    )


def distinct(
    rows: list[list[int]], lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the rows that differ, by their ids or their instruction's length.

    Args:
        rows: token ids of n texts.
        lengths: tokens of each row that are an instruction's, int [n].

    Returns:
        Where each distinct row occurs first [m], how many times it occurs [m], and
        which of the distinct rows each row is [n].
    """
    seen: dict[tuple, int] = {}
    same_as = [
        seen.setdefault((*row, length), len(seen))
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
    same_as = np.array(same_as, np.int64)
    _, firsts, times = np.unique(same_as, return_index=True, return_counts=True)
    return firsts, times, same_as
