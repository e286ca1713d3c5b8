"""Floating-point operations of a step, counted from the model's shape.

A multiply and an add are two operations. Only matrix products count. The compiler's own
count can't be used: it takes a scanned layer once, however many layers there are.

    model     what the mathematics needs: forward, and twice that for gradients
    hardware  with what is computed again (remat, chunked batches), and float32
              products as the bfloat16 passes that they take on a TPU
"""

import dataclasses
from collections.abc import Sequence

from sentence_t5 import encoder

# precision='highest': six products of bfloat16 parts.
_PASSES_OF_FLOAT32 = 6


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of one step on all chips together; see the module's text."""

    model: float
    hardware: float


def per_text(config: encoder.EncoderConfig, length: int) -> tuple[float, float, float]:
    """Counts one text's forward pass.

    Args:
        config: the encoder.
        length: tokens, padding included.

    Returns:
        Operations of the layers' products with weights, of attention's products between
        tokens, and of the projection.
    """
    t5 = config.t5
    matrix = 2 * t5.d_model * t5.inner_dim
    mlp = (len(t5.mlp_activations) + 1) * 2 * t5.d_model * t5.d_ff
    weights = t5.num_layers * length * (4 * matrix + mlp)
    between = t5.num_layers * length * length * 4 * t5.inner_dim
    if config.has_decoder:
        # One query: keys and values of the cross-attention run over all tokens.
        layer = 6 * matrix + 2 * length * matrix + mlp
        weights += t5.num_decoder_layers * layer
        between += t5.num_decoder_layers * (1 + length) * 4 * t5.inner_dim
    projection = 2 * t5.d_model * config.projection_dim if config.projection_dim else 0
    return float(weights), float(between), float(projection)


def encode_step(config: encoder.EncoderConfig, batch_size: int, length: int) -> Flops:
    """Counts the encoding of ``batch_size`` texts."""
    weights, between, projection = per_text(config, length)
    return Flops(
        batch_size * (weights + between + projection),
        batch_size * (weights + between + _PASSES_OF_FLOAT32 * projection),
    )


def train_step(
    config: encoder.EncoderConfig,
    rows: Sequence[tuple[int, int]],
    *,
    batch_size: int,
    num_candidates: int,
    is_chunked: bool = False,
) -> Flops:
    """Counts a training step: forward, backward, and the loss over the global batch.

    Args:
        config: the encoder.
        rows: how many rows of how many tokens go through the encoder. A packed row
            counts as one text.
        batch_size: pairs in the global batch.
        num_candidates: right sides and hard negatives of the global batch.
        is_chunked: the batch is encoded in chunks, with one more forward pass.
    """
    model = hardware = 0.0
    for number, length in rows:
        weights, between, projection = per_text(config, length)
        model += 3 * number * (weights + between + projection)
        again = {"none": 0.0, "dots": between, "full": weights + between}
        passes = 3 * (weights + between + _PASSES_OF_FLOAT32 * projection)
        passes += again[config.t5.remat]
        if is_chunked:
            passes += weights + between + _PASSES_OF_FLOAT32 * projection
        hardware += number * passes
    logits = 3 * 2 * batch_size * num_candidates * config.embedding_dim
    return Flops(model + logits, hardware + _PASSES_OF_FLOAT32 * logits)
