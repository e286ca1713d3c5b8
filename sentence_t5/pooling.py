"""From hidden states [B L D] to one vector per text [B S D].

``S`` texts may share a row; ``mask`` [B S L] says which positions belong to which text
and count for its vector. An ordinary batch has ``S = 1``. All sums run in float32, and
a text without a counted position gives the zero vector with finite gradients.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sentence_t5 import names


def mean(
    hidden: Float[Array, "B L D"], mask: Bool[Array, "B S L"]
) -> Float[Array, "B S D"]:
    """Averages the counted positions, EOS among them.

    Source: Ni et al. 2021 (arXiv 2108.08877), "ST5-Enc mean".
    """
    weights = mask.astype(jnp.float32)
    total = jnp.einsum(
        "bsl,bld->bsd", weights, hidden.astype(jnp.float32), precision="highest"
    )
    return total / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1.0)


def first(
    hidden: Float[Array, "B L D"], mask: Bool[Array, "B S L"]
) -> Float[Array, "B S D"]:
    """Takes the first counted position.

    Source: Ni et al. 2021 (arXiv 2108.08877), "ST5-Enc first".
    """
    index = jnp.argmax(mask, axis=-1)
    taken = jnp.take_along_axis(hidden, index[..., None], axis=1)
    return jnp.where(mask.any(axis=-1)[..., None], taken.astype(jnp.float32), 0.0)


def max_over_tokens(
    hidden: Float[Array, "B L D"], mask: Bool[Array, "B S L"]
) -> Float[Array, "B S D"]:
    """Takes each feature's largest value over the counted positions."""
    hidden = hidden.astype(jnp.float32)[:, None]
    # Not max(where=, initial=), which the ONNX converter lacks.
    largest = jnp.max(jnp.where(mask[..., None], hidden, -jnp.inf), axis=2)
    return jnp.where(mask.any(axis=-1)[..., None], largest, 0.0)


def starts(mask: Bool[Array, "B S L"]) -> Int[Array, "B S"]:
    """Returns the position at which each text begins."""
    return jnp.argmax(mask, axis=-1).astype(jnp.int32)


def instruction_mask(
    mask: Bool[Array, "B S L"], lengths: Int[Array, "B S"], *, packed: bool
) -> Bool[Array, "B S L"]:
    """Says which positions are among the first ``lengths`` of a text.

    Args:
        mask: the positions of each text.
        lengths: of each text's instruction.
        packed: whether texts may begin elsewhere than their row does.
    """
    # Not arange, which the ONNX converter can't make of a symbolic length.
    positions = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 2)
    ends = lengths + starts(mask) if packed else lengths
    return positions < ends[..., None]


class AttentionPooling(nn.Module):
    """A learned query: softmax over the counted positions of ``hidden @ query``.

    The query starts at zero, so that training starts from mean pooling.
    """

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B L D"], mask: Bool[Array, "B S L"]
    ) -> Float[Array, "B S D"]:
        """Pools."""
        query = self.param(
            "query",
            nn.with_logical_partitioning(nn.initializers.zeros, (names.EMBED,)),
            (hidden.shape[-1],),
            jnp.float32,
        )
        hidden = hidden.astype(jnp.float32)
        logits = jnp.einsum("bld,d->bl", hidden, query, precision="highest")
        logits = jnp.where(mask, logits[:, None], -1e10)
        weights = jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)
        return jnp.einsum("bsl,bld->bsd", weights, hidden, precision="highest")
