"""Where a query's right text stands: before its hard negative, among all of its task.

    pairs      share of queries nearer to their own text than to their hard negative
    retrieval  mean of 1 / rank of their own text among the task's texts

Numbers only: no model, no JAX. A tie counts as lost, so that a collapsed model has no
score by chance.
"""

from collections.abc import Sequence

import numpy as np


def share_before(left: np.ndarray, right: np.ndarray, negative: np.ndarray) -> float:
    """Returns the share of rows whose right side is nearer than the negative.

    Args:
        left: queries, [n E].
        right: their own texts, [n E].
        negative: a hard negative of each, [n E].
    """
    return float((_rowwise(left, right) > _rowwise(left, negative)).mean())


def mean_reciprocal_rank(
    left: np.ndarray,
    right: np.ndarray,
    texts: Sequence[str],
    negatives: np.ndarray,
) -> float:
    """Returns the mean of 1 / rank of each query's own text.

    Args:
        left: queries, [n E].
        right: their own texts' vectors, [n E].
        texts: the own texts. One that is right for several rows counts once, and is
            no rival of itself.
        negatives: vectors of further texts, right for no row, [m E].
    """
    _, first, own = np.unique(np.asarray(texts), return_index=True, return_inverse=True)
    scores = left @ np.concatenate([right[first], negatives]).T
    is_ahead = scores >= _rowwise(left, right)[:, None]
    is_ahead[np.arange(len(left)), own] = False
    return float((1.0 / (1 + is_ahead.sum(axis=1))).mean())


def _rowwise(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.einsum("ne,ne->n", left, right)
