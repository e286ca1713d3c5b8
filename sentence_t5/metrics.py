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
    mask: losses.CandidateMask,
    right: Float[Array, "B E"],
) -> dict[str, Float[Array, ""]]:
    """Summarises one batch.

    Args:
        output: from ``losses.contrastive_loss``.
        mask: the mask that the loss used.
        right: right embeddings, of which uniformity is taken (they are gathered for the
            loss anyway).

    Returns:
        ``accuracy`` and ``mrr`` of the positive among the candidates that count, where
        a tie counts against the model (collapsed embeddings must not look good);
        ``positive_cosine`` and ``negative_cosine``; ``alignment``; ``uniformity``;
        ``negatives_per_query``: how many candidates a row was told apart from.
    """
    others = mask.rights & ~jnp.eye(mask.rights.shape[0], dtype=bool)
    positive = jnp.diagonal(output.right_cosines)
    ahead = _count(others & (output.right_cosines >= positive[:, None]))
    num_others = _count(others)
    other_sum = _row_sum(others, output.right_cosines)
    if output.negative_cosines is not None:
        negative_ahead = output.negative_cosines >= positive[:, None]
        ahead += _count(mask.negatives & negative_ahead)
        num_others += _count(mask.negatives)
        other_sum += _row_sum(mask.negatives, output.negative_cosines)
    rows = mask.rows
    total_others = jnp.maximum(jnp.sum(jnp.where(rows, num_others, 0)), 1)
    return {
        "accuracy": _mean(rows, (ahead == 0).astype(jnp.float32)),
        "mrr": _mean(rows, 1.0 / (1.0 + ahead)),
        "positive_cosine": _mean(rows, positive),
        "negative_cosine": jnp.sum(jnp.where(rows, other_sum, 0.0)) / total_others,
        # ||l - r||² = 2 - 2 l·r for unit vectors.
        "alignment": _mean(rows, 2.0 - 2.0 * positive),
        "uniformity": uniformity(right, rows),
        "negatives_per_query": _mean(rows, num_others.astype(jnp.float32)),
    }


def uniformity(
    embeddings: Float[Array, "B E"], rows: Bool[Array, " B"]
) -> Float[Array, ""]:
    """Returns ``log mean exp(-2 ||x_i - x_j||²)`` over all i ≠ j.

    Args:
        embeddings: unit vectors.
        rows: True for the vectors that count.

    Returns:
        0 when all vectors are equal, about -4 when they are spread evenly; 0 for fewer
        than two vectors.
    """
    cosines = jnp.einsum("ie,je->ij", embeddings, embeddings, precision="highest")
    pairs = rows[:, None] & rows[None] & ~jnp.eye(rows.shape[0], dtype=bool)
    potentials = jnp.exp(-2.0 * (2.0 - 2.0 * cosines))
    num_pairs = jnp.sum(pairs)
    total = jnp.sum(jnp.where(pairs, potentials, 0.0))
    return jnp.where(num_pairs > 0, jnp.log(total / jnp.maximum(num_pairs, 1)), 0.0)


def tree_norms(tree) -> Float[Array, " leaves"]:
    """Returns the L2 norm of each leaf, in the order of ``jax.tree.leaves``."""
    return jnp.stack(
        [jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))
         for x in jax.tree.leaves(tree)]
    )  # fmt: skip


def _count(mask: Bool[Array, "B C"]) -> Float[Array, " B"]:
    return jnp.sum(mask, axis=1, dtype=jnp.float32)


def _row_sum(mask: Bool[Array, "B C"], x: Float[Array, "B C"]) -> Float[Array, " B"]:
    return jnp.sum(jnp.where(mask, x, 0.0), axis=1)


def _mean(rows: Bool[Array, " B"], x: Float[Array, " B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(rows, x, 0.0)) / jnp.maximum(jnp.sum(rows), 1)
