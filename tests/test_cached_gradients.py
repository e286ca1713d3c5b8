"""Chunked gradients against those of the whole batch, dropout on, on any mesh."""

import jax
import numpy as np
import pytest

from sentence_t5 import encoder, losses, names, optim, partitioning, steps
from sentence_t5.t5 import config as t5_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

_BATCH = 24


def _batch(right_length):
    rng = np.random.default_rng(0)

    def texts(*shape):
        tokens = rng.integers(2, 50, size=shape).astype(np.int32)
        lengths = rng.integers(2, shape[-1] + 1, size=(*shape[:-1], 1))
        return np.where(np.arange(shape[-1]) < lengths, tokens, names.PAD_ID)

    batch = {
        names.LEFT_TOKENS: texts(_BATCH, 8),
        names.RIGHT_TOKENS: texts(_BATCH, right_length),
        names.NEGATIVE_TOKENS: texts(_BATCH, 2, right_length),
        names.NEGATIVE_MASK: rng.random((_BATCH, 2)) > 0.3,
        names.LEFT_INSTRUCTION_LENGTHS: rng.integers(0, 3, _BATCH).astype(np.int32),
        names.RIGHT_INSTRUCTION_LENGTHS: rng.integers(0, 3, _BATCH).astype(np.int32),
        names.NEGATIVE_INSTRUCTION_LENGTHS: np.ones((_BATCH, 2), np.int32),
    }
    batch[names.RIGHT_TOKENS][17] = batch[names.RIGHT_TOKENS][2]
    return batch


def _value_and_grad(batch, mesh, microbatch_size, pooling="mean", block_rows=None):
    config = encoder.EncoderConfig(
        t5_config.T5Config(
            vocab_size=64,
            d_model=16,
            num_heads=2,
            head_dim=8,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=1,
            dropout_rate=0.1,
        ),
        pooling=pooling,
        projection_dim=16,
        pool_instruction=False,
    )
    devices = jax.devices()[: int(np.prod(mesh))]
    partitioner = partitioning.Partitioner(partitioning.MeshConfig(*mesh), devices)
    trainer = steps.Trainer(
        steps.Model(
            config,
            losses.LossConfig(
                logit_scale=20.0,
                mask_duplicates=True,
                block_rows=block_rows,
                prefix_widths=(8,),
            ),
            optim.sgd(optim.constant(0.1)),
        ),
        partitioner,
        microbatch_size=microbatch_size,
    )
    state = trainer.init_state(0)
    compute = jax.jit(trainer._value_and_grad)
    on_mesh = partitioner.put_batch(batch)
    (loss, values), grads = jax.device_get(
        compute(state.params, on_mesh, jax.random.key(3))
    )
    return float(loss), values, grads


def _assert_same(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    for key, value in expected[1].items():
        np.testing.assert_allclose(got[1][key], value, rtol=1e-4, atol=1e-6)
    for path, want in jax.tree_util.tree_leaves_with_path(expected[2]):
        have = got[2]
        for key in path:
            have = have[key.key]
        error = np.linalg.norm(have - want) / max(np.linalg.norm(want), 1e-9)
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


@pytest.fixture(scope="module")
def batch():
    return _batch(8)


@pytest.fixture(scope="module")
def plain(batch):
    return _value_and_grad(batch, (1, 1, 1), None)


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunks_do_not_change_the_gradients(batch, plain, num_chunks):
    _assert_same(_value_and_grad(batch, (1, 1, 1), _BATCH // num_chunks), plain)


def test_a_chunk_may_be_one_row_of_each_of_eight_devices(batch, plain):
    # Its logits are walked in blocks too.
    _assert_same(_value_and_grad(batch, (8, 1, 1), 8, block_rows=8), plain)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 8, 1)])
@pytest.mark.parametrize("pooling", ["mean", "decoder_first"])
@pytest.mark.parametrize("right_length", [8, 6])
def test_all_meshes_poolings_and_lengths(mesh, pooling, right_length):
    batch = _batch(right_length)
    expected = _value_and_grad(batch, (1, 1, 1), None, pooling)
    for microbatch_size in (24, 8):
        got = _value_and_grad(batch, mesh, microbatch_size, pooling)
        _assert_same(got, expected)


@pytest.mark.parametrize(("mesh", "size"), [((8, 1, 1), 12), ((1, 1, 1), 10)])
def test_a_size_that_cannot_be_shared_is_an_error(batch, mesh, size):
    with pytest.raises(ValueError, match=f"microbatch_size is {size}.*multiple of"):
        _value_and_grad(batch, mesh, size)
