"""The shape of a cloud of embeddings: how near pairs are, how even the spread is.

Numbers only: no model, no JAX. All of it is of directions: rows become unit vectors.

    alignment        mean over positive pairs of |u - v|^2          0 is best, 4 worst
    uniformity       log of the mean over i < j of exp(-2 |x_i - x_j|^2)
                                                           0 is worst, least is -8
    average cosine   mean over i < j of x_i . x_j: near 1, all point the same way
    spectrum         s_k / sqrt(n) of the rows less their mean: the standard deviations
                     along the principal axes; their squares add up to 1 - |mean|^2
    effective rank   exp of the entropy of s_k / sum(s): how many axes are in use

A small alignment alone means nothing: a collapsed model has 0. Read it with uniformity.

Source: Wang and Isola 2020 (arXiv 2005.10242) for alignment and uniformity; Roy and
Vetterli 2007 for the effective rank; Jing et al. 2022 (arXiv 2110.09348) for the
spectrum of the centred rows.
"""

import numpy as np

# Rows compared with all others at once: 40 MB of distances for 20,000 texts.
_BLOCK_ROWS = 256
# Size under which a singular value is rounding noise of float32 unit vectors.
_NOISE = 1e-6


def unit(vectors: np.ndarray) -> np.ndarray:
    """Returns the rows' directions, [n E] → float64 [n E].

    Raises:
        ValueError: no matrix, or a row without a direction (zero or not finite).
    """
    vectors = np.asarray(vectors, np.float64)
    if vectors.ndim != 2:
        raise ValueError(
            f"got embeddings of shape {vectors.shape}, expected one row for each text."
        )
    norms = np.linalg.norm(vectors, axis=1)
    bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0.0))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(vectors)} embeddings have no direction, first row "
            f"{bad[0]}, of norm {norms[bad[0]]:g}. Leave such texts out."
        )
    return vectors / norms[:, None]


def alignment(left: np.ndarray, right: np.ndarray) -> float:
    """Returns the mean squared distance of positive pairs.

    Args:
        left: one side's embeddings, [n E].
        right: the other side's, [n E].

    Raises:
        ValueError: no pairs, or sides of different shapes.
    """
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape or not len(left):
        raise ValueError(
            f"got sides of shapes {left.shape} and {right.shape}, expected one shape "
            "and at least one pair."
        )
    return float(np.sum((unit(left) - unit(right)) ** 2, axis=1).mean())


def uniformity(vectors: np.ndarray) -> float:
    """Returns the log of the mean Gaussian potential of all pairs of rows.

    A row is not compared with itself. Equal rows are pairs at distance 0, so give
    each text once.

    Args:
        vectors: embeddings, [n E] with two rows at least.
    """
    vectors = _at_least_two(unit(vectors))
    n, total = len(vectors), 0.0
    for start in range(0, n, _BLOCK_ROWS):
        block = vectors[start : start + _BLOCK_ROWS]
        # |x - y|^2 = 2 - 2 x . y; only rows after the diagonal count.
        potential = np.exp(-2.0 * (2.0 - 2.0 * block @ vectors[start:].T))
        total += float(np.triu(potential, k=1).sum())
    return float(np.log(total / (n * (n - 1) / 2)))


def average_cosine(vectors: np.ndarray) -> float:
    """Returns the mean cosine of all pairs of different rows, [n E] with n >= 2."""
    vectors = _at_least_two(unit(vectors))
    n = len(vectors)
    total = vectors.sum(0)
    return float((total @ total - n) / (n * (n - 1)))


def spectrum(vectors: np.ndarray) -> np.ndarray:
    """Returns the standard deviations along the principal axes, largest first.

    Args:
        vectors: embeddings, [n E].

    Returns:
        float64 [min(n, E)]. What is below float32's rounding noise is 0: the vectors of
        a collapsed model differ by it, and it would count as full rank.
    """
    vectors = unit(vectors)
    centred = vectors - vectors.mean(0)
    values = np.linalg.svd(centred, compute_uv=False) / np.sqrt(len(vectors))
    return np.where(values > _NOISE, values, 0.0)


def effective_rank(singular_values: np.ndarray) -> float | None:
    """Returns exp of the entropy of the normalized values; None if all are 0.

    Args:
        singular_values: what ``spectrum`` returns, [k].
    """
    values = np.asarray(singular_values, np.float64)
    values = values[values > 0.0]
    if not len(values):
        return None
    shares = values / values.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def _at_least_two(vectors: np.ndarray) -> np.ndarray:
    if len(vectors) < 2:
        raise ValueError(
            f"got {len(vectors)} embedding(s), expected two or more to compare."
        )
    return vectors
