"""The parts of a T5 against numpy, and against themselves computed another way."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5.t5 import config as t5_config
from sentence_t5.t5 import layers, relative_positions, stack

CONFIG = t5_config.T5Config(
    vocab_size=32,
    d_model=10,
    num_heads=3,
    head_dim=4,
    d_ff=14,
    num_layers=2,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    relpos_num_buckets=8,
    relpos_max_distance=20,
)
# Bucket of (query row, memory column), 32 buckets up to distance 128.
BIDIRECTIONAL = """
 0 17 18 19 20 21 22 23 24 24
 1  0 17 18 19 20 21 22 23 24
 2  1  0 17 18 19 20 21 22 23
 3  2  1  0 17 18 19 20 21 22
 4  3  2  1  0 17 18 19 20 21
 5  4  3  2  1  0 17 18 19 20
 6  5  4  3  2  1  0 17 18 19
 7  6  5  4  3  2  1  0 17 18
 8  7  6  5  4  3  2  1  0 17
 8  8  7  6  5  4  3  2  1  0
"""


def randomize(shapes, rng):
    """Draws every parameter, so that no initial one or zero hides a mistake."""
    return jax.tree.map(
        lambda x: rng.normal(0.2, 0.3, x.shape).astype(np.float32),
        nn.meta.unbox(shapes),
    )


def rms_norm(x, scale, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(params, x, memory, mask, bias):
    """Multi-head attention, one head and one row at a time."""
    out = np.zeros((*x.shape[:2], 3 * 4))
    for b in range(len(x)):
        for h in range(3):
            part = slice(h * 4, h * 4 + 4)
            query = x[b] @ params["query"]["kernel"][:, part]
            key = memory[b] @ params["key"]["kernel"][:, part]
            value = memory[b] @ params["value"]["kernel"][:, part]
            logits = query @ key.T + (0 if bias is None else bias[h])
            logits = np.where(mask[b], logits, -1e10)
            out[b, :, part] = softmax(logits) @ value
    return out @ params["out"]["kernel"]


def feed_forward(params, x):
    gate = gelu(x @ params["wi_0"]["kernel"]) * (x @ params["wi_1"]["kernel"])
    return gate @ params["wo"]["kernel"]


def test_rms_norm_by_hand():
    norm = layers.RMSNorm(0.0, "float32")
    params = {"scale": jnp.array([1.0, 2.0])}
    x = jnp.array([[3.0, 4.0], [0.0, 5.0]])
    # rms(3, 4) = sqrt(12.5), no mean is taken off.
    expected = [[3 / 12.5**0.5, 8 / 12.5**0.5], [0.0, 10 / 12.5**0.5]]
    np.testing.assert_allclose(norm.apply({"params": params}, x), expected, rtol=1e-6)


def test_rms_norm_keeps_its_sums_in_float32():
    norm = layers.RMSNorm(1e-6, "bfloat16")
    x = jnp.full((1, 4096), 300.0, jnp.bfloat16)  # 300 ** 2 * 4096 needs float32
    out = norm.apply({"params": {"scale": jnp.ones(4096)}}, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=0.01)
    zero = norm.apply({"params": {"scale": jnp.ones(4096)}}, x * 0)
    assert np.all(np.asarray(zero, np.float32) == 0)


@pytest.mark.parametrize("activations", [("relu",), ("gelu", "linear")])
def test_mlp_equals_numpy(activations):
    config = dataclasses.replace(CONFIG, mlp_activations=activations)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 10)).astype(np.float32)
    mlp = layers.MLP(config)
    init = mlp.init
    params = randomize(jax.eval_shape(init, jax.random.key(0), x)["params"], rng)
    if len(activations) == 1:
        assert set(params) == {"wi", "wo"}
        hidden = np.maximum(x @ params["wi"]["kernel"], 0)
        expected = hidden @ params["wo"]["kernel"]
    else:
        assert set(params) == {"wi_0", "wi_1", "wo"}
        expected = feed_forward(params, x)
    out = jax.jit(mlp.apply)({"params": params}, x)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_attention_equals_numpy_with_padding_and_bias():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 5, 10)).astype(np.float32)
    memory = rng.normal(size=(2, 7, 10)).astype(np.float32)
    bias = rng.normal(size=(3, 5, 7)).astype(np.float32)
    mask = np.arange(7) < np.array([7, 4])[:, None]
    attention = layers.Attention(CONFIG)
    args = (x, memory, mask[:, None], bias)
    init = attention.init
    params = randomize(jax.eval_shape(init, jax.random.key(0), *args)["params"], rng)
    # Not square: 3 heads of width 4 on a stream of 10.
    assert params["query"]["kernel"].shape == (10, 12)
    assert params["out"]["kernel"].shape == (12, 10)
    apply = jax.jit(attention.apply)
    out = apply({"params": params}, *args)
    expected = attend(params, x, memory, mask[:, None], bias)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_buckets_of_the_first_ten_positions():
    table = relative_positions.relative_position_buckets(
        10, 10, bidirectional=True, num_buckets=32, max_distance=128
    )
    expected = np.array(BIDIRECTIONAL.split(), int).reshape(10, 10)
    np.testing.assert_array_equal(table, expected)
    causal = relative_positions.relative_position_buckets(
        10, 10, bidirectional=False, num_buckets=32, max_distance=128
    )
    # No bucket for what comes later; sixteen single offsets before the coarse ones.
    np.testing.assert_array_equal(
        causal, np.maximum(np.arange(10)[:, None] - np.arange(10), 0)
    )


def test_buckets_at_the_borders():
    def bucket(offset, bidirectional):
        table = relative_positions.relative_position_buckets(
            600, 600, bidirectional=bidirectional, num_buckets=32, max_distance=128
        )
        return int(table[max(0, -offset), max(0, offset)])

    both = {-600 + 1: 15, -128: 15, -91: 15, -90: 14, -8: 8, -7: 7, 0: 0, 7: 23, 8: 24,
            90: 30, 91: 31, 128: 31, 599: 31}  # fmt: skip
    assert {o: bucket(o, True) for o in both} == both
    causal = {-599: 31, -128: 31, -113: 31, -112: 30, -16: 16, -15: 15, 0: 0, 5: 0}
    assert {o: bucket(o, False) for o in causal} == causal


def test_relative_position_bias_looks_buckets_up():
    bias = relative_positions.RelativePositionBias(CONFIG, True)
    table = np.random.default_rng(2).normal(size=(8, 3)).astype(np.float32)
    out = bias.apply({"params": {"embedding": table}}, 4, 6)
    buckets = relative_positions.relative_position_buckets(
        4, 6, bidirectional=True, num_buckets=8, max_distance=20
    )
    np.testing.assert_allclose(out, table[buckets].transpose(2, 0, 1), atol=1e-6)


def test_embedding_is_looked_up_unscaled():
    embedder = layers.TokenEmbedder(CONFIG)
    table = np.arange(320, dtype=np.float32).reshape(32, 10)
    out = embedder.apply({"params": {"embedding": table}}, jnp.array([[31, 0]]))
    np.testing.assert_array_equal(out[0], table[[31, 0]])


@pytest.fixture(scope="module")
def encoded():
    """An unrolled encoder's parameters, input, mask and output."""
    rng = np.random.default_rng(3)
    config = dataclasses.replace(CONFIG, scan_layers=False)
    x = rng.normal(size=(2, 6, 10)).astype(np.float32)
    mask = (np.arange(6) < np.array([6, 3])[:, None])[:, None]
    encoder = stack.EncoderStack(config)
    params = jax.eval_shape(encoder.init, jax.random.key(0), x, mask)["params"]
    params = jax.tree.map(
        lambda p: rng.normal(0.2, 0.3, p.shape).astype(np.float32),
        nn.meta.unbox(params),
    )
    return params, x, mask, jax.jit(encoder.apply)({"params": params}, x, mask)


def stacked(params):
    """Stacks ``layers_0``, ``layers_1``, … on a leading axis."""
    numbered = sorted(k for k in params if k.startswith("layers_"))
    rest = {k: v for k, v in params.items() if k not in numbered}
    of_layers = [params[k] for k in numbered]
    return {**rest, "layers": jax.tree.map(lambda *x: np.stack(x), *of_layers)}


def test_encoder_equals_numpy(encoded):
    params, x, mask, out = encoded
    buckets = relative_positions.relative_position_buckets(
        6, 6, bidirectional=True, num_buckets=8, max_distance=20
    )
    bias = params["relpos_bias"]["embedding"][buckets].transpose(2, 0, 1)
    for i in range(2):
        layer = params[f"layers_{i}"]
        h = rms_norm(x, layer["attention_norm"]["scale"])
        x = x + attend(layer["attention"], h, h, mask, bias)
        h = rms_norm(x, layer["mlp_norm"]["scale"])
        x = x + feed_forward(layer["mlp"], h)
    expected = rms_norm(x, params["final_norm"]["scale"])
    real = mask[:, 0]
    np.testing.assert_allclose(out[real], expected[real], rtol=1e-4, atol=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def gradients_and_output(config, params, x, mask, weights):
    def loss(params):
        out = stack.EncoderStack(config).apply({"params": params}, x, mask)
        return (out * weights).sum(), out

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_scanned_layers_equal_unrolled_ones(encoded, remat):
    params, x, mask, expected = encoded
    weights = np.random.default_rng(4).normal(size=expected.shape).astype(np.float32)
    unrolled = dataclasses.replace(CONFIG, scan_layers=False)
    gradients, out = gradients_and_output(unrolled, params, x, mask, weights)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    scanned_gradients, out = gradients_and_output(
        dataclasses.replace(CONFIG, remat=remat), stacked(params), x, mask, weights
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4),
        scanned_gradients,
        stacked(gradients),
    )


def test_unrolled_layers_with_remat_equal_those_without(encoded):
    params, x, mask, expected = encoded
    config = dataclasses.replace(CONFIG, scan_layers=False, remat="full")
    apply = jax.jit(stack.EncoderStack(config).apply)
    out = apply({"params": params}, x, mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_decoder_equals_numpy():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 1, 10)).astype(np.float32)
    memory = rng.normal(size=(2, 5, 10)).astype(np.float32)
    mask = (np.arange(5) < np.array([5, 2])[:, None])[:, None]
    decoder = stack.DecoderStack(dataclasses.replace(CONFIG, scan_layers=False))
    params = jax.eval_shape(decoder.init, jax.random.key(0), x, memory, mask)
    params = randomize(params["params"], rng)
    out = jax.jit(decoder.apply)({"params": params}, x, memory, mask)
    own = np.ones((2, 1, 1), bool)
    for i in range(2):
        layer = params[f"layers_{i}"]
        h = rms_norm(x, layer["self_attention_norm"]["scale"])
        x = x + attend(layer["self_attention"], h, h, own, None)
        h = rms_norm(x, layer["cross_attention_norm"]["scale"])
        x = x + attend(layer["cross_attention"], h, memory, mask, None)
        h = rms_norm(x, layer["mlp_norm"]["scale"])
        x = x + feed_forward(layer["mlp"], h)
    expected = rms_norm(x, params["final_norm"]["scale"])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_agrees_with_float32(encoded):
    params, x, mask, expected = encoded
    config = dataclasses.replace(CONFIG, scan_layers=False, dtype="bfloat16")
    apply = jax.jit(stack.EncoderStack(config).apply)
    out = apply({"params": params}, x.astype(jnp.bfloat16), mask)
    assert out.dtype == jnp.bfloat16
    for row, (text, theirs) in enumerate(zip(out, expected, strict=True)):
        ours = np.asarray(text, np.float32)[mask[row, 0]].ravel()
        theirs = np.asarray(theirs)[mask[row, 0]].ravel()
        norms = np.linalg.norm(ours) * np.linalg.norm(theirs)
        assert ours @ theirs / norms > 0.999


@pytest.mark.slow
def test_wide_gradients_keep_what_bfloat16_rounds():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 16)).astype(np.float32)
    tokens = np.array([[3, 5, 5], [5, 7, 0]])

    def gradients(**dtypes):
        cfg = t5_config.T5Config(vocab_size=8, d_model=16, d_ff=32, **dtypes)
        mlp, embedder = layers.MLP(cfg), layers.TokenEmbedder(cfg)
        params = nn.unbox(
            [mlp.init(jax.random.key(0), x), embedder.init(jax.random.key(1), tokens)]
        )

        def loss(params):
            out = mlp.apply(params[0], x.astype(cfg.dtype)).astype(np.float32)
            embedded = embedder.apply(params[1], tokens).astype(np.float32)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(3.0 * embedded))

        return jax.tree.leaves(jax.grad(loss)(params))

    for wide, narrow in zip(
        gradients(dtype="bfloat16", grad_dtype="float32"),
        gradients(dtype="bfloat16"),
        strict=True,
    ):
        # The same sums: rounded to bfloat16, or not.
        assert wide.dtype == narrow.dtype == jnp.float32
        np.testing.assert_array_equal(narrow.astype(jnp.bfloat16), narrow)
        assert np.any(wide.astype(jnp.bfloat16) != wide)
        np.testing.assert_allclose(wide, narrow, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("dtype", "float16", "float16 overflows"),
        ("mlp_activations", ("silu",), "T5 1.0 or"),
        ("relpos_num_buckets", 7, "even number"),
        ("relpos_max_distance", 4, "more than half the buckets"),
        ("dropout_rate", 1.0, r"in \[0, 1\)"),
        ("d_model", 0, "at least 1"),
        ("grad_dtype", "bfloat16", "'float32', or None"),
        ("remat", "some", "one of"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=f"T5Config.{field}.*{message}"):
        dataclasses.replace(CONFIG, **{field: value})


def test_the_dtype_of_gradients_outlives_another_dtype():
    with pytest.raises(ValueError, match=r"grad_dtype: got 'bfloat16', .*or None for"):
        dataclasses.replace(CONFIG, dtype="bfloat16", grad_dtype="bfloat16")
    for grad_dtype, reduced in ((None, "bfloat16"), ("float32", "float32")):
        config = dataclasses.replace(CONFIG, dtype="bfloat16", grad_dtype=grad_dtype)
        assert config.reduction_dtype == reduced
        assert dataclasses.replace(config, dtype="float32").reduction_dtype == "float32"
