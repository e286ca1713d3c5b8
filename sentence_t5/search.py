"""Exact search: for each query, the k passages with the largest inner products.

    queries [Q E] ──┐
                    ├─► scores of one block [q p] ─► the best so far [q K] ─┐  device
    passages [n E] ─┘        block after block, one compiled shape          │
       scores again in float64, rounded to float32, ordered ◄───────────────┘  host

The device's float32 products depend in their last bits on the shapes of the blocks, so
they only choose the candidates: K is larger than k, and the host scores those anew. It
sums in float64 and rounds to float32, so that the last bits of a sum, which depend on
its order, decide nothing: scores that are equal in float32 tie, and ties go to the
smaller row. A result therefore doesn't depend on block sizes, on the number of devices
or on the platform.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sentence_t5 import partitioning

# Candidates beyond k: so many may tie, within float32's rounding, with the last place.
_SPARE = 32
_MAX_ROWS = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The nearest passages of each query, best first, of equal scores the smaller row.

    Attributes:
        scores: inner products, float32 [Q k].
        rows: rows of the passages, int64 [Q k].
    """

    scores: np.ndarray
    rows: np.ndarray


def top_k(
    queries: np.ndarray,
    passages: np.ndarray,
    k: int,
    *,
    partitioner: partitioning.Partitioner | None = None,
    query_block: int = 1024,
    passage_block: int = 16384,
    progress: Callable[[int], None] | None = None,
) -> Neighbours:
    """Finds the passages with the largest inner products, exactly.

    Device memory is bounded by one block of each: about ``4 * query_block *
    (passage_block + 2 k)`` bytes of scores beside the vectors. The passages may be a
    memory map; they are read once for each block of queries.

    Args:
        queries: float [Q E].
        passages: float [n E].
        k: passages per query, at least 1; all of them where there are fewer.
        partitioner: devices to share each block of queries; all local ones by default.
        query_block: queries scored at once, rounded up to a multiple of the devices.
        passage_block: passages scored at once.
        progress: called with the number of queries finished since the last call.

    Returns:
        ``min(k, n)`` passages for each query.

    Raises:
        ValueError: shapes that don't fit, or vectors that are not finite.
    """
    num_queries, num_passages = _check(queries, passages, k)
    k = min(k, num_passages)
    result = Neighbours(
        np.empty((num_queries, k), np.float32), np.empty((num_queries, k), np.int64)
    )
    if not num_queries or not k:
        return result
    partitioner = partitioner or partitioning.Partitioner(
        partitioning.MeshConfig(), jax.local_devices()
    )
    shards = partitioner.num_batch_shards
    query_block = _ceil(min(query_block, _next_power(num_queries)), shards)
    passage_block = min(passage_block, _next_power(num_passages))
    num_kept = min(k + _SPARE, num_passages)
    for start in range(0, num_queries, query_block):
        some = np.asarray(queries[start : start + query_block], np.float32)
        _check_finite(some, "queries", start)
        rows = _candidates(some, passages, num_kept, partitioner, query_block,
                           passage_block)  # fmt: skip
        for i, query in enumerate(some):
            scores, order = _rank(query, passages, rows[i])
            result.scores[start + i] = scores[:k]
            result.rows[start + i] = order[:k]
        if progress is not None:
            progress(len(some))
    return result


def inner_products(query: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Returns the scores float32 [n] of a query [E] with passages [n E].

    They are summed in float64, then rounded, and don't depend on which passages stand
    beside them.
    """
    products = np.einsum(
        "ne,e->n", passages.astype(np.float64), query.astype(np.float64)
    )
    return products.astype(np.float32)


def _rank(
    query: np.ndarray, passages: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Orders candidates by their float32 score, then by row."""
    rows = np.sort(rows)
    scores = inner_products(query, np.asarray(passages[rows]))
    order = np.argsort(-scores, kind="stable")
    return scores[order], rows[order]


def _candidates(
    queries: np.ndarray,
    passages: np.ndarray,
    num_kept: int,
    partitioner: partitioning.Partitioner,
    query_block: int,
    passage_block: int,
) -> np.ndarray:
    """Returns the rows of the best passages by the device's scores, [q num_kept]."""
    width = queries.shape[1]
    put_rows = partitioner.batch_sharding
    padded = np.zeros((query_block, width), np.float32)
    padded[: len(queries)] = queries
    on_device = jax.device_put(padded, put_rows)
    scores = jax.device_put(
        np.full((query_block, num_kept), -np.inf, np.float32), put_rows
    )
    rows = jax.device_put(np.zeros((query_block, num_kept), np.int32), put_rows)
    for first in range(0, len(passages), passage_block):
        block = np.asarray(passages[first : first + passage_block], np.float32)
        _check_finite(block, "passages", first)
        if len(block) < passage_block:
            block = np.pad(block, ((0, passage_block - len(block)), (0, 0)))
        scores, rows = _merge_block(
            scores,
            rows,
            on_device,
            jax.device_put(block, partitioner.replicated),
            np.int32(first),
            np.int32(len(passages)),
        )
    return np.asarray(rows)[: len(queries)]


@jax.jit
def _merge_block(
    best_scores: Float[Array, "Q K"],
    best_rows: Int[Array, "Q K"],
    queries: Float[Array, "Q E"],
    block: Float[Array, "P E"],
    first: Int[Array, ""],
    num_passages: Int[Array, ""],
) -> tuple[Float[Array, "Q K"], Int[Array, "Q K"]]:
    """Merges a block's passages into the best so far, which precede it in rows."""
    num_kept = best_scores.shape[1]
    scores = jnp.matmul(queries, block.T, precision=jax.lax.Precision.HIGHEST)
    exists = first + jnp.arange(block.shape[0]) < num_passages
    scores = jnp.where(exists[None, :], scores, -jnp.inf)
    joined = jnp.concatenate([best_scores, scores], axis=1)
    # Of equal values top_k takes the one further left: the smaller row.
    best_scores, position = jax.lax.top_k(joined, num_kept)
    old = jnp.take_along_axis(best_rows, jnp.minimum(position, num_kept - 1), axis=1)
    new = first + position - num_kept
    return best_scores, jnp.where(position < num_kept, old, new)


def _check(queries: np.ndarray, passages: np.ndarray, k: int) -> tuple[int, int]:
    """Checks shapes; returns the numbers of queries and passages."""
    if queries.ndim != 2 or passages.ndim != 2 or queries.shape[1] != passages.shape[1]:
        raise ValueError(
            f"queries and passages must be [Q E] and [n E] of one width, got "
            f"{list(queries.shape)} and {list(passages.shape)}."
        )
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    if len(passages) > _MAX_ROWS:
        raise ValueError(
            f"At most {_MAX_ROWS} passages can be searched, got {len(passages)}: "
            "search them in parts."
        )
    return len(queries), len(passages)


def _check_finite(vectors: np.ndarray, name: str, first: int) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{name}[{first + bad[0]}] is not finite: the model is broken."
        )


def _next_power(number: int) -> int:
    """Returns the smallest power of two that is not below ``number``, at least 8."""
    return max(8, 1 << (number - 1).bit_length())


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
