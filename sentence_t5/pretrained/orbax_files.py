"""Our own checkpoints as a source: each parameter opened where Orbax wrote it.

``checkpoints.load_params`` restores a tree as it was saved. This reads the same files
parameter by parameter, for weights that go into another tree: other layers scanned, a
new projection, no decoder.

Source: the layout of orbax-checkpoint 0.12: ``_METADATA`` names the leaves, OCDBT holds
them as zarr arrays.
"""

import dataclasses
import json
import os

from etils import epath

from sentence_t5 import checkpoint_files, descriptions
from sentence_t5.pretrained import remote, t5x, tensors
from sentence_t5.pretrained import source as source_lib


def open_checkpoint(
    path: str | os.PathLike, step: int | None = None
) -> source_lib.Source:
    """Opens the parameters of a checkpoint that this package saved.

    Args:
        path: a model_dir, its ``checkpoints`` folder, one step's or its ``params``; or
            a model_dir or a step's folder that T5X's train.py saved for this package.
        step: the step of a model_dir; the newest whole one by default.

    Returns:
        The opened checkpoint; config and vocabulary if ``encoder.json`` is there.
    """
    folder, step, _ = checkpoint_files.find_params(path, step)
    opened = {}
    for name, tensor in open_tensors(folder).items():
        stack, layers, rest = name.partition("/layers/")
        if layers:
            for i in range(tensor.shape[0]):
                opened[f"{stack}/layers_{i}/{rest}"] = tensor.take(0, i)
        else:
            opened[name] = tensor
    source = source_lib.Source(str(folder), "sentence_t5", opened, step=step)
    return _with_description(source, folder)


def open_tensors(folder: epath.Path) -> dict[str, tensors.Tensor]:
    """Opens every parameter in an item's folder by its path, joined with ``/``."""
    metadata = json.loads((folder / checkpoint_files.TREE_METADATA).read_text())
    base = remote.kvstore(folder)
    if metadata.get("use_ocdbt", True):
        base = {"driver": "ocdbt", "base": base}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    inside = checkpoint_files.params_key(folder)
    opened = {}
    for entry in metadata["tree_metadata"].values():
        keys = [str(key["key"]) for key in entry["key_metadata"]]
        if inside is not None and keys[0] != inside:
            continue
        path = base.get("path", "") + ".".join(keys) + "/"
        spec = {"driver": driver, "kvstore": {**base, "path": path}}
        try:
            name = "/".join(keys if inside is None else keys[1:])
            opened[name] = t5x.open_array(spec)
        except ValueError as error:
            raise ValueError(
                f"The checkpoint {folder} can't be read: {'/'.join(keys)}: {error}"
            ) from error
    return opened


def _with_description(
    source: source_lib.Source, folder: epath.Path
) -> source_lib.Source:
    """Adds what ``encoder.json`` says, if it is there."""
    try:
        found = descriptions.read_description(folder)
    except FileNotFoundError:
        return source
    vocabulary = source_lib.Vocabulary(
        found.tokenizer.model_bytes, found.tokenizer.extra_ids
    )
    return dataclasses.replace(
        source,
        config=found.encoder,
        vocabulary=vocabulary,
        max_length=found.max_length,
        prompts=found.prompts,
        default_prompt=found.default_prompt,
    )
