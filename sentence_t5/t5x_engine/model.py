"""Model: the encoder, the loss and the optimizer as a t5x BaseModel.

    features left_encoder_input_tokens [B L], right_encoder_input_tokens [B L],
             right_negative_encoder_input_tokens [B N L]?  (T5X Retrieval's names)
      ─► the batch of ``steps`` ─► the embedding and the loss of ``steps``

Which rows and negatives are real follows from the tokens: what is all padding is none.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import flax
import flax.linen as nn
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax.linen import partitioning as flax_partitioning
from jaxtyping import Array, Float
from t5x import metrics as t5x_metrics
from t5x import models, optimizers

from sentence_t5 import encoder as encoder_lib
from sentence_t5 import feature_converters, losses, names, optim, steps, text_groups

Features = Mapping[str, Array]


class Model(models.BaseModel):
    """What is trained: an encoder, a loss, an optimizer.

    Attributes:
        encoder: tokens → embedding.
        loss: how pairs are contrasted.
        optimizer: from ``optim``.
    """

    FEATURE_CONVERTER_CLS = feature_converters.DualEncoderFeatureConverter

    def __init__(
        self,
        encoder: encoder_lib.EncoderConfig,
        loss: losses.LossConfig,
        optimizer: optim.Optimizer,
    ):
        """Wraps the optimizer for T5X; runs nothing.

        Raises:
            ValueError: see ``LossConfig.check_encoder``; or a guide is asked for.
        """
        loss.check_encoder(encoder)
        if loss.guide is not None:
            raise ValueError(
                f"LossConfig.guide is {loss.guide}, which `sentence-t5 train` alone "
                "has, with the same gin file. Under T5X, leave it out."
            )
        super().__init__(optimizers.OptaxWrapper(optimizer.transform))
        self.encoder = encoder
        self.loss = loss
        self.optimizer = optimizer
        self._module = encoder_lib.SentenceEncoder(encoder)

    def loss_fn(
        self, params: Any, batch: Features, dropout_rng: Array | None
    ) -> tuple[Float[Array, ""], MutableMapping[str, clu_metrics.Metric]]:
        """Computes the loss over the global batch.

        Args:
            params: the encoder's.
            batch: the features.
            dropout_rng: the step's key; None switches dropout off.

        Returns:
            The loss, and metrics that average over rows when merged.
        """
        # T5X evaluates without a key. A training batch has no padding rows, and with no
        # mask the program is the one of ``steps.Trainer``, to the last bit.
        batch = to_batch(batch, padded=dropout_rng is None)
        groups = text_groups.make_groups(batch)
        embedded = text_groups.embed_all(self._module, params, groups, dropout_rng)
        loss, values = steps.contrast(self.loss, batch, embedded)
        num_rows = jnp.float32(batch[names.LEFT_TOKENS].shape[0])
        if names.ROW_MASK in batch:
            num_rows = batch[names.ROW_MASK].sum().astype(jnp.float32)
        return loss, averages(values, num_rows)

    def predict_batch_with_aux(
        self, params: Any, batch: Features, rng: Array | None = None
    ) -> tuple[dict[str, Float[Array, "B E"]], dict[str, Array]]:
        """Returns the embeddings ``left`` and ``right``, and nothing beside them."""
        del rng
        return {
            "left": self._embed(params, batch[feature_converters.LEFT]),
            "right": self._embed(params, batch[feature_converters.RIGHT]),
        }, {}

    def score_batch(
        self, params: Any, batch: Features, return_intermediates: bool = False
    ) -> Float[Array, " B"]:
        """Returns the cosine of each pair.

        Raises:
            ValueError: intermediates are asked for.
        """
        if return_intermediates:
            raise ValueError("A sentence encoder's scores have no intermediates.")
        sides, _ = self.predict_batch_with_aux(params, batch)
        left, right = (encoder_lib.l2_normalize(side) for side in sides.values())
        return jnp.einsum("be,be->b", left, right, precision="highest")

    def get_initial_variables(
        self,
        rng: Array,
        input_shapes: Mapping[str, Any],
        input_types: Mapping[str, Any] | None = None,
    ) -> flax.core.FrozenDict:
        """Initialises the parameters, with their logical axes beside them.

        Args:
            rng: key.
            input_shapes: not looked at: parameters don't depend on the batch.
            input_types: not looked at.
        """
        del input_shapes, input_types
        tokens = jnp.ones((1, 8), jnp.int32)
        boxed = self._module.init(rng, tokens)["params"]
        flat = flax.traverse_util.flatten_dict(nn.get_partition_spec(boxed))
        axes = {
            (*path[:-1], f"{path[-1]}_axes"): flax_partitioning.AxisMetadata(
                tuple(spec)
            )
            for path, spec in flat.items()
        }
        return flax.core.freeze(
            {
                "params": nn.unbox(boxed),
                "params_axes": flax.traverse_util.unflatten_dict(axes),
            }
        )

    def _embed(self, params: Any, tokens: Array) -> Float[Array, "B E"]:
        return self._module.apply({"params": params}, tokens)


def to_batch(features: Features, *, padded: bool) -> steps.Batch:
    """Returns the batch of ``steps`` that features stand for.

    Args:
        features: tokens, under T5X Retrieval's names.
        padded: whether there may be rows of padding, which are no pairs.
    """
    left = features[feature_converters.LEFT]
    batch = {
        names.LEFT_TOKENS: left,
        names.RIGHT_TOKENS: features[feature_converters.RIGHT],
    }
    if padded:
        batch[names.ROW_MASK] = (left != names.PAD_ID).any(axis=-1)
    negatives = features.get(feature_converters.NEGATIVES)
    if negatives is not None:
        batch[names.NEGATIVE_TOKENS] = negatives
        batch[names.NEGATIVE_MASK] = (negatives != names.PAD_ID).any(axis=-1)
    return batch


def averages(
    values: Mapping[str, Float[Array, ""]], num_rows: Float[Array, ""]
) -> dict[str, clu_metrics.Metric]:
    """Wraps a batch's means for T5X, which merges them over steps."""
    metrics: dict[str, clu_metrics.Metric] = {
        key: clu_metrics.Average(total=value * num_rows, count=num_rows)
        for key, value in values.items()
    }
    metrics["pairs_per_second"] = t5x_metrics.TimeRate.from_model_output(num_rows)
    return metrics
