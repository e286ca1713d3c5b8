"""Writes weights as a checkpoint of ours, one parameter at a time.

``checkpoints.Checkpointer`` saves what a run holds in memory anyway. An import reads
from one disk and writes to another; holding the model between them would ask for more
memory than using it does. So Orbax gets tensors that it opens one after the other.
"""

import os
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import orbax.checkpoint as ocp

from sentence_t5 import checkpoint_files
from sentence_t5.pretrained import tensors

# Written data is kept in memory up to this size.
_FILE_BYTES = 64 * 2**20


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Saves tensors as numpy arrays, each read when the one before it is written."""

    async def serialize(self, values, infos, args=None):
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()
        return []


def write_step(
    model_dir: str | os.PathLike,
    step: int,
    parts: Mapping[str, tensors.Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Writes a step's parameters and meta data; there is no training state to resume.

    Args:
        model_dir: the model's folder.
        step: number of the step, which must not be there yet.
        parts: parameter -> tensor, by name.
        meta: JSON-able values.
    """
    folder = checkpoint_files.absolute(model_dir) / checkpoint_files.CHECKPOINTS_DIR
    registry = ocp.type_handlers.create_type_handler_registry(
        (tensors.Tensor, _OneByOne()),
        # None is written; without a handler, and of it, Orbax warns.
        (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None)),
    )
    items = {
        checkpoint_files.PARAMS: ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry
        ),
        checkpoint_files.META: ocp.JsonCheckpointHandler(),
    }
    save = {
        checkpoint_files.PARAMS: ocp.args.PyTreeSave(
            flax.traverse_util.unflatten_dict(dict(parts), sep="/"),
            ocdbt_target_data_file_size=_FILE_BYTES,
        ),
        checkpoint_files.META: ocp.args.JsonSave(dict(meta)),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items)) as writer:
        writer.save(folder / str(step), args=ocp.args.Composite(**save))
