"""Dropout that draws by text: of features, and of attention weights.

A text is dropped alike wherever it lies: on any mesh, in a chunk of its batch, at any
padding, in a row that it shares. ``TextIndex`` says which text each position is of.

Source: one draw for all positions, as in T5X ``examples/t5/{layers,network}.py``.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class TextIndex(NamedTuple):
    """Which text each position of a row is of; by this, dropout draws.

    A text's draws depend on the step's key, the text's number and, in attention, the
    place in the text alone. So they are the same on any mesh, in a batch encoded in
    chunks, at any padding, and in rows that texts share.

    Attributes:
        numbers: each text's number in the global batch, [B S], S texts to a row.
        slots: which of its row's texts each position is of, [B L]; None where the
            positions are the texts themselves, or S is 1.
        places: each position's place in its text, [B L]; None where a text begins with
            its row.
    """

    numbers: Int[Array, "B S"]
    slots: Int[Array, "B L"] | None = None
    places: Int[Array, "B L"] | None = None

    def spread(self, per_text: Shaped[Array, "B S *rest"]) -> Array:
        """Gives each position what its text has: [B L *rest], or [B 1 *rest]."""
        if self.slots is None:
            return per_text
        slots = jnp.maximum(self.slots, 0)  # padding takes anything
        return jnp.take_along_axis(
            per_text, slots.reshape(*slots.shape, *[1] * (per_text.ndim - 2)), axis=1
        )

    def of_texts(self) -> "TextIndex":
        """Returns the index of positions that are the texts, each at its place 0."""
        return TextIndex(self.numbers, None, jnp.zeros_like(self.numbers))


class Dropout(nn.Module):
    """Dropout with one draw for all positions of a text, as T5X does it."""

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "B L D"], texts: TextIndex | None
    ) -> Float[Array, "B L D"]:
        """Drops whole features of a text.

        Args:
            x: activations.
            texts: what each position belongs to; None switches dropout off.
        """
        if texts is None or self.rate == 0.0:
            return x
        key = self.make_rng("dropout")

        def draw(number):
            return jax.random.bernoulli(
                jax.random.fold_in(key, number), 1.0 - self.rate, x.shape[-1:]
            )

        keep = texts.spread(jax.vmap(jax.vmap(draw))(texts.numbers))
        return jnp.where(keep, x / (1.0 - self.rate), 0.0)


class AttentionDropout(nn.Module):
    """Dropout of attention weights: one draw per head for all that ask a position."""

    rate: float

    @nn.compact
    def __call__(
        self, weights: Float[Array, "B H Q M"], texts: TextIndex | None
    ) -> Float[Array, "B H Q M"]:
        """Drops memory positions.

        Args:
            weights: attention weights.
            texts: what each memory position belongs to; None switches dropout off.
        """
        if texts is None or self.rate == 0.0:
            return weights
        key = self.make_rng("dropout")
        batch, num_heads, _, length = weights.shape
        numbers = jnp.broadcast_to(texts.spread(texts.numbers), (batch, length))
        places = texts.places
        if places is None:
            places = jnp.broadcast_to(jnp.arange(length), (batch, length))

        def draw(number, place):
            key_here = jax.random.fold_in(jax.random.fold_in(key, number), place)
            return jax.random.bernoulli(key_here, 1.0 - self.rate, (num_heads,))

        keep = jax.vmap(jax.vmap(draw))(numbers, places)
        keep = keep.swapaxes(1, 2)[:, :, None]
        return jnp.where(keep, weights / (1.0 - self.rate), 0.0)
