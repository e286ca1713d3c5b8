"""Semantic textual similarity: correlation of cosines with human scores.

Numbers only: no model, no JAX. Correlations are multiplied by 100, as in papers. A set
is scored three ways, which differ by points and are all called "STS" somewhere:

    all     one correlation over the pooled pairs of all subsets (the default to quote)
    mean    mean of the subsets' correlations
    wmean   the same, weighted by the subsets' sizes

A correlation that does not exist (a constant array, NaN) is None with a reason. A mean
over subsets of which one is undefined is undefined too.

Source: SentEval (Conneau and Kiela 2018); "all" as in SimCSE (Gao et al. 2021).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

# Relative range under which differences are rounding noise of float32.
_CONSTANT_RANGE = 1e-6


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Agreement of similarities with gold scores on ``n`` pairs.

    Attributes:
        n: number of pairs.
        spearman: rank correlation × 100 with ties averaged, or None if undefined.
        pearson: linear correlation × 100, or None if undefined.
        reason: why a correlation is undefined; None if both are defined.
    """

    n: int
    spearman: float | None
    pearson: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class StsResult:
    """Scores of one STS set.

    Attributes:
        all: over the pooled pairs.
        mean: unweighted over subsets.
        wmean: weighted by subset size.
        subsets: by name, in the given order.
        similarity_mean: mean of the similarities that are finite; None without any.
        similarity_std: their standard deviation; near zero for a collapsed model.
        collapsed: whether all similarities are the same, so that nothing is ranked.
    """

    all: Correlation
    mean: Correlation
    wmean: Correlation
    subsets: dict[str, Correlation]
    similarity_mean: float | None
    similarity_std: float | None
    collapsed: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON-able values."""
        return dataclasses.asdict(self)


def spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    """Returns the rank correlation of x [n] and y [n] × 100; None if undefined."""
    return correlate(x, y).spearman


def correlate(similarity: np.ndarray, gold: np.ndarray) -> Correlation:
    """Correlates similarities with gold scores.

    Args:
        similarity: one number per pair, [n].
        gold: one human score per pair, [n].

    Returns:
        Both correlations × 100, or None and the reason.

    Raises:
        ValueError: arrays of different shapes.
    """
    x, y = np.asarray(similarity, np.float64), np.asarray(gold, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(
            f"got similarities of shape {x.shape} and gold scores of shape {y.shape}, "
            "expected two vectors of the same length."
        )
    reason = _undefined("similarities", x) or _undefined("gold scores", y)
    if reason:
        return Correlation(len(x), None, None, reason)
    import scipy.stats  # slow, and no training needs it before its first step

    return Correlation(
        len(x),
        100.0 * float(scipy.stats.spearmanr(x, y).statistic),
        100.0 * float(scipy.stats.pearsonr(x, y).statistic),
    )


def evaluate(
    similarity_by_subset: Mapping[str, np.ndarray],
    gold_by_subset: Mapping[str, np.ndarray],
) -> StsResult:
    """Scores an STS set by subset, pooled and averaged.

    Args:
        similarity_by_subset: the model's similarity of each pair, [n] by subset.
        gold_by_subset: the human scores in the same order, [n] by subset.

    Returns:
        All three ways of summing up, with undefined values as None.

    Raises:
        ValueError: no pairs, other subsets or other sizes on the two sides.
    """
    if not gold_by_subset:
        raise ValueError("got no subsets: an STS set needs at least one pair.")
    if set(similarity_by_subset) != set(gold_by_subset):
        raise ValueError(
            f"got similarities for subsets {sorted(similarity_by_subset)} and gold "
            f"scores for {sorted(gold_by_subset)}, expected the same names."
        )
    subsets = {
        name: correlate(similarity_by_subset[name], gold)
        for name, gold in gold_by_subset.items()
    }
    similarity = np.concatenate(
        [np.asarray(similarity_by_subset[name], np.float64) for name in gold_by_subset]
    )
    gold = np.concatenate([np.asarray(g, np.float64) for g in gold_by_subset.values()])
    finite = similarity[np.isfinite(similarity)]
    return StsResult(
        all=correlate(similarity, gold),
        mean=average(subsets, weighted=False),
        wmean=average(subsets, weighted=True),
        subsets=subsets,
        similarity_mean=float(finite.mean()) if finite.size else None,
        similarity_std=float(finite.std()) if finite.size else None,
        collapsed=similarity.size > 1 and _is_constant(similarity),
    )


def average(subsets: Mapping[str, Correlation], weighted: bool) -> Correlation:
    """Averages correlations by name; undefined if one of them is.

    Args:
        subsets: correlations of subsets, or of whole sets.
        weighted: weight each by its number of pairs.

    Returns:
        The average, or None with the names that are undefined.
    """
    total = sum(c.n for c in subsets.values())
    undefined = [name for name, c in subsets.items() if c.reason]
    if undefined:
        return Correlation(total, None, None, f"undefined on {', '.join(undefined)}")
    weights = [c.n if weighted else 1 for c in subsets.values()]
    return Correlation(
        total,
        float(np.average([c.spearman for c in subsets.values()], weights=weights)),
        float(np.average([c.pearson for c in subsets.values()], weights=weights)),
    )


def cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the cosine of each pair of rows, [n E] and [n E] → float64 [n].

    A zero vector has no direction: its cosine is NaN, which ``correlate`` reports.
    """
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    norms = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.einsum("ne,ne->n", left, right) / norms


def _undefined(what: str, values: np.ndarray) -> str | None:
    """Says why nothing correlates with these values; None if something can."""
    if len(values) < 2:
        return f"{len(values)} pair(s), two are needed"
    num_bad = int(np.sum(~np.isfinite(values)))
    if num_bad:
        return f"{num_bad} of {len(values)} {what} are not finite"
    if _is_constant(values):
        return f"all {what} are {values[0]:.6g}"
    return None


def _is_constant(values: np.ndarray) -> bool:
    """Whether finite values differ by no more than rounding noise."""
    if not np.all(np.isfinite(values)):
        return False
    return bool(np.ptp(values) <= _CONSTANT_RANGE * np.max(np.abs(values)))
