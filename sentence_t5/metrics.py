"""What a training step reports beside its loss; all on the device, all scalars.

Alignment and uniformity are those of Wang & Isola 2020 (arXiv 2005.10242): smaller is
better for both. They need unit vectors.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sentence_t5 import losses


def contrastive_metrics(
    output: losses.ContrastiveOutput,
    rows: Bool[Array, " B"],
    right: Float[Array, "B E"],
    *,
    block_rows: int | None = None,
) -> dict[str, Float[Array, ""]]:
    """Summarises one batch.

    Args:
        output: from ``losses.contrastive_loss``.
        rows: True for real pairs.
        right: right embeddings, of which uniformity is taken (they are gathered for the
            loss anyway).
        block_rows: see ``losses.LossConfig``.

    Returns:
        ``accuracy`` and ``mrr`` of the positive among the candidates that count, where
        a tie counts against the model (collapsed embeddings must not look good);
        ``positive_cosine`` and ``negative_cosine``; ``alignment``; ``uniformity``;
        ``negatives_per_query``: how many candidates a row was told apart from.
    """
    total_others = jnp.maximum(jnp.sum(jnp.where(rows, output.num_others, 0.0)), 1.0)
    sum_others = jnp.sum(jnp.where(rows, output.sum_others, 0.0))
    return {
        "accuracy": _mean(rows, (output.num_ahead == 0).astype(jnp.float32)),
        "mrr": _mean(rows, 1.0 / (1.0 + output.num_ahead)),
        "positive_cosine": _mean(rows, output.positives),
        "negative_cosine": sum_others / total_others,
        # ||l - r||² = 2 - 2 l·r for unit vectors.
        "alignment": _mean(rows, 2.0 - 2.0 * output.positives),
        # Without the stop, differentiation would keep every block for a gradient that
        # nobody asks for.
        "uniformity": uniformity(
            jax.lax.stop_gradient(right), rows, block_rows=block_rows
        ),
        "negatives_per_query": _mean(rows, output.num_others),
    }


def uniformity(
    embeddings: Float[Array, "B E"],
    rows: Bool[Array, " B"],
    *,
    block_rows: int | None = None,
) -> Float[Array, ""]:
    """Returns ``log mean exp(-2 ||x_i - x_j||²)`` over all i ≠ j.

    Args:
        embeddings: unit vectors.
        rows: True for the vectors that count.
        block_rows: see ``losses.LossConfig``.

    Returns:
        0 when all vectors are equal, about -4 when they are spread evenly; 0 for fewer
        than two vectors.
    """
    numbers = jnp.arange(rows.shape[0])

    def total_of(some):
        x, real, index = some
        cosines = jnp.einsum("ie,je->ij", x, embeddings, precision="highest")
        pairs = real[:, None] & rows[None] & (index[:, None] != numbers)
        return jnp.sum(jnp.where(pairs, jnp.exp(-2.0 * (2.0 - 2.0 * cosines)), 0.0))

    every = (embeddings, rows, numbers)
    if block_rows is None:
        total = total_of(every)
    else:
        num_blocks = rows.shape[0] // block_rows
        blocks = [losses.split_rows(x, num_blocks) for x in every]
        total = jnp.sum(jax.lax.map(total_of, blocks))
    count = jnp.sum(rows, dtype=jnp.float32)
    num_pairs = count * (count - 1.0)
    return jnp.where(num_pairs > 0, jnp.log(total / jnp.maximum(num_pairs, 1.0)), 0.0)


def tree_norms(tree) -> Float[Array, " leaves"]:
    """Returns the L2 norm of each leaf, in the order of ``jax.tree.leaves``."""
    return jnp.stack(
        [jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))
         for x in jax.tree.leaves(tree)]
    )  # fmt: skip


def _mean(rows: Bool[Array, " B"], x: Float[Array, " B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(rows, x, 0.0)) / jnp.maximum(jnp.sum(rows), 1)
