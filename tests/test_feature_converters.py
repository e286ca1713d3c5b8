"""Task features become T5X Retrieval's model features: literal ids in, literals out."""

import functools

import numpy as np
import pytest
import seqio
import tensorflow as tf

from sentence_t5 import vocabularies
from sentence_t5.feature_converters import DualEncoderFeatureConverter
from sentence_t5.tasks import synthetic

PAIRS = [
    {"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]},
    {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]},
]


def dataset(rows, negatives=False):
    text = tf.TensorSpec([None], tf.int32)
    spec = {"inputs": text, "targets": text}
    if negatives:
        spec["negative_targets"] = tf.RaggedTensorSpec([None, None], tf.int32)

    def generate():
        for row in rows:
            row = dict(row)
            if negatives:
                texts = row["negative_targets"]
                row["negative_targets"] = tf.RaggedTensor.from_row_lengths(
                    tf.constant([i for text in texts for i in text], tf.int32),
                    list(map(len, texts)),
                )
            yield row

    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def convert(rows, lengths, num_negatives=0):
    converter = DualEncoderFeatureConverter(num_negatives)
    converted = converter(dataset(rows, num_negatives > 0), lengths)
    return [
        {key: value.tolist() for key, value in row.items()}
        for row in converted.as_numpy_iterator()
    ]


def test_pairs():
    assert convert(PAIRS, {"inputs": 6, "targets": 4}) == [
        {
            "left_encoder_input_tokens": [7, 8, 5, 1, 0, 0],
            "right_encoder_input_tokens": [3, 9, 1, 0],
        },
        {
            "left_encoder_input_tokens": [8, 4, 9, 3, 1, 0],
            "right_encoder_input_tokens": [4, 1, 0, 0],
        },
    ]


def test_negatives_are_padded_or_the_first_ones_kept():
    rows = [
        PAIRS[0] | {"negative_targets": []},
        PAIRS[1] | {"negative_targets": [[5, 1], [6, 7, 1], [8, 1]]},
    ]
    lengths = {"inputs": 5, "targets": 3, "negative_targets": 4}
    converted = convert(rows, lengths, num_negatives=2)
    assert [row["right_negative_encoder_input_tokens"] for row in converted] == [
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[5, 1, 0, 0], [6, 7, 1, 0]],
    ]
    assert converted[1]["left_encoder_input_tokens"] == [8, 4, 9, 3, 1]


def test_over_long_text_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected length of 4"):
        convert(PAIRS, {"inputs": 4, "targets": 4})


def test_missing_feature_is_named():
    converter = DualEncoderFeatureConverter(num_negatives=1)
    lengths = {"inputs": 6, "targets": 4, "negative_targets": 4}
    with pytest.raises(ValueError, match=r"missing an expected.*negative_targets"):
        converter(dataset(PAIRS), lengths)
    with pytest.raises(ValueError, match="negative_targets"):
        converter(dataset(PAIRS), {"inputs": 6, "targets": 4})


def test_packing_is_refused():
    with pytest.raises(ValueError, match="pack=False"):
        DualEncoderFeatureConverter(pack=True)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        DualEncoderFeatureConverter(num_negatives=-1)


def test_through_seqio_as_t5x_calls_it():
    task = synthetic.task(num_triples=4)
    seqio.TaskRegistry.add_provider(task.name, task)
    try:
        converter = functools.partial(DualEncoderFeatureConverter, num_negatives=1)
        converted = seqio.get_dataset(
            task.name,
            task_feature_lengths={"inputs": 8, "targets": 32, "negative_targets": 9},
            dataset_split="train",
            shuffle=False,
            num_epochs=1,
            feature_converter=converter(pack=False, use_custom_packing_ops=False),
        )
        rows = list(converted.as_numpy_iterator())
    finally:
        seqio.TaskRegistry.remove(task.name)
    encode = vocabularies.synthetic().encode
    texts = list(synthetic.triples(4, seed=0))
    assert len(rows) == 4
    for row, text in zip(rows, texts, strict=True):
        left = [*encode(text["inputs"])[:7], 1]
        np.testing.assert_array_equal(row["left_encoder_input_tokens"], left)
        right = [*encode(text["targets"]), 1]
        right += [0] * (32 - len(right))
        np.testing.assert_array_equal(row["right_encoder_input_tokens"], right)
        negative = [[*encode(text["negative_targets"][0])[:8], 1]]
        np.testing.assert_array_equal(
            row["right_negative_encoder_input_tokens"], negative
        )
