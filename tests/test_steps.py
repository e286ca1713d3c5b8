"""The jitted steps: one device against meshes, donation, compilation, metrics."""

import dataclasses
import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sentence_t5 import encoder, losses, names, optim, partitioning, steps
from sentence_t5.t5.config import T5Config

B, N, L = 16, 2, 8
STEPS = 5
ONE = (1, 1, 1)
MESHES = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 8, 1)]
POOLINGS = ["mean", "decoder_first"]

OPTIMIZERS = {
    "adafactor": optim.adafactor(
        optim.linear_decay(peak=0.02, total_steps=50), min_dim_size_to_factor=8
    ),
    "sgd": optim.sgd(optim.constant(0.003)),
    "adamw": optim.adamw(optim.constant(0.002), weight_decay=0.1, max_grad_norm=1.0),
}
# The decoder's softmax is over one place, whatever its logit.
WITHOUT_EFFECT = (
    "decoder/relpos_bias",
    "decoder/layers/self_attention/key",
    "decoder/layers/self_attention/query",
)
TOLERANCES = {"adafactor": 1e-5, "sgd": 1e-5, "adamw": 1e-4}

T5 = T5Config(
    vocab_size=64, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=2,
    num_decoder_layers=1, dropout_rate=0.1,
)  # fmt: skip


def make_model(pooling="mean", optimizer="adafactor", **t5):
    return steps.Model(
        encoder.EncoderConfig(dataclasses.replace(T5, **t5), pooling, 8),
        losses.LossConfig(logit_scale=20.0, mask_duplicates=True),
        OPTIMIZERS[optimizer],
    )


def make_partitioner(mesh):
    return partitioning.Partitioner(
        partitioning.MeshConfig(*mesh), jax.devices()[: math.prod(mesh)]
    )


def make_batch(seed):
    """Returns a batch with padding, masked negatives and duplicates far apart.

    Rows 1 and 14 have one right text, and a negative of row 3 is row 12's right text:
    they lie on different devices of every mesh.
    """
    rng = np.random.default_rng(seed)

    def texts(*shape):
        tokens = rng.integers(2, T5.vocab_size, (*shape, L))
        # The left sides fit into six tokens.
        lengths = rng.integers(2, 7, (*shape, 1))
        tokens = np.where(np.arange(L) == lengths - 1, names.EOS_ID, tokens)
        return np.where(np.arange(L) < lengths, tokens, names.PAD_ID).astype(np.int32)

    batch = {
        names.LEFT_TOKENS: texts(B),
        names.RIGHT_TOKENS: texts(B),
        names.NEGATIVE_TOKENS: texts(B, N),
        names.NEGATIVE_MASK: rng.random((B, N)) < 0.8,
    }
    batch[names.RIGHT_TOKENS][14] = batch[names.RIGHT_TOKENS][1]
    batch[names.NEGATIVE_TOKENS][3, 1] = batch[names.RIGHT_TOKENS][12]
    batch[names.NEGATIVE_MASK][3, 1] = True
    return batch


def make_trainer(mesh, pooling="mean", optimizer="adafactor"):
    return _trainer(mesh, pooling, optimizer)


@functools.cache
def _trainer(mesh, pooling, optimizer):
    model, traces = make_model(pooling, optimizer), []
    transform = model.optimizer.transform

    def update(*args):
        traces.append(1)
        return transform.update(*args)

    counting = optax.GradientTransformation(transform.init, update)
    counted = model.optimizer._replace(transform=counting)
    trainer = steps.Trainer(
        model=dataclasses.replace(model, optimizer=counted),
        partitioner=make_partitioner(mesh),
    )
    trainer.traces = traces
    return trainer


def initial_state(pooling="mean", optimizer="adafactor"):
    """Returns one device's first state, on the host; its key is plain numbers."""
    return _initial_state(pooling, optimizer)


@functools.cache
def _initial_state(pooling, optimizer):
    state = make_trainer(ONE, pooling, optimizer).init_state(0)
    return jax.device_get(state.replace(rng=jax.random.key_data(state.rng)))


def start(trainer, pooling="mean", optimizer="adafactor", *, step=0, seed=7):
    """Returns that state in the trainer's shards."""
    state = initial_state(pooling, optimizer)
    state = state.replace(step=np.int32(step), rng=jax.random.key(seed))
    return jax.device_put(state, trainer.state_shardings)


@functools.cache
def trained(mesh, pooling, optimizer):
    """Returns the metrics of five steps, and the parameters after them."""
    trainer = make_trainer(mesh, pooling, optimizer)
    state, metrics = start(trainer, pooling, optimizer), []
    for step in range(STEPS):
        batch = trainer.partitioner.put_batch(make_batch(step))
        state, values = trainer.train_step(state, batch)
        metrics.append(jax.device_get(values))
    assert int(state.step) == STEPS
    return metrics, jax.device_get(state.params)


def leaves_with_names(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_equal_to_one_device(mesh, pooling, optimizer):
    metrics, params = trained(mesh, pooling, optimizer)
    single_metrics, single_params = trained(ONE, pooling, optimizer)
    for ours, theirs in zip(metrics, single_metrics, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-6)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(
                ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name
            )
    # What the loss is made of: 15 rights and 31 negatives, less masks and duplicates.
    assert 35 < single_metrics[0]["negatives_per_query"] < 45
    before = leaves_with_names(initial_state(pooling, optimizer).params)
    single = leaves_with_names(single_params)
    tolerance = TOLERANCES[optimizer]
    for name, leaf in leaves_with_names(params).items():
        np.testing.assert_allclose(
            leaf, single[name], rtol=0, atol=tolerance, err_msg=name
        )
        if not name.startswith(WITHOUT_EFFECT):
            moved = np.abs(single[name] - before[name]).max()
            assert moved > 20 * tolerance, name


def test_a_trainer_s_attributes_are_described():
    described = re.findall(r"^    (\w+): ", inspect.getdoc(steps.Trainer), re.M)
    public = {name for name in vars(make_trainer(ONE)) if not name.startswith("_")}
    assert set(described) == public - {"traces"}  # Which make_trainer adds.
    assert len(described) == 9


@pytest.mark.parametrize("mesh", [(2, 2, 2)], ids=str)
def test_mesh_equals_one_device(mesh):
    assert_equal_to_one_device(mesh, "mean", "adafactor")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_mesh_equals_one_device(mesh, optimizer, pooling):
    assert_equal_to_one_device(mesh, pooling, optimizer)


@pytest.mark.slow
def test_first_state_does_not_depend_on_the_mesh():
    trainer = make_trainer((2, 2, 2))
    state = trainer.init_state(0)
    ours, theirs = (
        leaves_with_names(state.params),
        leaves_with_names(initial_state().params),
    )
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-6, atol=1e-7)
    kernel = theirs["encoder/layers/mlp/wi/kernel"]
    assert kernel.shape == (2, 16, 32)
    assert abs(kernel.std() * math.sqrt(16) - 1) < 0.1
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1
    # And it is what ``abstract_state`` promises to whoever restores one.
    for real, promised in zip(
        jax.tree.leaves(state), jax.tree.leaves(trainer.abstract_state), strict=True
    ):
        assert (real.shape, real.dtype) == (promised.shape, promised.dtype)
        assert real.sharding.is_equivalent_to(promised.sharding, real.ndim)


# --- one step -------------------------------------------------------------------------


def test_state_is_donated():
    trainer = make_trainer((2, 2, 2))
    state = start(trainer)
    batch = trainer.partitioner.put_batch(make_batch(0))
    after, _ = trainer.train_step(state, batch)
    # Adafactor's placeholders of one element are read by nobody.
    kept = [
        name
        for name, leaf in leaves_with_names(state).items()
        if leaf.size > 1 and not leaf.is_deleted()
    ]
    assert not kept
    num_large = sum(leaf.size > 1 for leaf in jax.tree.leaves(after))
    assert num_large > 2 * len(trainer.param_names)
    assert not any(leaf.is_deleted() for leaf in batch.values())
    for name, leaf in leaves_with_names(after).items():
        expected = leaves_with_names(trainer.state_shardings)[name]
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), name


def test_step_moves_nothing_between_host_and_devices():
    trainer = make_trainer((2, 2, 2))
    state = start(trainer)
    batches = [trainer.partitioner.put_batch(make_batch(i)) for i in range(3)]
    with jax.transfer_guard("disallow_explicit"):
        for batch in batches:
            state, values = trainer.train_step(state, batch)
    assert int(state.step) == 3
    assert np.isfinite(float(values["loss"]))


def test_step_is_traced_and_compiled_once(caplog):
    trainer = make_trainer((2, 2, 2))
    state = start(trainer)
    batches = [trainer.partitioner.put_batch(make_batch(i)) for i in range(4)]
    state, _ = trainer.train_step(state, batches[0])
    with jax.log_compiles():
        for batch in batches[1:]:
            state, _ = trainer.train_step(state, batch)
    assert len(trainer.traces) == 1
    assert not [m for m in caplog.messages if "compil" in m.lower()]
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
    assert caplog.messages  # Were anything compiled, it would have been seen.


def test_norms_are_those_of_gradient_update_and_parameters():
    trainer = make_trainer(ONE)
    before = initial_state().params
    batch = trainer.partitioner.put_batch(make_batch(0))
    state, values = trainer.train_step(start(trainer), batch)
    after = jax.device_get(state.params)

    def norm(tree):
        return np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree))

    before, after = jax.tree.leaves(before), jax.tree.leaves(after)
    moved = [a - b for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(values["param_norm"], norm(after), rtol=1e-5)
    np.testing.assert_allclose(values["update_norm"], norm(moved), rtol=1e-3)
    by_param = np.asarray(values["grad_norm_by_param"])
    assert len(by_param) == len(trainer.param_names) == len(after)
    assert (by_param > 0).all()
    np.testing.assert_allclose(values["grad_norm"], norm(by_param), rtol=1e-5)
    assert trainer.param_names == list(leaves_with_names(state.params))
    assert "encoder/layers/attention/query/kernel" in trainer.param_names


@pytest.mark.slow
def test_a_step_lowers_the_loss_by_its_gradient():
    # The loss that the evaluation step reports: without dropout, a step of SGD against
    # the gradient g lowers it by rate * |g|^2.
    rate = 1e-4
    optimizer = optim.sgd(optim.constant(rate))
    model = dataclasses.replace(make_model(dropout_rate=0.0), optimizer=optimizer)
    trainer = steps.Trainer(model=model, partitioner=make_partitioner(ONE))
    batch = trainer.partitioner.put_batch(make_batch(0))
    params = jax.tree.map(jnp.array, initial_state().params)
    state = trainer.state_from_params(params, seed=0)
    before = trainer.eval_step(state.params, batch)
    state, values = trainer.train_step(state, batch)
    after = trainer.eval_step(state.params, batch)
    np.testing.assert_allclose(values["loss"], before["loss"], rtol=1e-6)
    squared = float(values["grad_norm"]) ** 2
    lowered = float(before["loss"]) - float(after["loss"])
    assert lowered == pytest.approx(rate * squared, rel=0.05)


def test_dropout_changes_with_the_step_and_nothing_else():
    trainer = make_trainer(ONE)
    batch = trainer.partitioner.put_batch(make_batch(0))

    def loss(**kwargs):
        return float(trainer.train_step(start(trainer, **kwargs), batch)[1]["loss"])

    first = loss()
    assert loss() == first
    assert abs(loss(step=1) - first) > 1e-3
    assert abs(loss(seed=8) - first) > 1e-3


def test_start_from_weights_has_a_fresh_optimizer():
    trainer, fresh = make_trainer(ONE), initial_state()
    params = jax.tree.map(lambda x: jnp.array(x + 1), fresh.params)
    expected = jax.device_get(params)
    started = trainer.state_from_params(params, seed=0)
    jax.tree.map(np.testing.assert_array_equal, started.params, expected)
    jax.tree.map(np.testing.assert_array_equal, started.opt_state, fresh.opt_state)
    assert int(started.step) == int(fresh.step) == 0
    # Dropout is that of a run from random weights with the same seed.
    np.testing.assert_array_equal(jax.random.key_data(started.rng), fresh.rng)


# --- evaluation, encoding, towers -----------------------------------------------------


def without_negatives(batch):
    return {k: v for k, v in batch.items() if not k.startswith("negative")}


def test_towers_of_different_lengths_give_the_same_numbers():
    trainer = make_trainer(ONE)
    params, put = start(trainer).params, trainer.partitioner.put_batch
    batch = make_batch(0)
    shorter = batch | {names.LEFT_TOKENS: batch[names.LEFT_TOKENS][:, :6]}
    assert not batch[names.LEFT_TOKENS][:, 6:].any()
    equal = trainer.eval_step(params, put(batch))
    unequal = trainer.eval_step(params, put(shorter))
    for name, value in equal.items():
        np.testing.assert_allclose(value, unequal[name], rtol=2e-5, err_msg=name)
    assert float(equal["loss"]) > 1


@pytest.mark.slow
def test_towers_of_different_lengths_give_the_same_gradients():
    model = make_model(dropout_rate=0.0, optimizer="sgd")
    trainer = steps.Trainer(model=model, partitioner=make_partitioner((4, 1, 2)))
    batch = make_batch(0)
    shorter = batch | {names.LEFT_TOKENS: batch[names.LEFT_TOKENS][:, :6]}
    after = [
        trainer.train_step(
            start(trainer, "mean", "sgd"), trainer.partitioner.put_batch(b)
        )
        for b in (batch, shorter)
    ]
    np.testing.assert_allclose(
        after[0][1]["grad_norm_by_param"], after[1][1]["grad_norm_by_param"], rtol=1e-4
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6),
        after[0][0].params,
        after[1][0].params,
    )


def test_loss_is_that_of_the_encoded_texts():
    # The steps' own embeddings, put together by hand.
    trainer = make_trainer((2, 2, 2))
    params, put = start(trainer).params, trainer.partitioner.put_batch
    batch = make_batch(0)
    on_mesh = put(batch)
    left, right = (
        np.asarray(trainer.encode_step(params, on_mesh[key], None), np.float64)
        for key in (names.LEFT_TOKENS, names.RIGHT_TOKENS)
    )
    np.testing.assert_allclose(np.linalg.norm(left, axis=-1), 1, atol=1e-5)
    logits = 20 * left @ right.T
    same = np.zeros((B, B), bool)
    same[1, 14] = same[14, 1] = True
    logits[same] = -np.inf
    positive = np.diagonal(logits)
    loss = np.log(np.exp(logits).sum(1)) + np.log(np.exp(logits).sum(0)) - 2 * positive
    values = trainer.eval_step(params, put(without_negatives(batch)))
    np.testing.assert_allclose(values["loss"], loss.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        values["positive_cosine"], positive.mean() / 20, rtol=1e-4
    )
    assert float(values["negatives_per_query"]) == pytest.approx(15 - 2 / B)


def test_padded_rows_of_an_evaluation_batch_do_not_count():
    trainer = make_trainer((2, 2, 2))
    params, put = start(trainer).params, trainer.partitioner.put_batch
    batch = without_negatives(make_batch(0))
    whole = trainer.eval_step(params, put({k: v[:12] for k, v in batch.items()}))
    mask = np.arange(B) < 12
    padded = {k: np.where(mask[:, None], v, 0) for k, v in batch.items()}
    padded[names.ROW_MASK] = mask
    values = trainer.eval_step(params, put(padded))
    for name, value in whole.items():
        np.testing.assert_allclose(value, values[name], rtol=1e-5, err_msg=name)
    assert float(values["negatives_per_query"]) == 11


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_scanned_layers_train_like_unrolled_ones(optimizer):
    results = []
    for scan in (True, False):
        model = make_model("decoder_first", optimizer, scan_layers=scan, dropout_rate=0)
        trainer = steps.Trainer(model=model, partitioner=make_partitioner(ONE))
        params = initial_state("decoder_first").params
        if not scan:
            params = unroll(params)
        state = trainer.state_from_params(jax.tree.map(jnp.array, params), seed=0)
        for step in range(STEPS):
            batch = trainer.partitioner.put_batch(make_batch(step))
            state, values = trainer.train_step(state, batch)
        params = jax.device_get(state.params)
        results.append((unroll(params) if scan else params, float(values["loss"])))
    (scanned, scanned_loss), (unrolled, unrolled_loss) = results
    assert scanned_loss == pytest.approx(unrolled_loss, rel=2e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=TOLERANCES[optimizer]),
        scanned,
        unrolled,
    )


def unroll(params):
    """Splits stacked layers into ``layers_0``, ``layers_1``, ..."""
    result = {}
    for name, tree in params.items():
        if name == "layers":
            num_layers = len(jax.tree.leaves(tree)[0])
            for i in range(num_layers):
                result[f"layers_{i}"] = jax.tree.map(lambda x: x[i], tree)  # noqa: B023
        else:
            result[name] = unroll(tree) if isinstance(tree, dict) else tree
    return result
