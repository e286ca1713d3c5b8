"""The parts of a T5 layer: RMS norm, MLP, attention, relative position bias, embedding.

Norms and softmax run in float32, products in the activation dtype. No layer has a bias,
and attention logits are not scaled: T5 folds 1/sqrt(K) into the query's initialiser.
Attention kernels are stored as matrices [D, H*K], so that Adafactor factors them.

Source: Raffel et al. 2020 (arXiv 1910.10683); initialisers and the bucket function as
in T5X ``examples/t5/layers.py``.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from sentence_t5 import names
from sentence_t5.t5 import config as t5_config

# Added to masked attention logits. Finite, so that a row of padding stays finite.
_MASKED = -1e10

_ACTIVATION_FNS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "linear": lambda x: x}

_attention_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_mlp_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_relpos_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


def logical_constraint(x: Array, *axes: str | None) -> Array:
    """Pins an activation's sharding by logical axes; no effect without a mesh."""
    return nn.with_logical_constraint(x, axes)


def constrain_hidden(x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    """Pins the sharding of the residual stream."""
    return logical_constraint(x, names.ACT_BATCH, names.ACT_LENGTH, names.ACT_EMBED)


class Dense(nn.Module):
    """A matrix product over the last axis, without bias.

    Attributes:
        features: width of the output.
        axes: logical names of the kernel's two axes.
        kernel_init: initialiser of the kernel, which is kept in float32.
        config: has the dtypes of the product and of the kernel's gradient.
    """

    features: int
    axes: tuple[str, str]
    kernel_init: nn.initializers.Initializer
    config: t5_config.T5Config

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Multiplies by the kernel."""
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(self.kernel_init, self.axes),
            (x.shape[-1], self.features),
            jnp.float32,
        )
        # As one matrix: XLA's CPU backend transposes less, and TPUs don't mind.
        rows = x.astype(self.config.dtype).reshape(-1, x.shape[-1])
        narrow = self.config.reduction_dtype == self.config.dtype
        product = _narrow_product if narrow else _wide_gradient_product
        return product(rows, kernel).reshape(*x.shape[:-1], self.features)


def _narrow_product(
    rows: Float[Array, "M I"], kernel: Float[Array, "I O"]
) -> Float[Array, "M O"]:
    """Multiplies in the rows' dtype, and so does the gradient."""
    return jnp.dot(rows, kernel.astype(rows.dtype))


@jax.custom_vjp
def _wide_gradient_product(
    rows: Float[Array, "M I"], kernel: Float[Array, "I O"]
) -> Float[Array, "M O"]:
    """Multiplies in the rows' dtype; the kernel's gradient keeps its float32 sums."""
    return _narrow_product(rows, kernel)


def _wide_forward(rows, kernel):
    return _narrow_product(rows, kernel), (rows, kernel)


def _wide_backward(residuals, cotangent):
    rows, kernel = residuals
    to_rows = jnp.dot(cotangent, kernel.astype(rows.dtype).T)
    return to_rows, jnp.dot(rows.T, cotangent, preferred_element_type=jnp.float32)


_wide_gradient_product.defvjp(_wide_forward, _wide_backward)


class RMSNorm(nn.Module):
    """T5's layer norm: ``x / rms(x) * scale``, no mean, no bias; in float32."""

    epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises the last axis."""
        scale = self.param(
            "scale",
            nn.with_logical_partitioning(nn.initializers.ones, (names.EMBED,)),
            (x.shape[-1],),
            jnp.float32,
        )
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = x * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normed * scale).astype(self.dtype)


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


class MLP(nn.Module):
    """The feed-forward part: relu (T5 1.0) or gated gelu (T5 1.1)."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B L D"], texts: TextIndex | None = None
    ) -> Float[Array, "B L D"]:
        """Applies the MLP to every position; ``texts`` as in ``Dropout``."""
        cfg = self.config
        gated = len(cfg.mlp_activations) > 1
        gates = []
        for i, activation in enumerate(cfg.mlp_activations):
            name = f"wi_{i}" if gated else "wi"
            h = Dense(cfg.d_ff, (names.EMBED, names.MLP), _mlp_init, cfg, name=name)(x)
            gates.append(_ACTIVATION_FNS[activation](h))
        h = math.prod(gates[1:], start=gates[0])
        h = logical_constraint(h, names.ACT_BATCH, names.ACT_LENGTH, names.ACT_MLP)
        h = Dropout(cfg.dropout_rate)(h, texts)
        return Dense(cfg.d_model, (names.MLP, names.EMBED), _mlp_init, cfg, name="wo")(
            h
        )


class Attention(nn.Module):
    """Multi-head attention without scaling, biases or causal assumptions."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B Q D"],
        memory: Float[Array, "B M D"],
        mask: Bool[Array, "#B #Q M"],
        bias: Float[Array, "H Q M"] | None,
        texts: TextIndex | None = None,
    ) -> Float[Array, "B Q D"]:
        """Attends from ``x`` to ``memory``.

        Args:
            x: the positions that ask.
            memory: the positions that answer (``x`` itself in self-attention).
            mask: True where a query may look at a memory position.
            bias: relative position bias, None in cross-attention.
            texts: what each memory position belongs to, as in ``AttentionDropout``.

        Returns:
            One vector for each query position.
        """
        cfg = self.config
        heads = (names.ACT_BATCH, names.ACT_LENGTH, names.ACT_HEADS, None)

        def project(name, source, init=_attention_init):
            dense = Dense(
                cfg.inner_dim, (names.EMBED, names.HEADS), init, cfg, name=name
            )
            split = dense(source).reshape(
                *source.shape[:-1], cfg.num_heads, cfg.head_dim
            )
            return logical_constraint(split, *heads)

        query = project("query", x, _query_init(cfg.head_dim))
        key, value = project("key", memory), project("value", memory)
        logits = jnp.einsum(
            "bqhk,bmhk->bhqm", query, key, preferred_element_type=jnp.float32
        )
        if bias is not None:
            logits = _add_to_rows(logits, bias.astype(jnp.float32))
        logits = jnp.where(mask[:, None], logits, _MASKED)
        weights = jax.nn.softmax(logits, axis=-1).astype(cfg.dtype)
        weights = AttentionDropout(cfg.dropout_rate)(weights, texts)
        out = jnp.einsum("bhqm,bmhk->bqhk", weights, value)
        out = logical_constraint(out, *heads)
        return Dense(
            cfg.d_model, (names.HEADS, names.EMBED), _attention_init, cfg,
            name="out",
        )(out.reshape(*x.shape[:-1], cfg.inner_dim))  # fmt: skip


@jax.custom_vjp
def _add_to_rows(
    x: Float[Array, "B *D"], shared: Float[Array, "*D"]
) -> Float[Array, "B *D"]:
    """Adds the same to every row.

    The gradient of what is shared is a sum over rows, for which XLA's CPU compiler has
    one slow thread; the product with ones is 30 times as fast.
    """
    return x + shared


def _add_to_rows_backward(_, gradient: Float[Array, "B *D"]):
    def product(rows):
        ones = jnp.ones(len(rows), rows.dtype)
        return jnp.einsum("b...,b->...", rows, ones)

    shared = jax.lax.platform_dependent(
        gradient, cpu=product, default=lambda rows: rows.sum(axis=0)
    )
    return gradient, shared


_add_to_rows.defvjp(lambda x, shared: (x + shared, None), _add_to_rows_backward)


def _query_init(head_dim: int) -> nn.initializers.Initializer:
    def init(key, shape, dtype):
        return _attention_init(key, shape, dtype) / math.sqrt(head_dim)

    return init


def relative_position_buckets(
    query_length: int,
    memory_length: int,
    *,
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
) -> Int[np.ndarray, "Q M"]:
    """Maps every (query, memory) offset to its bucket.

    Half of the buckets hold one offset each, the other half grow logarithmically up to
    ``max_distance``. Bidirectional tables give positive offsets (memory after the
    query) their own half; causal ones put every offset >= 0 into bucket 0.

    Args:
        query_length: number of query positions, which start at 0.
        memory_length: number of memory positions, which start at 0.
        bidirectional: True in the encoder, False in the decoder.
        num_buckets: buckets in all.
        max_distance: offsets from here on share the last bucket.

    Returns:
        int32 bucket numbers in [0, num_buckets).

    Source: Raffel et al. 2020, section 2.1; ``_relative_position_bucket`` of T5X.
    """
    offset = np.arange(memory_length)[None, :] - np.arange(query_length)[:, None]
    base = np.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        base = np.where(offset > 0, num_buckets, 0)
        distance = np.abs(offset)
    else:
        distance = np.maximum(-offset, 0)
    num_exact = num_buckets // 2
    # The epsilon keeps the exact powers (16, 32, 64) on the upper side of their border.
    ratio = np.maximum(distance, 1).astype(np.float32) / num_exact
    log_ratio = np.log(ratio + np.finfo(np.float32).eps)
    log_ratio /= np.float32(math.log(max_distance / num_exact))
    coarse = num_exact + (log_ratio * (num_buckets - num_exact)).astype(np.int32)
    coarse = np.minimum(coarse, num_buckets - 1)
    bucket = base + np.where(distance < num_exact, distance, coarse)
    return bucket.astype(np.int32)


class RelativePositionBias(nn.Module):
    """A learned bias per head and bucket, shared by all layers of a stack."""

    config: t5_config.T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, query_length: int, memory_length: int) -> Float[Array, "H Q M"]:
        """Returns the bias to add to attention logits."""
        cfg = self.config
        table = self.param(
            "embedding",
            nn.with_logical_partitioning(
                _relpos_init, (names.RELPOS_BUCKETS, names.AFFINITY)
            ),
            (cfg.relpos_num_buckets, cfg.num_heads),
            jnp.float32,
        )
        buckets = relative_position_buckets(
            query_length,
            memory_length,
            bidirectional=self.bidirectional,
            num_buckets=cfg.relpos_num_buckets,
            max_distance=cfg.relpos_max_distance,
        )
        # A product with one-hot rows: exact, and its gradient is a product too.
        one_hot = jax.nn.one_hot(buckets, cfg.relpos_num_buckets, dtype=jnp.float32)
        return jnp.einsum("qmr,rh->hqm", one_hot, table, precision="highest")


class TokenEmbedder(nn.Module):
    """The vocabulary table; its rows are used unscaled."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Looks the tokens up."""
        cfg = self.config
        table = self.param(
            "embedding",
            nn.with_logical_partitioning(
                nn.initializers.normal(stddev=1.0), (names.VOCAB, names.EMBED)
            ),
            (cfg.vocab_size, cfg.d_model),
            jnp.float32,
        )
        # Whole rows on every device: a lookup in split rows would be gathered for the
        # global batch and then thrown away.
        table = logical_constraint(table.astype(cfg.reduction_dtype), names.VOCAB, None)
        hidden = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
        return constrain_hidden(hidden)
