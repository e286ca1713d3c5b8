"""Stacks of T5 layers: the encoder, and the decoder's single step.

    x ─► [norm ─► self-attention ─► +] ─► [norm ─► MLP ─► +] ─► … ─► norm

The decoder has a cross-attention between the two. It is never run over a sequence: a
sentence embedding reads one start symbol's output, so its queries are independent of
each other. Layers are scanned (one compiled body, parameters stacked on axis 0) or
unrolled, with the same numbers.
"""

import functools

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from sentence_t5 import names
from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import dropout, layers, relative_positions

_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each on a normalised copy of the residual stream."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        mask: Bool[Array, "B #L L"],
        bias: Float[Array, "H L L"],
        texts: dropout.TextIndex | None,
    ) -> tuple[Float[Array, "B L D"], None]:
        """Runs one layer; the second output is what ``nn.scan`` wants."""
        cfg = self.config
        norm = functools.partial(layers.RMSNorm, cfg.layer_norm_epsilon, cfg.dtype)
        drop = functools.partial(dropout.Dropout, cfg.dropout_rate)
        x = layers.constrain_hidden(x)
        h = norm(name="attention_norm")(x)
        h = layers.Attention(cfg, name="attention")(h, h, mask, bias, texts)
        x = x + drop()(h, texts)
        h = norm(name="mlp_norm")(x)
        h = layers.MLP(cfg, name="mlp")(h, texts)
        return layers.constrain_hidden(x + drop()(h, texts)), None


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and MLP."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        self_mask: Bool[Array, "1 S S"],
        bias: Float[Array, "H S S"],
        memory: Float[Array, "B L D"],
        memory_mask: Bool[Array, "B S L"],
        texts: dropout.TextIndex | None,
        memory_texts: dropout.TextIndex | None,
    ) -> tuple[Float[Array, "B S D"], None]:
        """Runs one layer; the second output is what ``nn.scan`` wants."""
        cfg = self.config
        norm = functools.partial(layers.RMSNorm, cfg.layer_norm_epsilon, cfg.dtype)
        drop = functools.partial(dropout.Dropout, cfg.dropout_rate)
        h = norm(name="self_attention_norm")(x)
        h = layers.Attention(cfg, name="self_attention")(h, h, self_mask, bias, texts)
        x = x + drop()(h, texts)
        h = norm(name="cross_attention_norm")(x)
        h = layers.Attention(cfg, name="cross_attention")(
            h, memory, memory_mask, None, memory_texts
        )
        x = x + drop()(h, texts)
        h = norm(name="mlp_norm")(x)
        h = layers.MLP(cfg, name="mlp")(h, texts)
        return x + drop()(h, texts), None


def _run_layers(
    layer_cls: type[nn.Module],
    config: t5_config.T5Config,
    num_layers: int,
    x: Float[Array, "B L D"],
    *inputs: Array | None,
) -> Float[Array, "B L D"]:
    """Applies ``num_layers`` layers; called inside a compact module."""
    if config.remat != "none":
        layer_cls = nn.remat(
            layer_cls,
            policy=_REMAT_POLICIES[config.remat],
            # A scan's body can't be merged with its recomputation; unrolled layers can,
            # and would lose what remat is for.
            prevent_cse=not config.scan_layers,
        )
    if not config.scan_layers:
        for i in range(num_layers):
            x, _ = layer_cls(config, name=f"layers_{i}")(x, *inputs)
        return x
    scanned = nn.scan(
        layer_cls,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast,) * len(inputs),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: names.LAYERS},
    )
    x, _ = scanned(config, name="layers")(x, *inputs)
    return x


class EncoderStack(nn.Module):
    """The T5 encoder from embedded tokens to normalised hidden states."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        mask: Bool[Array, "B #L L"],
        texts: dropout.TextIndex | None = None,
    ) -> Float[Array, "B L D"]:
        """Encodes.

        Args:
            x: embedded tokens.
            mask: True where position q may look at position m. ``[B 1 L]`` hides
                padding; ``[B L L]`` also keeps packed texts apart.
            texts: what each position belongs to, by which dropout draws; None
                switches it off.

        Returns:
            Hidden states; those of padding are finite and mean nothing.
        """
        cfg = self.config
        length = x.shape[1]
        relpos = relative_positions.RelativePositionBias(cfg, True, name="relpos_bias")
        bias = relpos(length, length)
        x = dropout.Dropout(cfg.dropout_rate)(x, texts)
        x = _run_layers(EncoderLayer, cfg, cfg.num_layers, x, mask, bias, texts)
        x = layers.RMSNorm(cfg.layer_norm_epsilon, cfg.dtype, name="final_norm")(x)
        return dropout.Dropout(cfg.dropout_rate)(x, texts)


class DecoderStack(nn.Module):
    """The T5 decoder at its first position, for any number of independent queries."""

    config: t5_config.T5Config

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        memory: Float[Array, "B L D"],
        memory_mask: Bool[Array, "B S L"],
        texts: dropout.TextIndex | None = None,
    ) -> Float[Array, "B S D"]:
        """Decodes one step.

        Args:
            x: the embedded start symbol, once for each of ``S`` texts of a row.
            memory: the encoder's hidden states.
            memory_mask: True where a query's own text is.
            texts: what each position of ``memory`` belongs to, by which dropout draws;
                None switches it off.

        Returns:
            The decoder's first output for each query.
        """
        cfg = self.config
        num_queries = x.shape[1]
        # Every query is at position 0 and sees itself alone. The bias of offset 0 then
        # cancels in the softmax; it is kept so that the parameters are those of a T5.
        relpos = relative_positions.RelativePositionBias(cfg, False, name="relpos_bias")
        bias = relpos(1, 1)
        bias = jax.numpy.broadcast_to(bias, (cfg.num_heads, num_queries, num_queries))
        queries = None if texts is None else texts.of_texts()
        # A numpy constant: ONNX has no identity matrix of booleans.
        self_mask = np.eye(num_queries, dtype=bool)[None]
        x = dropout.Dropout(cfg.dropout_rate)(x, queries)
        x = _run_layers(
            DecoderLayer, cfg, cfg.num_decoder_layers,
            x, self_mask, bias, memory, memory_mask, queries, texts,
        )  # fmt: skip
        x = layers.RMSNorm(cfg.layer_norm_epsilon, cfg.dtype, name="final_norm")(x)
        return dropout.Dropout(cfg.dropout_rate)(x, queries)
