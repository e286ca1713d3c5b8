"""The parts of a T5 layer: RMS norm, MLP, attention; and the table of tokens.

Norms and softmax run in float32, products in the activation dtype. No layer has a bias,
and attention logits are not scaled: T5 folds 1/sqrt(K) into the query's initialiser.
Attention kernels are stored as matrices [D, H*K], so that Adafactor factors them.

Source: Raffel et al. 2020 (arXiv 1910.10683); initialisers as in T5X
``examples/t5/layers.py``.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sentence_t5 import names
from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import dropout

# Added to masked attention logits. Finite, so that a row of padding stays finite.
_MASKED = -1e10

_ACTIVATION_FNS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "linear": lambda x: x}

_attention_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_mlp_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


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


class MLP(nn.Module):
    """The feed-forward part: relu (T5 1.0) or gated gelu (T5 1.1)."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B L D"], texts: dropout.TextIndex | None = None
    ) -> Float[Array, "B L D"]:
        """Applies the MLP to every position; ``texts`` as in ``dropout.Dropout``."""
        cfg = self.config
        gated = len(cfg.mlp_activations) > 1
        gates = []
        for i, activation in enumerate(cfg.mlp_activations):
            name = f"wi_{i}" if gated else "wi"
            h = Dense(cfg.d_ff, (names.EMBED, names.MLP), _mlp_init, cfg, name=name)(x)
            gates.append(_ACTIVATION_FNS[activation](h))
        h = math.prod(gates[1:], start=gates[0])
        h = logical_constraint(h, names.ACT_BATCH, names.ACT_LENGTH, names.ACT_MLP)
        h = dropout.Dropout(cfg.dropout_rate)(h, texts)
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
        texts: dropout.TextIndex | None = None,
    ) -> Float[Array, "B Q D"]:
        """Attends from ``x`` to ``memory``.

        Args:
            x: the positions that ask.
            memory: the positions that answer (``x`` itself in self-attention).
            mask: True where a query may look at a memory position.
            bias: relative position bias, None in cross-attention.
            texts: what each memory position belongs to; None switches dropout off.

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
        weights = dropout.AttentionDropout(cfg.dropout_rate)(weights, texts)
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
