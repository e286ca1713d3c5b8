"""T5X's PjitPartitioner on this package's mesh, by this package's rules.

T5X makes a data × model mesh by itself, and on CPU puts all devices on ``model``. Here
the mesh is that of ``MeshConfig``, data × fsdp × model, whatever the platform.
"""

import functools
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from t5x import optimizers
from t5x import partitioning as t5x_partitioning
from t5x import train_state as train_state_lib

from sentence_t5 import names, partitioning

_BATCH = "batch"  # T5X's name for the axis of rows.


class Partitioner(t5x_partitioning.PjitPartitioner):
    """Shards like ``partitioning.Partitioner``, through T5X."""

    def __init__(
        self,
        mesh: partitioning.MeshConfig | None = None,
        devices: list[jax.Device] | None = None,
    ):
        """Keeps the layout; devices are touched when the mesh is first needed.

        Args:
            mesh: sizes of the axes; all devices on `data` by default.
            devices: what to lay it on; all devices of all hosts by default.
        """
        rules = {_BATCH: partitioning.RULES[names.ACT_BATCH], **partitioning.RULES}
        # T5X wants a number of partitions, for a mesh that is never made.
        super().__init__(num_partitions=1, logical_axis_rules=tuple(rules.items()))
        self.ours = partitioning.Partitioner(mesh or partitioning.MeshConfig(), devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The device mesh, its axes being ``names.MESH_AXES``."""
        return self.ours.mesh

    def get_data_layout(
        self, batch_size: int | None = None, host_index: int | None = None
    ) -> t5x_partitioning.DataLayout:
        """Says which part of a batch this host builds.

        Raises:
            ValueError: the mesh can't share the batch; the message has sizes that fit.
        """
        if batch_size is not None:
            self.ours.check_batch(batch_size)
        return super().get_data_layout(batch_size, host_index)

    def get_logical_axes(self, train_state: Any) -> Any:
        """Returns None for every leaf; ``get_mesh_axes`` doesn't go through names."""
        return t5x_partitioning.BasePartitioner.get_logical_axes(self, train_state)

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Returns a train state of PartitionSpecs.

        Args:
            train_state: of abstract arrays, with the parameters' logical axes.

        Raises:
            ValueError: a leaf of the optimizer's state follows no parameter.
        """
        params = train_state.params
        logical = flax_partitioning.get_axis_names(train_state.params_axes)
        specs = self.ours.param_specs(params, logical)
        if isinstance(train_state, train_state_lib.InferenceState):
            return train_state.replace(step=None, params=specs, params_axes=None)
        optimizer = train_state._optimizer
        state = optimizers.OptimizerState(
            step=P(),
            param_states=partitioning.opt_state_specs(
                train_state.param_states, params, specs
            ),
        )
        return train_state.replace(
            _optimizer=optimizer.replace(state=state, target=specs), params_axes=None
        )
