"""Every pooling against a loop in numpy, always with padding in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import pooling

# Two rows, five positions, two texts a row. The mask holds a text in the middle of a
# row, one of a single token, and one without any.
MASK = np.array(
    [
        [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0]],
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
    ],
    bool,
)
HIDDEN = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32) - 3.0
QUERY = np.array([0.5, -1.0, 2.0], np.float32)

FUNCTIONS = {
    "mean": pooling.mean,
    "first": pooling.first,
    "max": pooling.max_over_tokens,
    "attention": lambda hidden, mask: pooling.AttentionPooling().apply(
        {"params": {"query": QUERY}}, hidden, mask
    ),
}


def pool_one(name, rows):
    """Pools the counted positions [n D] of one text."""
    if not len(rows):
        return np.zeros(3)
    if name == "mean":
        return rows.mean(0)
    if name == "first":
        return rows[0]
    if name == "max":
        return rows.max(0)
    weights = np.exp(rows @ QUERY - (rows @ QUERY).max())
    return weights @ rows / weights.sum()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_a_loop(name):
    expected = [
        [pool_one(name, HIDDEN[b][MASK[b, s]]) for s in range(2)] for b in range(2)
    ]
    out = FUNCTIONS[name](jnp.asarray(HIDDEN), jnp.asarray(MASK))
    assert out.shape == (2, 2, 3)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hidden_states_under_padding_do_not_count(name):
    mask = np.array([[[True, True, False, False, False]]])
    clean = FUNCTIONS[name](jnp.asarray(HIDDEN[:1]), mask)
    soiled = HIDDEN[:1].copy()
    soiled[:, 2:] = [[1e4], [-1e4], [7.0]]
    out = FUNCTIONS[name](jnp.asarray(soiled), mask)
    np.testing.assert_allclose(out, clean, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_text_without_tokens_is_zero_with_finite_gradients(name, dtype):
    hidden = jnp.asarray(HIDDEN, dtype)
    mask = jnp.zeros((2, 1, 5), bool)
    out, vjp = jax.vjp(lambda h: FUNCTIONS[name](h, mask), hidden)
    np.testing.assert_array_equal(out, 0.0)
    (gradient,) = vjp(jnp.ones_like(out))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), 0.0)


def test_mean_of_many_bfloat16_values_is_summed_in_float32():
    hidden = jnp.full((1, 4096, 1), 1.0, jnp.bfloat16)  # a bfloat16 sum stops at 256
    mask = jnp.ones((1, 1, 4096), bool)
    np.testing.assert_allclose(pooling.mean(hidden, mask), 1.0, atol=1e-6)


def test_attention_pooling_starts_as_the_mean():
    module = pooling.AttentionPooling()
    variables = module.init(jax.random.key(0), HIDDEN, MASK)
    out = module.apply(variables, HIDDEN, MASK)
    np.testing.assert_allclose(out, pooling.mean(HIDDEN, MASK), atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "max", "attention"])
def test_the_order_of_positions_does_not_matter(name):
    order = np.array([3, 0, 4, 2, 1])
    out = FUNCTIONS[name](jnp.asarray(HIDDEN[:, order]), MASK[:, :, order])
    expected = FUNCTIONS[name](jnp.asarray(HIDDEN), jnp.asarray(MASK))
    np.testing.assert_allclose(out, expected, atol=1e-6)
