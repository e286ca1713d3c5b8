"""SentenceEncoder: what an embedding depends on, and what it must not."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import encoder as encoder_lib
from sentence_t5.t5 import config as t5_config

T5 = t5_config.T5Config(
    vocab_size=50,
    d_model=12,
    num_heads=3,
    head_dim=5,
    d_ff=20,
    num_layers=1,
    num_decoder_layers=1,
    scan_layers=False,
)
TOKENS = np.array(
    [
        [*range(7, 30), 1],
        [20, 21, 1] + [0] * 21,
        [1] + [0] * 23,
        [30, 31, 32, 33, 1] + [0] * 19,
    ],
    np.int32,
)


def make_config(pooling, **t5):
    t5 = dataclasses.replace(T5, **t5)
    return encoder_lib.EncoderConfig(t5=t5, pooling=pooling, projection_dim=6)


@functools.cache
def make_params():
    """Random parameters with the parts of every pooling."""
    rng = np.random.default_rng(1)
    params = {}
    for pooling in ("attention", "decoder_first"):
        module = encoder_lib.SentenceEncoder(make_config(pooling))
        shapes = jax.eval_shape(module.init, jax.random.key(0), TOKENS)["params"]
        params |= jax.tree.map(
            lambda x: rng.normal(0.3, 0.5, x.shape).astype(np.float32),
            nn.meta.unbox(shapes),
        )
    return params


@functools.partial(jax.jit, static_argnames=("poolings", "dtype"))
def embed(params, tokens, poolings=encoder_lib.POOLINGS, dtype="float32"):
    """Embeds with several poolings in one program: compiling takes the time here."""
    return {
        name: encoder_lib.SentenceEncoder(make_config(name, dtype=dtype)).apply(
            {"params": params}, tokens
        )
        for name in poolings
    }


def test_padding_and_batch_mates_do_not_move_an_embedding():
    params = make_params()
    together = embed(params, TOKENS)
    # Other texts beside it, in another order.
    order = np.array([2, 0, 3, 1])
    shuffled = embed(params, TOKENS[order])
    # No padding, no company.
    alone = embed(params, TOKENS[1:2, :3], ("mean", "first", "decoder_first"))
    # The comparison would notice a change: another token, another vector.
    changed = TOKENS.copy()
    changed[1, 0] = 22
    other = embed(params, changed)
    for name, expected in together.items():
        assert expected.shape == (4, 6)
        assert expected.dtype == np.float32
        norms = np.linalg.norm(expected, axis=-1)
        np.testing.assert_allclose(norms, 1.0, atol=1e-5)
        np.testing.assert_allclose(shuffled[name], expected[order], atol=1e-5)
        if name in alone:
            np.testing.assert_allclose(alone[name], expected[1:2], atol=1e-5)
        assert np.abs(other[name][1] - expected[1]).max() > 1e-3
        np.testing.assert_allclose(other[name][0], expected[0], atol=1e-5)


@pytest.mark.parametrize(
    "poolings, dtype",
    [(("mean", "decoder_first"), "float32"), (("mean",), "bfloat16")],
)
def test_a_row_of_padding_is_finite_and_so_are_all_gradients(poolings, dtype):
    tokens = np.stack([TOKENS[0, :4], np.zeros(4, np.int32)])

    def loss(params):
        out = embed(params, tokens, poolings, dtype)
        return sum((x * jnp.arange(1.0, 7.0)).sum() for x in out.values()), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(make_params())
    for path, leaf in jax.tree_util.tree_leaves_with_path((gradients, out)):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)
    np.testing.assert_array_equal(out["mean"][1], 0.0)
    if "decoder_first" in out:  # the decoder sees its start symbol even then
        norm = np.linalg.norm(out["decoder_first"][1])
        np.testing.assert_allclose(norm, 1.0, atol=1e-5)


def test_bfloat16_agrees_with_float32():
    exact = embed(make_params(), TOKENS)
    rough = embed(make_params(), TOKENS, ("mean", "decoder_first"), "bfloat16")
    for name, embeddings in rough.items():
        assert embeddings.dtype == np.float32
        assert (exact[name] * embeddings).sum(-1).min() > 0.999


def test_texts_without_numbers_are_numbered_by_their_rows():
    module = encoder_lib.SentenceEncoder(make_config("mean", dropout_rate=0.5))
    apply = jax.jit(module.apply)
    key = {"dropout": jax.random.key(1)}
    variables = {"params": make_params()}
    tokens = np.stack([TOKENS[0]] * 4)
    got = apply(variables, tokens, rngs=key)
    numbered = apply(variables, tokens, text_numbers=np.arange(4), rngs=key)
    np.testing.assert_array_equal(got, numbered)
    # Equal texts, and each with draws of its own.
    assert np.abs(got[1:] - got[:-1]).max(axis=1).min() > 1e-2


def test_packed_rows_need_numbers():
    module = encoder_lib.SentenceEncoder(make_config("mean"))
    slots = np.where(TOKENS > 0, 0, -1)
    with pytest.raises(ValueError, match=r"got None with slots, expected .*\[B S\]"):
        module.apply({"params": make_params()}, TOKENS, slots=slots)


def test_without_projection_and_norm_it_is_the_pooled_vector():
    params = make_params()
    raw = dataclasses.replace(make_config("mean"), projection_dim=None, normalize=False)
    pooled = jax.jit(encoder_lib.SentenceEncoder(raw).apply)({"params": params}, TOKENS)
    assert pooled.shape == (4, 12)
    projected = pooled @ params["projection"]["kernel"]
    expected = projected / np.linalg.norm(projected, axis=-1, keepdims=True)
    np.testing.assert_allclose(embed(params, TOKENS)["mean"], expected, atol=1e-5)


def test_norm_of_vectors_and_its_gradient_at_zero():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]])
    out, vjp = jax.vjp(encoder_lib.l2_normalize, x)
    np.testing.assert_allclose(out[0], [0.6, 0.8], atol=1e-6)
    np.testing.assert_array_equal(out[1], 0.0)
    (gradient,) = vjp(jnp.ones_like(out))
    assert np.isfinite(gradient).all()
    # (I - u u^T) / norm applied to ones, at (3, 4).
    expected = (np.ones(2) - 1.4 * np.array([0.6, 0.8])) / 5
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "activations, scan_layers", [(("relu",), True), (("gelu", "linear"), False)]
)
@pytest.mark.parametrize("projection_dim", [None, 6])
@pytest.mark.parametrize("pooling", ["mean", "attention", "decoder_first"])
def test_num_params_counts_what_init_makes(
    pooling, projection_dim, activations, scan_layers
):
    t5 = dataclasses.replace(
        T5,
        mlp_activations=activations,
        scan_layers=scan_layers,
        num_decoder_layers=3,
    )
    config = encoder_lib.EncoderConfig(t5, pooling, projection_dim)
    leaves = jax.tree.leaves(nn.meta.unbox(encoder_lib.boxed_params(config)))
    assert sum(leaf.size for leaf in leaves) == config.num_params()
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}


def test_boxed_params_are_what_init_draws():
    config = make_config("decoder_first")
    drawn = jax.jit(encoder_lib.SentenceEncoder(config).init)(jax.random.key(1), TOKENS)
    drawn, boxed = drawn["params"], encoder_lib.boxed_params(config)
    assert nn.get_partition_spec(boxed) == nn.get_partition_spec(drawn)
    kernel = nn.get_partition_spec(boxed)["projection"]["kernel"]
    assert tuple(kernel) == ("embed", None)
    sizes = [
        jax.tree.map(lambda x: (x.shape, x.dtype), nn.meta.unbox(params))
        for params in (boxed, drawn)
    ]
    assert sizes[0] == sizes[1]
    assert sizes[0]["projection"]["kernel"][0] == (T5.d_model, 6)


@pytest.mark.parametrize(
    "shape, activations, millions",
    [
        ((768, 12, 64, 3072, 12), ("relu",), 110.22),
        ((1024, 16, 64, 4096, 24), ("relu",), 335.73),
        ((1024, 32, 128, 16384, 24), ("relu",), 1241.7),
        ((1024, 128, 128, 65536, 24), ("relu",), 4865.6),
        ((768, 12, 64, 2048, 12), ("gelu", "linear"), 110.22),
        ((4096, 64, 64, 10240, 24), ("gelu", "linear"), 4765.5),
    ],
)
def test_published_sizes(shape, activations, millions):
    d_model, num_heads, head_dim, d_ff, num_layers = shape
    t5 = t5_config.T5Config(
        d_model=d_model,
        num_heads=num_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        num_layers=num_layers,
        mlp_activations=activations,
    )
    count = encoder_lib.EncoderConfig(t5=t5).num_params() / 1e6
    assert count == pytest.approx(millions, rel=5e-5)


def test_config_survives_json():
    config = encoder_lib.EncoderConfig(
        t5=dataclasses.replace(T5, mlp_activations=("gelu", "linear")), pooling="max"
    )
    text = json.dumps(config.to_dict())
    assert encoder_lib.EncoderConfig.from_dict(json.loads(text)) == config


def test_config_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="pooling: got 'cls', expected one of mean"):
        encoder_lib.EncoderConfig(pooling="cls")
    with pytest.raises(ValueError, match="num_decoder_layers is 0"):
        make_config("decoder_first", num_decoder_layers=0)
    with pytest.raises(ValueError, match="projection_dim: got 0"):
        encoder_lib.EncoderConfig(projection_dim=0)
