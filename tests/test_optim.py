"""Schedules and optimizers against numpy; stacked layers against single ones."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sentence_t5 import encoder, optim
from sentence_t5.t5.config import T5Config

LAYERS = 3
RATE = 0.01


def run(optimizer, params, gradients):
    """Returns the parameters after one update for each tree of gradients."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.transform.init(params)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params


# --- schedules ------------------------------------------------------------------------


def test_linear_decay_is_pinned():
    schedule = optim.linear_decay(
        peak=1e-3, total_steps=100, warmup_steps=10, hold_fraction=0.2
    )
    expected = {0: 0, 1: 1e-4, 5: 5e-4, 10: 1e-3, 20: 1e-3, 60: 5e-4, 99: 1.25e-5}
    for step, value in (expected | {100: 0, 1000: 0}).items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5, abs=1e-12), step


def test_linear_decay_of_the_papers():
    # No warm-up: full rate from step 0, decay from a tenth of the steps on.
    schedule = optim.linear_decay(peak=1e-3, total_steps=1000)
    expected = {0: 1e-3, 100: 1e-3, 101: 1e-3 * 899 / 900, 550: 5e-4, 1000: 0}
    for step, value in expected.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5, abs=1e-12), step


def test_decay_waits_for_the_warmup():
    schedule = optim.linear_decay(peak=1.0, total_steps=20, warmup_steps=10)
    np.testing.assert_allclose([schedule(s) for s in (5, 10, 15, 20)], [0.5, 1, 0.5, 0])


def test_constant():
    assert float(optim.constant(0.3)(0)) == float(optim.constant(0.3)(10**6)) == 0.3


@pytest.mark.parametrize(
    "wrong",
    [{"warmup_steps": 11}, {"warmup_steps": -1}, {"hold_fraction": 1.5},
     {"hold_fraction": -0.1}],
)  # fmt: skip
def test_parts_of_a_schedule_must_fit(wrong):
    with pytest.raises(ValueError, match=r"linear_decay: got .*total_steps=10"):
        optim.linear_decay(peak=1.0, total_steps=10, **wrong)


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf")])
def test_a_rate_that_goes_uphill_is_refused(rate):
    with pytest.raises(ValueError, match=r"linear_decay: peak: got .* rate of"):
        optim.linear_decay(peak=rate, total_steps=10)
    with pytest.raises(ValueError, match=r"constant: value: got .*0 or more"):
        optim.constant(rate)
    assert optim.constant(0.0)(3) == 0


def test_optimizers_keep_their_schedule_for_the_log():
    schedule = optim.linear_decay(peak=1.0, total_steps=10)
    for make in (optim.adafactor, optim.adamw, optim.sgd):
        assert make(schedule).learning_rate is schedule


# --- Adafactor ------------------------------------------------------------------------


def numpy_adafactor(param, gradients, *, rate=RATE, weight_decay=0.0):
    """Returns a matrix after Adafactor's updates, as in the paper, in float64.

    Defaults of T5X: decay 1 - t^-0.8, epsilons 1e-30 and 1e-3, clipping at 1.
    """
    param = param.astype(np.float64)
    row, column = np.zeros(param.shape[0]), np.zeros(param.shape[1])
    for t, gradient in enumerate(gradients, 1):
        gradient = gradient.astype(np.float64)
        decay = 1 - t**-0.8
        square = gradient**2 + 1e-30
        row = decay * row + (1 - decay) * square.mean(axis=1)
        column = decay * column + (1 - decay) * square.mean(axis=0)
        update = gradient / np.sqrt(np.outer(row, column) / row.mean())
        update /= max(1, np.sqrt(np.mean(update**2)) / 1.0)
        scale = max(1e-3, np.sqrt(np.mean(param**2)))
        param = param - rate * (scale * update + weight_decay * param)
    return param


@pytest.mark.parametrize("shape", [(128, 256), (256, 128)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adafactor_equals_numpy(shape, weight_decay):
    rng = np.random.default_rng(0)
    param = rng.normal(size=shape).astype(np.float32)
    # Rows and columns of different sizes, and growing, so that clipping acts.
    sizes = np.exp(rng.normal(size=(shape[0], 1)) + rng.normal(size=shape[1]))
    gradients = [
        (rng.normal(size=shape) * sizes * 4**t).astype(np.float32) for t in range(3)
    ]
    optimizer = optim.adafactor(optim.constant(RATE), weight_decay=weight_decay)
    ours = run(optimizer, param, gradients)
    theirs = numpy_adafactor(param, gradients, weight_decay=weight_decay)
    moved = np.abs(theirs - param).max()
    assert moved > 0.01
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * moved)


def test_adafactor_scales_steps_by_the_parameter_only_if_asked():
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=(8, 8)).astype(np.float32)
    param = np.full((8, 8), 5.0, np.float32)
    moved = {}
    for scaled in (True, False):
        optimizer = optim.adafactor(
            optim.constant(RATE), multiply_by_parameter_scale=scaled
        )
        moved[scaled] = np.asarray(run(optimizer, param, [gradient])) - param
    # Below 128 the second moments are kept whole: the first update is the sign.
    np.testing.assert_allclose(moved[False], -RATE * np.sign(gradient), rtol=1e-3)
    np.testing.assert_allclose(moved[True], 5 * moved[False], rtol=1e-3)


def layer_tree(rng):
    """Returns arrays with the names and ranks of an encoder layer's parameters."""
    return {
        "attention": {"query": {"kernel": rng.normal(size=(16, 24))}},
        "mlp": {"wi": {"kernel": rng.normal(size=(16, 32))}},
        "mlp_norm": {"scale": rng.normal(size=16)},
    }


def stack_layers(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(optim.adafactor, min_dim_size_to_factor=8, weight_decay=0.1),
        functools.partial(optim.adafactor, multiply_by_parameter_scale=False),
        functools.partial(optim.adamw, weight_decay=0.1),
        optim.sgd,
    ],
    ids=["factored", "unscaled", "adamw", "sgd"],
)
def test_stacked_layers_take_the_steps_of_single_ones(make):
    rng = np.random.default_rng(0)

    def trees(grow):
        layers = [layer_tree(rng) for _ in range(LAYERS)]
        # Layers of very different sizes: an average over them would show.
        layers = [
            jax.tree.map(lambda x: (x * grow**i).astype(np.float32), layer)  # noqa: B023
            for i, layer in enumerate(layers)
        ]
        single = {f"layers_{i}": layer for i, layer in enumerate(layers)}
        table = rng.normal(size=(32, 16)).astype(np.float32)
        rest = {"token_embedder": {"embedding": table}}
        return (
            {"encoder": single, **rest},
            {"encoder": {"layers": stack_layers(layers)}, **rest},
        )

    single, stacked = trees(10.0)
    gradients = [trees(100.0) for _ in range(5)]
    optimizer = make(optim.constant(RATE))
    single_after = run(optimizer, single, [g[0] for g in gradients])
    stacked_after = run(optimizer, stacked, [g[1] for g in gradients])
    expected = stack_layers([single_after["encoder"][f"layers_{i}"] for i in range(3)])
    ours = stacked_after["encoder"]["layers"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(ours):
        theirs = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        np.testing.assert_allclose(leaf, theirs, rtol=1e-5, atol=1e-6)
    before = stacked["encoder"]["layers"]["mlp"]["wi"]["kernel"]
    moved = np.abs(np.asarray(ours["mlp"]["wi"]["kernel"]) - before)
    assert moved.min(axis=(1, 2)).max() > 0 and moved.max() > 1e-3


def test_adafactor_factors_every_matrix():
    config = encoder.EncoderConfig(
        T5Config(
            d_model=256, num_heads=4, head_dim=64, d_ff=512, num_layers=4,
            num_decoder_layers=2,
        ),
        "decoder_first",
        128,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    params = jax.eval_shape(
        encoder.SentenceEncoder(config).init, jax.random.key(0), tokens
    )["params"]
    params = nn.unbox(params)
    state = jax.eval_shape(optim.adafactor(optim.constant(1e-3)).transform.init, params)
    factored = state[0]
    whole = jax.tree_util.tree_leaves_with_path(factored.v)
    kept = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in whole
        if leaf.shape != (1,)
    }
    # Only vectors, and the bias tables of 32 × 4.
    names = {name.rsplit("/", 2)[-2] for name in kept}
    assert names == {
        "attention_norm", "mlp_norm", "final_norm", "relpos_bias",
        "self_attention_norm", "cross_attention_norm",
    }  # fmt: skip
    layer = factored.v_row["encoder"]["layers"], factored.v_col["encoder"]["layers"]
    shapes = [part["mlp"]["wi"]["kernel"].shape for part in layer]
    assert shapes == [(4, 256), (4, 512)]
    shapes = [part["attention"]["out"]["kernel"].shape for part in layer]
    assert shapes == [(4, 256), (4, 256)]
    table = [
        part["token_embedder"]["embedding"].shape
        for part in (factored.v_row, factored.v_col)
    ]
    assert table == [(256,), (32128,)]
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert num_params == config.num_params() > 10**7
    assert size < num_params / 100


# --- AdamW and SGD --------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_adamw_equals_numpy(max_grad_norm):
    rng = np.random.default_rng(0)
    params = {
        "kernel": rng.normal(size=(4, 6)),
        "layers": {"mlp_norm": {"scale": rng.normal(size=(3, 5))}},
        "final_norm": {"scale": rng.normal(size=7)},
    }
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    gradients = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        for _ in range(3)
    ]
    decay = 0.1
    optimizer = optim.adamw(
        optim.constant(RATE), b1=0.8, b2=0.95, eps=1e-6, weight_decay=decay,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    ours = jax.tree.leaves(run(optimizer, params, gradients))
    # Leaves are sorted by name: final_norm, kernel, layers. Only the kernel decays.
    decays = [0.0, decay, 0.0]
    leaves = [x.astype(np.float64) for x in jax.tree.leaves(params)]
    mean, square = [0.0] * 3, [0.0] * 3
    for t, gradient in enumerate(gradients, 1):
        parts = [g.astype(np.float64) for g in jax.tree.leaves(gradient)]
        if max_grad_norm is not None:
            norm = np.sqrt(sum(np.sum(g**2) for g in parts))
            assert norm > max_grad_norm
            parts = [g * max_grad_norm / norm for g in parts]
        for i, g in enumerate(parts):
            mean[i] = 0.8 * mean[i] + 0.2 * g
            square[i] = 0.95 * square[i] + 0.05 * g**2
            step = mean[i] / (1 - 0.8**t)
            step = step / (np.sqrt(square[i] / (1 - 0.95**t)) + 1e-6)
            leaves[i] = leaves[i] - RATE * (step + decays[i] * leaves[i])
    for mine, theirs in zip(ours, leaves, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [optim.adafactor, optim.adamw])
def test_weight_decay_leaves_norms_alone(make):
    params = {
        "encoder": {
            "final_norm": {"scale": jnp.ones(8)},
            "layers": {
                "mlp": {"wo": {"kernel": jnp.ones((2, 8, 8))}},
                "mlp_norm": {"scale": jnp.ones((2, 8))},
            },
            "layers_0": {"mlp_norm": {"scale": jnp.ones(8)}},
        },
        "projection": {"kernel": jnp.ones((8, 4))},
    }
    zero = jax.tree.map(jnp.zeros_like, params)
    after = run(make(optim.constant(RATE), weight_decay=0.5), params, [zero])
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        expected = 1.0 if path[-1].key == "scale" else 1 - RATE * 0.5
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=str(path))


def test_sgd_is_linear_in_the_gradient_and_follows_the_schedule():
    schedule = optim.linear_decay(peak=1.0, total_steps=4, hold_fraction=0.0)
    param, gradient = np.ones(3, np.float32), np.array([1.0, 2.0, -4.0], np.float32)
    after = run(optim.sgd(schedule), param, [gradient] * 4)
    # 1 + 3/4 + 1/2 + 1/4: the first update has the rate of step 0.
    np.testing.assert_allclose(after, param - 2.5 * gradient, rtol=1e-6)
