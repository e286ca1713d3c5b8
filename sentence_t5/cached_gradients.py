"""Exact gradients of a contrastive batch that is larger than memory.

    pass 1   embeddings of all texts, chunk by chunk; no activations are kept
    loss     over the global batch, with its gradient for every embedding
    pass 2   each chunk again, with that gradient pulled back into the parameters

Activations are bounded by one chunk, yet the loss sees every candidate: this is not
gradient accumulation, which would shrink the negatives to a chunk. A chunk takes rows
from every device, so that nothing is moved. Copies of the parameters (``data``) sum
their gradients once, after the last chunk.

Source: Gao et al. 2021, "GradCache" (arXiv 2101.06983).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sentence_t5 import names, partitioning

# (params, texts of B pairs: arrays [B G ...], pair numbers [B], number of the group)
# → embeddings [B G E].
EmbedFn = Callable[[Any, Any, Int[Array, " B"], int], Array]
# Embeddings of each group → (loss, whatever goes with it).
LossFn = Callable[[list[Float[Array, "B G E"]]], tuple[Float[Array, ""], Any]]


def value_and_grad(
    embed: EmbedFn,
    loss: LossFn,
    params: Any,
    groups: Sequence[Any],
    *,
    num_chunks: int,
    partitioner: partitioning.Partitioner,
    reduction_dtype: str,
) -> tuple[tuple[Float[Array, ""], Any], Any]:
    """Does what ``jax.value_and_grad`` of embed and loss does, in bounded memory.

    Args:
        embed: embeds the texts of some pairs, wherever they lie in the batch: a pair's
            number is all that its dropout may depend on.
        loss: of the embeddings of all groups.
        params: differentiated with respect to.
        groups: texts of the global batch; each group has one length, and is an array
            or a tree of arrays [B G ...].
        num_chunks: divides the rows that a device has.
        partitioner: the mesh on which this is traced.
        reduction_dtype: of the gradients while copies sum them; each copy's own chunks
            are summed as the parameters are.

    Returns:
        ((loss, aux), gradients), the gradients like the parameters.
    """

    def chunks_of(x):
        return _split(x, num_chunks, partitioner.mesh.shape[names.FSDP])

    def rows_of(x):
        return _join(x, partitioner.mesh.shape[names.FSDP])

    def forward(params, pairs, *groups):
        def one(chunk):
            pairs, *texts = chunk
            return [embed(params, t, pairs, i) for i, t in enumerate(texts)]

        embedded = jax.lax.map(one, jax.tree.map(chunks_of, [pairs, *groups]))
        return [rows_of(x) for x in embedded]

    def backward(params, pairs, groups, cotangents):
        # Each copy works on its own gradients until the sum at the end.
        params = jax.lax.pcast(params, names.DATA, to="varying")

        def one(total, chunk):
            pairs, texts, cotangents = chunk

            def embed_all(params):
                return [embed(params, t, pairs, i) for i, t in enumerate(texts)]

            _, pull = jax.vjp(embed_all, params)
            return jax.tree.map(jnp.add, total, pull(cotangents)[0]), None

        chunks = jax.tree.map(chunks_of, (pairs, list(groups), cotangents))
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(one, zeros, chunks)
        sums = jax.lax.psum(_cast(total, reduction_dtype), names.DATA)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), sums, total)

    def over_copies(f, in_specs, out_specs):
        return jax.shard_map(
            f,
            mesh=partitioner.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={names.DATA},
        )

    rows = P(names.DATA)
    pairs = jnp.arange(jax.tree.leaves(groups)[0].shape[0])
    embedded = over_copies(forward, (P(), rows, *[rows] * len(groups)), rows)(
        params, pairs, *groups
    )
    (value, aux), cotangents = jax.value_and_grad(loss, has_aux=True)(embedded)
    grads = over_copies(backward, (P(), rows, rows, rows), P())(
        params, pairs, list(groups), cotangents
    )
    return (value, aux), grads


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _split(x: Array, num_chunks: int, num_shards: int) -> Array:
    """Splits rows [B ...] into [n B/n ...], each chunk with rows of every shard."""
    rows = x.reshape(num_shards, num_chunks, -1, *x.shape[1:])
    return _pinned(rows.swapaxes(0, 1)).reshape(num_chunks, -1, *x.shape[1:])


def _join(x: Array, num_shards: int) -> Array:
    """Undoes ``_split``."""
    rows = x.reshape(x.shape[0], num_shards, -1, *x.shape[2:])
    return _pinned(rows).swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _pinned(x: Array) -> Array:
    """Keeps [n shards rows ...] on the shards it comes from."""
    spec = P(None, names.FSDP, *[None] * (x.ndim - 2))
    return jax.lax.with_sharding_constraint(x, spec)
