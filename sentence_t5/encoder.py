"""SentenceEncoder: tokens → T5 → pool → project → L2 norm → one unit vector per text.

    tokens [B L] ─► T5 encoder ─► hidden [B L D] ─► pooling ─► pooled [B D]
                          └─► decoder, one start symbol ─┘        └─► @ W [D E] ─► unit

A text may begin with an instruction. The T5 encoder attends to all of the text; whether
the pooling counts the instruction's tokens is ``EncoderConfig.pool_instruction``.

The three embeddings of the Sentence-T5 paper are poolings here: ``first``, ``mean`` and
``decoder_first``. Both sides of a pair go through the same parameters.

Rows may be packed with several texts. Attention, pooling and the decoder keep them
apart, and relative positions are those of one text, whose tokens follow one another.

Source: Ni et al. 2021 (arXiv 2108.08877); projection and norm as in T5X Retrieval.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sentence_t5 import names, pooling
from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import dropout, layers, stack

COSINE, DOT = "cosine", "dot"
POOLINGS = ("mean", "first", "max", "attention", "decoder_first")
# Vectors shorter than this are left as they are by the norm.
_SMALLEST_NORM = 1e-12

_projection_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """What turns tokens into an embedding.

    Attributes:
        t5: the T5 underneath.
        pooling: one of ``POOLINGS``. ``decoder_first`` is the encoder-decoder
            embedding: the decoder's output for one start symbol.
        projection_dim: width ``E`` of the embedding; None leaves the pooled vector as
            it is (raw T5), so that ``E = D``.
        normalize: scale embeddings to unit length.
        pool_instruction: pool an instruction's tokens like the text's. False leaves
            them out, as INSTRUCTOR does (Su et al. 2022, arXiv 2212.09741); for
            ``decoder_first`` the decoder doesn't attend to them.
    """

    t5: t5_config.T5Config = dataclasses.field(default_factory=t5_config.T5Config)
    pooling: str = "mean"
    projection_dim: int | None = 768
    normalize: bool = True
    pool_instruction: bool = True

    def __post_init__(self):
        """Checks the fields against each other.

        Raises:
            ValueError: an unknown pooling, a projection without width, or
                ``decoder_first`` without decoder layers.
        """
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"EncoderConfig.pooling: got {self.pooling!r}, expected one of "
                f"{', '.join(POOLINGS)}."
            )
        if self.projection_dim is not None and self.projection_dim < 1:
            raise ValueError(
                f"EncoderConfig.projection_dim: got {self.projection_dim}, expected a "
                "positive width, or None for no projection."
            )
        if self.has_decoder and self.t5.num_decoder_layers < 1:
            raise ValueError(
                "EncoderConfig.pooling is 'decoder_first' but T5Config."
                f"num_decoder_layers is {self.t5.num_decoder_layers}: set it to the "
                "number of decoder layers, or choose an encoder pooling."
            )

    @property
    def has_decoder(self) -> bool:
        """Whether the embedding comes from the decoder."""
        return self.pooling == "decoder_first"

    @property
    def embedding_dim(self) -> int:
        """Width ``E`` of the embedding."""
        return self.projection_dim or self.t5.d_model

    @property
    def similarity(self) -> str:
        """The similarity that the embeddings are trained for, ``COSINE`` or ``DOT``."""
        return COSINE if self.normalize else DOT

    def num_params(self) -> int:
        """Counts all parameters."""
        total = self.t5.num_params(with_decoder=self.has_decoder)
        if self.pooling == "attention":
            total += self.t5.d_model
        if self.projection_dim is not None:
            total += self.t5.d_model * self.projection_dim
        return total

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "EncoderConfig":
        """Builds a config from what ``to_dict`` returned."""
        return cls(**{**fields, "t5": t5_config.T5Config(**fields["t5"])})


class SentenceEncoder(nn.Module):
    """Embeds token rows; ``apply({'params': p}, tokens)`` gives float32 [B E]."""

    config: EncoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B L"],
        instruction_lengths: Int[Array, "B *S"] | None = None,
        *,
        text_numbers: Int[Array, "B *S"] | None = None,
        slots: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B *S E"]:
        """Embeds the text of each row, or all texts of packed rows.

        Dropout is on where ``apply`` gets a ``dropout`` rng.

        Args:
            tokens: ids; 0 is padding, on the right, which is never attended to and
                never pooled.
            instruction_lengths: how many of each text's first tokens are an
                instruction's; None if there are no instructions. Without effect if
                ``config.pool_instruction``.
            text_numbers: each text's number in the global batch, by which dropout
                draws; by default the row's number in this batch. Packed rows need
                them, for they say how many texts a row may have.
            slots: packs texts into rows: which of its row's texts each token is of, -1
                for padding. A row's texts follow one another. None is one text to a
                row.

        Returns:
            One float32 vector per text, of unit length if ``config.normalize``: [B E],
            or [B S E] of packed rows, where a slot without a text has any vector.

        Raises:
            ValueError: packed rows without text numbers.
        """
        cfg = self.config
        if slots is None:
            mask = attended = (tokens != names.PAD_ID)[:, None, :]
        else:
            if text_numbers is None:
                raise ValueError(
                    "text_numbers: got None with slots, expected numbers [B S]: their "
                    "width is how many texts a packed row may have. Without dropout "
                    "any values do."
                )
            num_slots = text_numbers.shape[1]
            mask = slots[:, None, :] == jnp.arange(num_slots)[:, None]
            attended = slots[:, :, None] == slots[:, None, :]
        counted = mask
        if instruction_lengths is not None and not cfg.pool_instruction:
            lengths = instruction_lengths.reshape(len(tokens), -1)
            counted &= ~pooling.instruction_mask(
                mask, lengths, packed=slots is not None
            )
        texts = None
        if self.has_rng("dropout") and cfg.t5.dropout_rate:
            texts = _text_index(mask, text_numbers, slots)
        embedder = layers.TokenEmbedder(cfg.t5, name="token_embedder")
        hidden = stack.EncoderStack(cfg.t5, name="encoder")(
            embedder(tokens), attended, texts
        )
        if cfg.has_decoder:
            start = embedder(jnp.full_like(mask[..., 0], names.PAD_ID, tokens.dtype))
            pooled = stack.DecoderStack(cfg.t5, name="decoder")(
                start, hidden, counted, texts
            )
        elif cfg.pooling == "attention":
            pooled = pooling.AttentionPooling(name="attention_pooling")(hidden, counted)
        else:
            pooled = _POOLING_FNS[cfg.pooling](hidden, counted)
        if slots is None:
            pooled = pooled[:, 0]
        embeddings = pooled.astype(jnp.float32)
        if cfg.projection_dim is not None:
            embeddings = Projection(cfg.projection_dim, name="projection")(embeddings)
        return l2_normalize(embeddings) if cfg.normalize else embeddings


def boxed_params(config: EncoderConfig) -> dict[str, Any]:
    """Returns the shapes and dtypes of an encoder's parameters; none is made.

    Returns:
        A nested dict as ``SentenceEncoder(config).init`` gives it, of
        ``jax.ShapeDtypeStruct`` in flax's boxes, which carry the logical axes.
    """
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    init = SentenceEncoder(config).init
    return jax.eval_shape(init, jax.random.key(0), tokens)["params"]


def _text_index(
    mask: Bool[Array, "B S L"],
    numbers: Int[Array, "B *S"] | None,
    slots: Int[Array, "B L"] | None,
) -> dropout.TextIndex:
    """Says which text each position is of, for dropout."""
    if numbers is None:
        numbers = jnp.arange(mask.shape[0])
    if slots is None:
        return dropout.TextIndex(numbers[:, None])
    index = dropout.TextIndex(numbers, slots)
    starts = index.spread(pooling.starts(mask))
    return index._replace(places=jnp.arange(mask.shape[-1]) - starts)


_POOLING_FNS = {
    "mean": pooling.mean,
    "first": pooling.first,
    "max": pooling.max_over_tokens,
}


class Projection(nn.Module):
    """The bottleneck to the embedding's width: float32, no bias."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Projects."""
        kernel = self.param(
            "kernel",
            # The embedding's axis stays whole: every device needs whole vectors.
            nn.with_logical_partitioning(_projection_init, (names.EMBED, None)),
            (x.shape[-1], self.features),
            jnp.float32,
        )
        # On TPU a default float32 product is one bfloat16 pass.
        return jnp.dot(x, kernel, precision="highest")


def l2_normalize(x: Float[Array, "*lead E"]) -> Float[Array, "*lead E"]:
    """Scales vectors to unit length; the zero vector stays zero, gradient finite.

    ``x / max(norm, eps)`` would not do: the square root's gradient at zero is infinite
    and reaches the input as NaN even where its value isn't used.
    """
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    long_enough = square > _SMALLEST_NORM**2
    return x * jax.lax.rsqrt(jnp.where(long_enough, square, 1.0))
