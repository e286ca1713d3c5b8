"""Where arrays live: the device mesh, and shardings from logical axes by rules alone.

    mesh = data × fsdp × model
    batch        over data and fsdp
    parameters   embed over fsdp, {vocab, mlp, heads} over model, replicated over data
    optimizer    like its parameter; Adafactor's rows and columns on the surviving axes

Modules name logical axes where they create a parameter or pin an activation; only this
module knows what a name means on a mesh.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sentence_t5 import encoder, names

_logger = logging.getLogger(__name__)

_BATCH_AXES = (names.DATA, names.FSDP)

# Logical axis → mesh axis. An axis that isn't listed is not split.
RULES: dict[str, str | tuple[str, ...]] = {
    names.VOCAB: names.MODEL,
    names.EMBED: names.FSDP,
    names.MLP: names.MODEL,
    names.HEADS: names.MODEL,
    names.ACT_BATCH: _BATCH_AXES,
    names.ACT_HEADS: names.MODEL,
    names.ACT_MLP: names.MODEL,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1 for "all that is left".

    Attributes:
        data: copies of the parameters, each with its part of the batch.
        fsdp: parts that parameters and batch are split into.
        model: parts that heads, MLPs and the vocabulary are split into.
        num_slices: TPU slices, joined by a slower network. They lie along ``data``, so
            that only gradients and embeddings pass between them.
    """

    data: int = -1
    fsdp: int = 1
    model: int = 1
    num_slices: int = 1

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Returns the axis sizes on so many devices.

        Raises:
            ValueError: they can't be laid on the devices.
        """
        sizes = [self.data, self.fsdp, self.model]
        given = int(np.prod([s for s in sizes if s != -1]))
        wrong = sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes)
        if not wrong and -1 in sizes and num_devices % given == 0:
            sizes[sizes.index(-1)] = num_devices // given
        if wrong or int(np.prod(sizes)) != num_devices:
            raise ValueError(
                f"MeshConfig: data={self.data}, fsdp={self.fsdp}, model={self.model} "
                f"can't be laid on {num_devices} devices: their product must be "
                f"{num_devices} (one of them may be -1 for what is left)."
            )
        if self.num_slices < 1 or sizes[0] % self.num_slices:
            raise ValueError(
                f"MeshConfig: data={sizes[0]} can't lie across num_slices="
                f"{self.num_slices}: make it a multiple of the slices, such as "
                f"data={self.num_slices} with fsdp=-1."
            )
        return tuple(sizes)


class Partitioner:
    """A mesh and the shardings on it."""

    def __init__(
        self,
        mesh: MeshConfig = MeshConfig(),
        devices: list[jax.Device] | None = None,
    ):
        """Keeps the layout; devices are touched when the mesh is first needed.

        Args:
            mesh: sizes of the axes.
            devices: what to lay it on; all devices of all hosts by default.
        """
        self._config = mesh
        self._devices = devices

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The device mesh, its axes being ``names.MESH_AXES``."""
        devices = jax.devices() if self._devices is None else self._devices
        sizes = self._config.sizes(len(devices))
        # Other platforms number their hosts as slices, or don't number any.
        tpus = [d for d in devices if d.platform == "tpu"]
        slices = len({getattr(d, "slice_index", 0) for d in tpus}) or 1
        if slices != self._config.num_slices:
            raise ValueError(
                f"The devices lie on {slices} slice(s), MeshConfig.num_slices is "
                f"{self._config.num_slices}: set it to {slices}."
            )
        if slices == 1:
            grid = mesh_utils.create_device_mesh(sizes, devices=devices)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(
                (sizes[0] // slices, *sizes[1:]), (slices, 1, 1), devices=devices
            )
        return Mesh(grid, names.MESH_AXES)

    @property
    def num_batch_shards(self) -> int:
        """How many parts the batch is split into."""
        return int(np.prod([self.mesh.shape[axis] for axis in _BATCH_AXES]))

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every batch array: rows over data and fsdp."""
        return NamedSharding(self.mesh, P(_BATCH_AXES))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of what every device holds whole."""
        return NamedSharding(self.mesh, P())

    @contextlib.contextmanager
    def scope(self, manual: str | None = None) -> Iterator[None]:
        """Gives activation constraints their mesh and rules while tracing.

        Args:
            manual: a mesh axis that the code inside handles by itself (under
                ``shard_map``), so that constraints leave it out.
        """
        rules = RULES
        if manual is not None:
            rules = {name: _without(axes, manual) for name, axes in RULES.items()}
        with contextlib.ExitStack() as stack:
            if manual is None:
                mesh = self.mesh.abstract_mesh
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            stack.enter_context(nn.logical_axis_rules(tuple(rules.items())))
            yield

    def check(self, config: encoder.EncoderConfig, batch_size: int) -> None:
        """Checks that a model and a batch fit the mesh.

        Raises:
            ValueError: a size isn't divisible; the message names the nearest that is.
        """
        self.check_batch(batch_size)
        model = self.mesh.shape[names.MODEL]
        for field in ("num_heads", "d_ff"):
            size = getattr(config.t5, field)
            if size % model:
                raise ValueError(
                    f"T5Config.{field} is {size}, which MeshConfig.model={model} "
                    "doesn't divide: choose a model axis that divides it."
                )

    def check_batch(self, batch_size: int) -> None:
        """Checks that every device gets the same number of rows.

        Raises:
            ValueError: not so; the message names the nearest sizes that fit.
        """
        shards = self.num_batch_shards
        if batch_size % shards:
            below = batch_size // shards * shards
            nearest = f"{below} or {below + shards}" if below else f"{shards}"
            raise ValueError(
                f"The global batch of {batch_size} pairs can't be split over {shards} "
                f"devices (data × fsdp): use {nearest}, or another mesh."
            )

    def param_shardings(self, boxed_params: Any) -> Any:
        """Returns the shardings of parameters.

        Args:
            boxed_params: abstract parameters as ``module.init`` gives them, still in
                flax's boxes that carry the logical axes.

        Returns:
            A tree of NamedShardings, like the unboxed parameters.
        """
        logical = nn.get_partition_spec(boxed_params)
        return self._on_mesh(self.param_specs(nn.unbox(boxed_params), logical))

    def encoder_params(self, config: encoder.EncoderConfig) -> tuple[Any, Any]:
        """Returns an encoder's parameter shardings, and their shapes and dtypes."""
        boxed = encoder.boxed_params(config)
        return self.param_shardings(boxed), nn.unbox(boxed)

    def param_specs(self, params: Any, logical: Any) -> Any:
        """Translates logical axes of parameters to mesh axes.

        Args:
            params: abstract, unboxed parameters.
            logical: a tree like it, of PartitionSpecs of logical axes.

        Returns:
            The same of mesh axes.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf, spec: self._physical(path, leaf.shape, spec),
            params,
            logical,
        )

    def opt_state_shardings(
        self, opt_state: Any, params: Any, param_shardings: Any
    ) -> Any:
        """Returns the shardings of optimizer state, from those of the parameters.

        Args:
            opt_state: abstract state, from ``jax.eval_shape(tx.init, params)``.
            params: abstract, unboxed parameters.
            param_shardings: from ``param_shardings``.

        Returns:
            A tree of NamedShardings, like ``opt_state``.

        Raises:
            ValueError: a leaf of more than one number follows no parameter, or has
                neither its parameter's shape nor a part of it: replicating it could
                cost as much memory as the parameters.
        """
        specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings)
        return self._on_mesh(opt_state_specs(opt_state, params, specs))

    def _on_mesh(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec
        )

    def host_share(self) -> dict[str, int]:
        """Says which part of every global batch this host builds.

        Hosts that hold parts of the same rows (where the model axis spans hosts) build
        the same part.

        Returns:
            ``process_index`` and ``process_count``, counted in parts.

        Raises:
            ValueError: a host's rows aren't one contiguous part of the batch.
        """
        rows: dict[int, set[int]] = {}
        places = self.batch_sharding.devices_indices_map((self.num_batch_shards,))
        for device, (place,) in places.items():
            rows.setdefault(device.process_index, set()).add(place.start or 0)
        parts = sorted({tuple(sorted(shards)) for shards in rows.values()})
        if sum(parts, ()) != tuple(range(self.num_batch_shards)):
            raise ValueError(
                f"On the mesh {dict(self.mesh.shape)}, hosts hold the batch shards "
                f"{parts}: each must hold neighbouring ones, none of them in part. Use "
                "axes that the devices of a host divide, or are divided by."
            )
        mine = tuple(sorted(rows[jax.process_index()]))
        return {"process_index": parts.index(mine), "process_count": len(parts)}

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Makes global arrays from this host's rows."""
        return {
            key: jax.make_array_from_process_local_data(self.batch_sharding, rows)
            for key, rows in batch.items()
        }

    def _physical(
        self, path: jax.tree_util.KeyPath, shape: tuple[int, ...], logical: P
    ) -> P:
        """Translates logical axes; one that doesn't divide its dimension is dropped."""
        axes = []
        padded = itertools.chain(logical, itertools.repeat(None))
        for size, name in zip(shape, padded, strict=False):
            axis = RULES.get(name)
            if axis is not None and size % self.mesh.shape[axis]:
                _logger.warning(
                    "%s: dimension %r of size %d isn't split: mesh axis %r of size %d "
                    "doesn't divide it.",
                    jax.tree_util.keystr(path), name, size, axis, self.mesh.shape[axis],
                )  # fmt: skip
                axis = None
            axes.append(axis)
        return P(*axes)


def opt_state_specs(opt_state: Any, params: Any, param_specs: Any) -> Any:
    """Says how optimizer state lies, from how the parameters do.

    Args:
        opt_state: abstract state, from ``jax.eval_shape(tx.init, params)``.
        params: abstract, unboxed parameters.
        param_specs: a tree like it, of PartitionSpecs.

    Returns:
        A tree of PartitionSpecs, like ``opt_state``.

    Raises:
        ValueError: as ``Partitioner.opt_state_shardings``.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(param_specs, is_leaf=_is_spec)
    by_path = {
        _dict_keys(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def one(path, leaf):
        if leaf.size == 1:
            return P()
        owner = by_path.get(_dict_keys(path))
        if owner is None:
            raise ValueError(
                f"Optimizer state {jax.tree_util.keystr(path)} of shape {leaf.shape} "
                "follows no parameter: its path has none's, so that it has no known "
                "sharding and would lie whole on every device. Use an optimizer whose "
                "state is a tree like the parameters' (not optax.flatten)."
            )
        return _like_param(path, leaf.shape, *owner)

    return jax.tree_util.tree_map_with_path(one, opt_state)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _without(axes: str | tuple[str, ...], removed: str) -> tuple[str, ...] | None:
    kept = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in kept if axis != removed) or None


def _dict_keys(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """Returns a leaf's path within the parameter-shaped part of a tree."""
    return tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))


def _like_param(
    path: jax.tree_util.KeyPath,
    shape: tuple[int, ...],
    param_shape: tuple[int, ...],
    param_spec: P,
) -> P:
    if shape == param_shape:
        return param_spec
    # optax's Adafactor keeps a row (the largest dimension averaged out) and a column
    # (the second largest) of each factored matrix; see its ``_factored_dims``.
    order = np.argsort(param_shape)
    field = next(
        (k.name for k in reversed(path) if isinstance(k, jax.tree_util.GetAttrKey)),
        None,
    )
    dropped = {"v_row": -1, "v_col": -2}.get(field)
    if dropped is not None and len(param_shape) >= 2:
        axis = int(order[dropped])
        if shape == tuple(np.delete(param_shape, axis)):
            spec = tuple(param_spec) + (None,) * (len(param_shape) - len(param_spec))
            return P(*spec[:axis], *spec[axis + 1 :])
    raise ValueError(
        f"Optimizer state {jax.tree_util.keystr(path)} of shape {shape} doesn't follow "
        f"from its parameter's shape {param_shape}: it has no known sharding."
    )
