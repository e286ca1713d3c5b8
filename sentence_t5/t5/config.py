"""T5Config: the shape of a T5 and how it is computed.

One frozen record for both T5 generations: ``mlp_activations=('relu',)`` is T5 1.0,
``('gelu', 'linear')`` is T5 1.1. Nothing here runs; the layers read it.

Source: the published gin files of T5X, ``t5x/examples/t5/{t5_1_0,t5_1_1}``.
"""

import dataclasses

_ACTIVATIONS = {("relu",), ("gelu", "linear")}
_DTYPES = ("float32", "bfloat16")
_REMAT = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shape, precision and compilation choices of a T5 stack.

    Attributes:
        vocab_size: rows of the embedding table. T5's vocabulary has 32,100 ids; public
            checkpoints round up to a multiple of 128.
        d_model: width of the residual stream.
        num_heads: attention heads. ``num_heads * head_dim`` need not be ``d_model``.
        head_dim: width of one head.
        d_ff: width of the MLP.
        num_layers: encoder layers.
        num_decoder_layers: decoder layers, used by ``decoder_first`` pooling alone.
        mlp_activations: ``('relu',)`` (T5 1.0) or ``('gelu', 'linear')`` (T5 1.1).
        relpos_num_buckets: buckets of the relative position bias.
        relpos_max_distance: distances from here on share the last bucket.
        dropout_rate: in [0, 1).
        layer_norm_epsilon: added to the mean square in RMS norm.
        dtype: of activations; parameters are always float32. float16 overflows in T5's
            MLP and is refused.
        grad_dtype: in which a weight's gradient leaves its product and is summed over
            devices. None is ``dtype``; ``float32`` keeps the product's own sums, for
            twice the traffic of bfloat16. There is no other, so that any may go with
            any ``dtype``.
        scan_layers: one compiled layer, parameters stacked on a leading axis.
        remat: what the backward pass recomputes: ``none``, ``dots`` (keeps matrix
            products) or ``full`` (keeps layer inputs only).
    """

    vocab_size: int = 32128
    d_model: int = 768
    num_heads: int = 12
    head_dim: int = 64
    d_ff: int = 3072
    num_layers: int = 12
    num_decoder_layers: int = 12
    mlp_activations: tuple[str, ...] = ("relu",)
    relpos_num_buckets: int = 32
    relpos_max_distance: int = 128
    dropout_rate: float = 0.0
    layer_norm_epsilon: float = 1e-6
    dtype: str = "float32"
    grad_dtype: str | None = None
    scan_layers: bool = True
    remat: str = "none"

    def __post_init__(self):
        """Checks every field.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        # gin and JSON hand over lists.
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        for name in (
            "vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "num_layers",
        ):  # fmt: skip
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(
            self.num_decoder_layers >= 0,
            "num_decoder_layers", self.num_decoder_layers, "0 or more",
        )  # fmt: skip
        _require(
            self.mlp_activations in _ACTIVATIONS,
            "mlp_activations", self.mlp_activations,
            "('relu',) for T5 1.0 or ('gelu', 'linear') for T5 1.1",
        )  # fmt: skip
        _require(
            0.0 <= self.dropout_rate < 1.0,
            "dropout_rate", self.dropout_rate, "in [0, 1)",
        )  # fmt: skip
        _require(
            self.dtype in _DTYPES, "dtype", self.dtype,
            f"one of {_DTYPES} (float16 overflows in T5's MLP)",
        )  # fmt: skip
        _require(
            self.grad_dtype in (None, "float32"),
            "grad_dtype", self.grad_dtype, "'float32', or None for that of dtype",
        )  # fmt: skip
        _require(self.remat in _REMAT, "remat", self.remat, f"one of {_REMAT}")
        _require(
            self.relpos_num_buckets >= 4 and self.relpos_num_buckets % 2 == 0,
            "relpos_num_buckets", self.relpos_num_buckets, "an even number from 4 up",
        )  # fmt: skip
        _require(
            self.relpos_max_distance > self.relpos_num_buckets // 2,
            "relpos_max_distance", self.relpos_max_distance,
            f"more than half the buckets ({self.relpos_num_buckets // 2})",
        )  # fmt: skip

    @property
    def reduction_dtype(self) -> str:
        """The dtype in which weight gradients are summed over devices."""
        return self.grad_dtype or self.dtype

    @property
    def inner_dim(self) -> int:
        """Width of all heads together (``H * K``)."""
        return self.num_heads * self.head_dim

    def num_params(self, *, with_decoder: bool) -> int:
        """Counts the parameters of table, encoder and, if asked, decoder."""
        attention = 4 * self.d_model * self.inner_dim
        mlp = (len(self.mlp_activations) + 1) * self.d_model * self.d_ff
        relpos = self.relpos_num_buckets * self.num_heads
        norm = self.d_model
        total = self.vocab_size * self.d_model
        total += self.num_layers * (attention + mlp + 2 * norm) + norm + relpos
        if with_decoder:
            layer = 2 * attention + mlp + 3 * norm
            total += self.num_decoder_layers * layer + norm + relpos
        return total


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"T5Config.{name}: got {got!r}, expected {expected}.")
