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
from jaxtyping import Array, Float

from sentence_t5 import names, partitioning

# (params, texts: a tree of arrays [B ...]) → embeddings [B ... E].
EmbedFn = Callable[[Any, Any], Array]
# Embeddings of each group → (loss, whatever goes with it).
LossFn = Callable[[list[Float[Array, "B *rest E"]]], tuple[Float[Array, ""], Any]]


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
        embed: embeds some rows of texts, wherever they lie in the batch: what dropout
            depends on must be among their arrays.
        loss: of the embeddings of all groups.
        params: differentiated with respect to.
        groups: texts of the global batch; each group is a tree of arrays [B ...].
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

    def forward(params, groups):
        def one(chunk):
            return [embed(params, texts) for texts in chunk]

        embedded = jax.lax.map(one, jax.tree.map(chunks_of, groups))
        return [rows_of(x) for x in embedded]

    def backward(params, groups, cotangents):
        # Each copy works on its own gradients until the sum at the end.
        params = jax.lax.pcast(params, names.DATA, to="varying")

        def one(total, chunk):
            groups, cotangents = chunk

            def embed_all(params):
                return [embed(params, texts) for texts in groups]

            _, pull = jax.vjp(embed_all, params)
            return jax.tree.map(jnp.add, total, pull(cotangents)[0]), None

        chunks = jax.tree.map(chunks_of, (groups, cotangents))
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

    rows, groups = P(names.DATA), list(groups)
    embedded = over_copies(forward, (P(), rows), rows)(params, groups)
    (value, aux), cotangents = jax.value_and_grad(loss, has_aux=True)(embedded)
    grads = over_copies(backward, (P(), rows, rows), P())(params, groups, cotangents)
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
