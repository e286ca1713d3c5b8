"""Meshes and shardings: what lies where, and what is refused."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sentence_t5 import encoder, names, optim, partitioning
from sentence_t5.t5.config import T5Config

P = jax.sharding.PartitionSpec

CONFIG = encoder.EncoderConfig(
    T5Config(
        vocab_size=64, d_model=32, num_heads=4, head_dim=16, d_ff=64, num_layers=2,
        num_decoder_layers=2,
    ),
    "mean",
    16,
)  # fmt: skip


def make_partitioner(data, fsdp, model):
    devices = jax.devices()[: data * fsdp * model]
    return partitioning.Partitioner(partitioning.MeshConfig(data, fsdp, model), devices)


def abstract_params(config=CONFIG):
    """Returns shapes, in flax's boxes with the logical axes."""
    tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    module = encoder.SentenceEncoder(config)
    return jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]


def spec_of(sharding):
    """Returns a spec without its trailing Nones."""
    axes = tuple(sharding.spec)
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return axes


def specs_of(shardings):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): spec_of(sharding)
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)
    }


def per_device_share(shapes, shardings):
    """Returns how much of a tree one device holds, in elements."""
    return sum(
        np.prod(sharding.shard_shape(leaf.shape), dtype=int)
        for leaf, sharding in zip(
            jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
        )
    )


# --- the mesh -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((4, 1, 2), (4, 1, 2)),
        ((2, -1, 2), (2, 2, 2)),
        ((1, 8, 1), (1, 8, 1)),
        ((-1, 8, 1), (1, 8, 1)),
    ],
)
def test_mesh_sizes(given, sizes):
    config = partitioning.MeshConfig(*given)
    assert config.sizes(8) == sizes
    mesh = partitioning.Partitioner(config).mesh
    assert tuple(mesh.shape.items()) == tuple(
        zip(("data", "fsdp", "model"), sizes, strict=True)
    )


@pytest.mark.parametrize(
    "given", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (16, 1, 1), (4, 1, 1)]
)
def test_mesh_must_fit_the_devices(given):
    data, fsdp, model = given
    with pytest.raises(
        ValueError,
        match=rf"data={data}, fsdp={fsdp}, model={model} can't be laid on 8 devices",
    ):
        partitioning.MeshConfig(*given).sizes(8)


def test_the_default_is_data_parallel_over_all_devices():
    partitioner = partitioning.Partitioner()
    assert dict(partitioner.mesh.shape) == {"data": 8, "fsdp": 1, "model": 1}
    assert partitioner.num_batch_shards == 8


# --- batches --------------------------------------------------------------------------


def test_batch_rows_lie_over_data_and_fsdp_in_order():
    partitioner = make_partitioner(2, 2, 2)
    assert partitioner.num_batch_shards == 4
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    batch = partitioner.put_batch({"left_tokens": rows, "negative_mask": rows > 4})
    np.testing.assert_array_equal(batch["left_tokens"], rows)
    np.testing.assert_array_equal(batch["negative_mask"], rows > 4)
    placed = {
        shard.device.id: np.asarray(shard.data)
        for shard in batch["left_tokens"].addressable_shards
    }
    mesh = partitioner.mesh.devices
    for data, fsdp, model in np.ndindex(2, 2, 2):
        first = 2 * (2 * data + fsdp)
        mine = placed[mesh[data, fsdp, model].id]
        np.testing.assert_array_equal(mine, rows[first : first + 2])


def test_one_host_builds_all_rows():
    share = partitioning.Partitioner().host_share()
    assert share == {"process_index": 0, "process_count": 1}


@pytest.mark.parametrize(
    ("mesh", "batch_size", "nearest"),
    [((4, 1, 2), 10, "8 or 12"), ((2, 2, 2), 2, "4"), ((1, 8, 1), 31, "24 or 32")],
)
def test_batch_must_divide(mesh, batch_size, nearest):
    partitioner = make_partitioner(*mesh)
    shards = mesh[0] * mesh[1]
    with pytest.raises(
        ValueError,
        match=rf"{batch_size} pairs .*over {shards} devices.* use {nearest},",
    ):
        partitioner.check(CONFIG, batch_size)
    partitioner.check(CONFIG, 8 * shards)


@pytest.mark.parametrize(
    ("field", "size"), [("num_heads", 6), ("d_ff", 30)], ids=["heads", "mlp"]
)
def test_model_axis_must_divide(field, size):
    fields = {"num_heads": 8, "d_ff": 64, field: size}
    config = encoder.EncoderConfig(T5Config(**fields))
    with pytest.raises(
        ValueError, match=rf"T5Config\.{field} is {size}, .*model=4 doesn't divide"
    ):
        make_partitioner(1, 1, 4).check(config, 8)
    make_partitioner(1, 1, 2).check(config, 8)


# --- parameters -----------------------------------------------------------------------

ENCODER_SPECS = {
    "token_embedder/embedding": ("model", "fsdp"),
    "encoder/relpos_bias/embedding": (),
    "encoder/final_norm/scale": ("fsdp",),
    "encoder/layers/attention_norm/scale": (None, "fsdp"),
    "encoder/layers/attention/query/kernel": (None, "fsdp", "model"),
    "encoder/layers/attention/key/kernel": (None, "fsdp", "model"),
    "encoder/layers/attention/value/kernel": (None, "fsdp", "model"),
    "encoder/layers/attention/out/kernel": (None, "model", "fsdp"),
    "encoder/layers/mlp_norm/scale": (None, "fsdp"),
    "encoder/layers/mlp/wi/kernel": (None, "fsdp", "model"),
    "encoder/layers/mlp/wo/kernel": (None, "model", "fsdp"),
    "projection/kernel": ("fsdp",),
}


def test_parameters_are_split_by_the_rules():
    shardings = make_partitioner(2, 2, 2).param_shardings(abstract_params())
    assert specs_of(shardings) == ENCODER_SPECS


@pytest.mark.parametrize("pooling", ["decoder_first", "attention"])
def test_every_matrix_is_split_over_all_of_fsdp_and_model(pooling):
    config = encoder.EncoderConfig(CONFIG.t5, pooling, 16)
    boxed = abstract_params(config)
    partitioner = make_partitioner(1, 4, 2)
    shardings = partitioner.param_shardings(boxed)
    params = nn.unbox(boxed)
    whole = config.num_params()
    # The projection isn't split over model, the bias tables not at all.
    assert per_device_share(params, shardings) < 1.1 * whole / 8
    specs = specs_of(shardings)
    matrices = [spec for name, spec in specs.items() if name.endswith("kernel")]
    assert all("fsdp" in spec for spec in matrices)


def test_an_axis_that_does_not_divide_is_not_split_and_said(caplog):
    config = encoder.EncoderConfig(
        T5Config(vocab_size=63, d_model=32, num_heads=4, head_dim=16, d_ff=64,
                 num_layers=2),
        "mean",
        16,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="sentence_t5"):
        shardings = make_partitioner(1, 4, 2).param_shardings(abstract_params(config))
    changed = {"token_embedder/embedding": (None, "fsdp")}
    assert specs_of(shardings) == ENCODER_SPECS | changed
    (message,) = caplog.messages
    for part in ("embedding", "'vocab'", "63", "'model'", "2"):
        assert part in message


# --- optimizer state ------------------------------------------------------------------


def opt_shardings(optimizer, mesh=(1, 4, 2), config=CONFIG):
    partitioner = make_partitioner(*mesh)
    boxed = abstract_params(config)
    params = nn.unbox(boxed)
    param_shardings = partitioner.param_shardings(boxed)
    state = jax.eval_shape(optimizer.transform.init, params)
    shardings = partitioner.opt_state_shardings(state, params, param_shardings)
    return params, state, shardings


def test_adafactor_rows_and_columns_lie_with_the_axes_they_keep():
    optimizer = optim.adafactor(optim.constant(1.0), min_dim_size_to_factor=8)
    _, state, shardings = opt_shardings(optimizer)
    rows, columns = specs_of(shardings[0].v_row), specs_of(shardings[0].v_col)
    # A row keeps the smaller dimension, a column the larger.
    layer = "encoder/layers/"
    expected = {
        "token_embedder/embedding": (("fsdp",), ("model",)),
        layer + "mlp/wi/kernel": ((None, "fsdp"), (None, "model")),
        layer + "mlp/wo/kernel": ((None, "fsdp"), (None, "model")),
        layer + "attention/query/kernel": ((None, "fsdp"), (None, "model")),
        layer + "attention/out/kernel": ((None, "fsdp"), (None, "model")),
        "projection/kernel": ((), ("fsdp",)),
    }
    shapes = state[0].v_row["encoder"]["layers"]["mlp"]["wi"]["kernel"].shape
    assert shapes == (2, 32)
    assert {name: (rows[name], columns[name]) for name in expected} == expected
    # Norms are kept whole, and lie with their parameter.
    whole = specs_of(shardings[0].v)
    assert whole["encoder/layers/mlp_norm/scale"] == (None, "fsdp")
    assert whole["encoder/final_norm/scale"] == ("fsdp",)
    assert specs_of(shardings[0].count) == {"": ()}


def test_rows_of_a_square_matrix_are_those_that_adafactor_means():
    # Both have one shape, so that only the optimizer's own choice tells them apart.
    params = {"w": jnp.ones((16, 16))}
    param_sharding = jax.sharding.NamedSharding(
        make_partitioner(1, 4, 2).mesh, P("fsdp", "model")
    )
    optimizer = optim.adafactor(optim.constant(1.0), min_dim_size_to_factor=8)
    state = optimizer.transform.init(params)
    shardings = make_partitioner(1, 4, 2).opt_state_shardings(
        state, params, {"w": param_sharding}
    )
    gradient = {"w": jnp.zeros((16, 16)).at[3].set(1.0)}  # Varies along axis 0.
    _, state = optimizer.transform.update(gradient, state, params)
    for moment, sharding in (
        (state[0].v_row["w"], shardings[0].v_row["w"]),
        (state[0].v_col["w"], shardings[0].v_col["w"]),
    ):
        varies_along = 0 if np.ptp(moment) > 0.5 else 1
        assert spec_of(sharding) == (("fsdp", "model")[varies_along],)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adafactor(optim.constant(1.0), min_dim_size_to_factor=8),
        optim.adafactor(optim.constant(1.0)),
        optim.adamw(optim.constant(1.0), max_grad_norm=1.0),
        optim.sgd(optim.constant(1.0)),
    ],
    ids=["factored", "whole", "adamw", "sgd"],
)
@pytest.mark.parametrize("pooling", ["mean", "decoder_first"])
def test_no_large_state_is_replicated(optimizer, pooling):
    config = encoder.EncoderConfig(CONFIG.t5, pooling, 16)
    params, state, shardings = opt_shardings(optimizer, config=config)
    largest = max(leaf.size for leaf in jax.tree.leaves(params))
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        if sharding.is_fully_replicated:
            # Counts, placeholders, bias tables, and rows of the embedding's width.
            assert leaf.size <= largest / 16, jax.tree_util.keystr(path)
    whole = sum(leaf.size for leaf in jax.tree.leaves(state))
    if whole > largest:
        assert per_device_share(state, shardings) < 1.2 * whole / 8


def test_adamw_moments_lie_with_their_parameters():
    _, _, shardings = opt_shardings(optim.adamw(optim.constant(1.0)), mesh=(2, 2, 2))
    moments = shardings[0]
    assert specs_of(moments.mu) == ENCODER_SPECS
    assert specs_of(moments.nu) == ENCODER_SPECS


def test_state_of_unknown_shape_is_refused():
    # A state as large as its parameter, but transposed: nothing says how to split it.
    transform = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.transpose, params), None
    )
    optimizer = optim.Optimizer(transform, optim.constant(1.0))
    with pytest.raises(ValueError, match=r"shape .* no known sharding"):
        opt_shardings(optimizer)


def test_state_that_follows_no_parameter_is_refused():
    transform = optax.flatten(optax.adam(0.1))
    optimizer = optim.Optimizer(transform, optim.constant(0.1))
    with pytest.raises(
        ValueError, match=r"\.mu of shape \(\d+,\) follows no parameter"
    ):
        opt_shardings(optimizer)


def test_logical_names_have_rules_of_real_axes():
    for axes in partitioning.RULES.values():
        axes = (axes,) if isinstance(axes, str) else axes
        assert set(axes) <= set(names.MESH_AXES)
