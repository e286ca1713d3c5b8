"""The T5 stacks against numbers frozen from Hugging Face's T5 (see golden/)."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest

from sentence_t5 import encoder as encoder_lib
from sentence_t5 import pretrained
from sentence_t5.pretrained import matching, name_tables, source, tensors
from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import relative_positions, stack

GOLDEN = pathlib.Path(__file__).parent / "golden"
LENGTHS = [1, 16, 200, 512]
VERSIONS = {"1_0": ("relu",), "1_1": ("gelu", "linear")}

pytestmark = pytest.mark.golden


def load(version):
    """Returns the frozen arrays and a source made of the frozen weights."""
    frozen = dict(np.load(GOLDEN / f"hf_t5_{version}.npz"))
    weights = {
        name.removeprefix("weights/"): tensors.from_array(value)
        for name, value in frozen.items()
        if name.startswith("weights/")
    }
    ours, foreign = source.translate(weights, name_tables.HUGGINGFACE)
    assert not foreign
    return frozen, source.Source("golden", "Hugging Face", ours)


def make_config(version, **overrides):
    t5 = t5_config.T5Config(
        vocab_size=60,
        d_model=16,
        num_heads=4,
        head_dim=3,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        mlp_activations=VERSIONS[version],
    )
    t5 = dataclasses.replace(t5, **overrides)
    return encoder_lib.EncoderConfig(
        t5=t5, pooling="decoder_first", projection_dim=None, normalize=False
    )


def restore_params(config, opened):
    return matching.restore(opened, pretrained.abstract_params(config), config)[0]


@functools.partial(jax.jit, static_argnums=0)
def run(config, params, tokens):
    """Returns the encoder's hidden states and the embedding, the decoder's output."""
    embedding, seen = encoder_lib.SentenceEncoder(config).apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: isinstance(module, stack.EncoderStack),
        mutable="intermediates",
    )
    return seen["intermediates"]["encoder"]["__call__"][0], embedding


def from_golden(version, **overrides):
    frozen, opened = load(version)
    config = make_config(version, **overrides)
    return frozen, config, restore_params(config, opened)


@pytest.mark.parametrize("version, scan_layers", [("1_0", True), ("1_1", False)])
def test_equals_hugging_face_at_1_16_200_and_512_tokens(version, scan_layers):
    frozen, config, params = from_golden(version, scan_layers=scan_layers)
    tokens = frozen["tokens"]
    assert tokens.astype(bool).sum(-1).tolist() == LENGTHS
    hidden, decoded = run(config, params, tokens)
    real = np.asarray(hidden)[tokens != 0]
    np.testing.assert_allclose(real, frozen["hidden"], atol=2e-5)
    np.testing.assert_allclose(decoded, frozen["decoder_first"], atol=2e-5)


def test_the_comparison_notices_a_shifted_bias():
    frozen, config, params = from_golden("1_0")
    bias = params["encoder"]["relpos_bias"]["embedding"]
    params["encoder"]["relpos_bias"]["embedding"] = np.roll(bias, 1, axis=0)
    hidden = np.asarray(run(config, params, frozen["tokens"])[0])
    real = hidden[frozen["tokens"] != 0]
    assert np.abs(real - frozen["hidden"]).max() > 0.1


@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 20), (4, 128)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_hugging_face_for_offsets_to_600(
    bidirectional, buckets, distance
):
    frozen = np.load(GOLDEN / "hf_buckets.npz")
    direction = "bidirectional" if bidirectional else "causal"
    table = relative_positions.relative_position_buckets(
        601, 601, bidirectional=bidirectional, num_buckets=buckets,
        max_distance=distance,
    )  # fmt: skip
    # Row 0 holds offsets 0..600, column 0 holds 0..-600.
    ours = np.concatenate([table[:0:-1, 0], table[0]])
    np.testing.assert_array_equal(frozen["offsets"], np.arange(-600, 601))
    np.testing.assert_array_equal(ours, frozen[f"{direction}_{buckets}_{distance}"])
