"""From SeqIO task features to the model features that T5X Retrieval's models take.

    inputs [T]             ─► left_encoder_input_tokens [L]
    targets [T]            ─► right_encoder_input_tokens [L]
    negative_targets [n T] ─► right_negative_encoder_input_tokens [N L]

This is the outside contract for training under T5X. This package's own trainer does not
come through here: it takes rows by index (`datasets`). A padded negative is a row of
padding ids, which the model leaves out; the decoder of an encoder-decoder model is fed
one start symbol by the model itself and needs no feature.
"""

from collections.abc import Mapping

import seqio
import tensorflow as tf

from sentence_t5 import names

LEFT = "left_encoder_input_tokens"
RIGHT = "right_encoder_input_tokens"
NEGATIVES = "right_negative_encoder_input_tokens"

_MODEL_NAMES = {
    names.INPUTS: LEFT,
    names.TARGETS: RIGHT,
    names.NEGATIVE_TARGETS: NEGATIVES,
}
_TEXT = seqio.FeatureConverter.FeatureSpec(tf.int32)
_TEXT_LIST = seqio.FeatureConverter.FeatureSpec(tf.int32, rank=2, sequence_dim=1)


class DualEncoderFeatureConverter(seqio.FeatureConverter):
    """Pads both sides, and `num_negatives` hard negatives, to the lengths asked for."""

    PACKING_FEATURE_DTYPES = None

    def __init__(self, num_negatives: int = 0, pack: bool = False, **kwargs):
        """Makes a converter.

        Args:
          num_negatives: hard negatives per pair, N. A row with more keeps its first N;
            a row with fewer gets rows of padding.
          pack: must be False.
          **kwargs: see `seqio.FeatureConverter`.

        Raises:
          ValueError: packing is asked for, or N is negative.
        """
        if pack:
            raise ValueError(
                "Sentence pairs cannot be packed: a text would share its row with "
                "others. Set pack=False."
            )
        if num_negatives < 0:
            raise ValueError(
                f"num_negatives must not be negative, got {num_negatives}."
            )
        self._num_negatives = num_negatives
        super().__init__(pack=False, **kwargs)

    @property
    def TASK_FEATURES(self) -> Mapping[str, seqio.FeatureConverter.FeatureSpec]:  # noqa: N802
        """The features a task must have."""
        features = {names.INPUTS: _TEXT, names.TARGETS: _TEXT}
        if self._num_negatives:
            features[names.NEGATIVE_TARGETS] = _TEXT_LIST
        return features

    @property
    def MODEL_FEATURES(self) -> Mapping[str, seqio.FeatureConverter.FeatureSpec]:  # noqa: N802
        """The features that the model gets."""
        return {_MODEL_NAMES[key]: spec for key, spec in self.TASK_FEATURES.items()}

    def _convert_features(
        self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
    ) -> tf.data.Dataset:
        """Pads the features and renames them."""
        lengths = dict(task_feature_lengths)
        if self._num_negatives:
            lengths[names.NEGATIVE_TARGETS] = (
                self._num_negatives,
                lengths[names.NEGATIVE_TARGETS],
            )
        kept = [*self.TASK_FEATURES, *self._passthrough_features]
        return self._pack_or_pad(ds, lengths).map(
            lambda row: {_MODEL_NAMES.get(key, key): row[key] for key in kept},
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def get_model_feature_lengths(
        self, task_feature_lengths: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Returns the length of each model feature, in tokens."""
        return {_MODEL_NAMES.get(k, k): v for k, v in task_feature_lengths.items()}
