"""T5X and T5X Retrieval checkpoints, read without t5x.

    checkpoint_1000               one msgpack file: everything inside it, or
    checkpoint_1000/checkpoint    the same tree, its large leaves TensorStore arrays
    checkpoint_1000/target.…/     in folders beside it

Three generations are read: arrays inside the file; leaves that describe an array
(``driver``, ``kvstore``, ``metadata``); and Orbax's, whose leaves are placeholders. The
optimizer's state is never read. The description of a leaf is trusted where the array's
own ``.zarray`` is missing, as it is after a copy that dropped hidden files.

Source: ``t5x/checkpoints.py`` and the checkpoints in T5X's and T5X Retrieval's tests.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.serialization
import numpy as np
import tensorstore

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import name_tables, remote, tensors
from sentence_t5.pretrained import source as source_lib
from sentence_t5.t5 import config as t5_config

INDEX_FILE = "checkpoint"
# Where a train state keeps its parameters, the newest layout first.
_PREFIXES = ("optimizer/target/", "target/", "params/")
_PLACEHOLDER = "PLACEHOLDER://"
_HEAD = "decoder/logits_dense/kernel"
# Scanned T5X stacks keep all layers in one array, along this axis.
_SCAN_AXIS = 1
_SCANNED = re.compile(r"(encoder|decoder)/(?:\1|layers)/(?!relpos_bias)(.+)")
_QUERY_LIKE = re.compile(r".*attention/(query|key|value)/kernel")
_OUT = re.compile(r".*attention/out/kernel")


def open_checkpoint(path: str | os.PathLike) -> source_lib.Source:
    """Opens the parameters of a T5X checkpoint.

    Args:
        path: the msgpack file, or the folder that holds it, which may be ``gs://``.

    Returns:
        The opened checkpoint. Its config follows from the shapes, as far as these are a
        T5's: pooling is the mean, and the largest distance of the position bias is 128,
        since neither is stored.
    """
    leaves, folder = _read_index(path)
    prefix = next(
        (p for p in _PREFIXES if any(name.startswith(p) for name in leaves)), ""
    )
    params = {
        name.removeprefix(prefix): _open_leaf(name, leaf, folder)
        for name, leaf in leaves.items()
        if name.startswith(prefix)
    }
    skipped = len(leaves) - len(params)
    params = dict(_unroll(params))
    never_needed = [f"optimizer state ({skipped} arrays)"] if skipped else []
    if params.pop(_HEAD, None) is not None:
        never_needed.append(_HEAD)
    ours, foreign = source_lib.translate(params, name_tables.T5X)
    return source_lib.Source(
        path=str(path),
        family="T5X",
        tensors=ours,
        foreign=foreign,
        never_needed=tuple(never_needed),
        config=_config_from_shapes(ours),
    )


def open_tensors(path: str | os.PathLike) -> dict[str, tensors.Tensor]:
    """Opens every array of a checkpoint, the optimizer's state too.

    Args:
        path: the msgpack file, or the folder that holds it.

    Returns:
        Arrays by their path in the tree, joined with ``/``.

    Raises:
        FileNotFoundError: no such file; an array's folder is missing.
        ValueError: not a T5X checkpoint.
    """
    leaves, folder = _read_index(path)
    return {name: _open_leaf(name, leaf, folder) for name, leaf in leaves.items()}


def _read_index(path: str | os.PathLike) -> tuple[dict[str, Any], str]:
    """Reads the msgpack file; returns its array leaves and the folder it lies in."""
    if remote.is_remote(path):
        data, folder = remote.read_file(f"{path}/{INDEX_FILE}"), str(path)
    else:
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / INDEX_FILE
        if not file.exists():
            raise FileNotFoundError(f"There is no T5X checkpoint at {file}.")
        data, folder = file.read_bytes(), str(file.parent.absolute())
    try:
        content = flax.serialization.msgpack_restore(data)
    except Exception as error:
        raise ValueError(
            f"{path} is no T5X checkpoint, or it is cut short ({len(data)} bytes): "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no T5X checkpoint: it holds no tree of arrays.")
    return dict(_leaves(content)), folder


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walks over a tree's arrays, held or described."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not {"driver", "kvstore"} <= set(value):
            yield from _leaves(value, f"{name}/")
        elif isinstance(value, Mapping | np.ndarray | np.generic) or (
            isinstance(value, str) and value.startswith(_PLACEHOLDER)
        ):
            yield name, value


def _open_leaf(name: str, leaf: Any, folder: str) -> tensors.Tensor:
    """Opens one leaf."""
    if isinstance(leaf, np.ndarray | np.generic):
        return tensors.from_array(np.asarray(leaf))
    if isinstance(leaf, str):
        return _open_array(name, folder, leaf.removeprefix(_PLACEHOLDER), None)
    array_path = leaf["kvstore"]["path"].strip("/").rsplit("/", 1)[-1]
    return _open_array(name, folder, array_path, leaf)


def _open_array(
    name: str, folder: str, array_path: str, described: Mapping[str, Any] | None
) -> tensors.Tensor:
    """Opens a TensorStore array in the checkpoint's folder."""
    where = f"{folder}/{array_path}"
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": remote.kvstore(where)}
    if not remote.is_remote(folder) and not os.path.exists(f"{where}/.zarray"):
        if not os.path.isdir(where):
            raise FileNotFoundError(
                f"{name}: the folder of its array, {where}, is missing."
            )
        if described is None:
            raise FileNotFoundError(
                f"{name}: {where}/.zarray is missing, without which neither shape nor "
                "dtype is known. Copy the checkpoint again, hidden files included."
            )
        spec["metadata"] = _zarr_metadata(described)
        spec["assume_metadata"] = True
    return open_array(spec)


def open_array(spec: dict[str, Any]) -> tensors.Tensor:
    """Opens a TensorStore array for reading; parts are read when asked for."""
    store = tensorstore.open(spec, read=True).result()
    return tensors.Tensor(
        store.shape, store.dtype.numpy_dtype, lambda index: store[index].read().result()
    )


def _zarr_metadata(described: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a leaf's description to what ``.zarray`` would say."""
    metadata = dict(described["metadata"])
    metadata.setdefault("dtype", np.dtype(described.get("dtype", "float32")).str)
    return {
        "zarr_format": 2, "order": "C", "fill_value": None, "filters": None, **metadata,
    }  # fmt: skip


def _unroll(
    params: Mapping[str, tensors.Tensor],
) -> Iterator[tuple[str, tensors.Tensor]]:
    """Cuts scanned stacks into layers and joins split heads into matrices."""
    for name, tensor in params.items():
        if match := _SCANNED.fullmatch(name):
            stack, rest = match.groups()
            for i in range(tensor.shape[_SCAN_AXIS]):
                layer = f"{stack}/layers_{i}/{rest}"
                yield layer, _join_heads(layer, tensor.take(_SCAN_AXIS, i))
        else:
            yield name, _join_heads(name, tensor)


def _join_heads(name: str, tensor: tensors.Tensor) -> tensors.Tensor:
    """Makes [D, H, K] and [H, K, D] kernels the matrices they stand for."""
    if len(tensor.shape) == 3 and _QUERY_LIKE.fullmatch(name):
        return tensor.reshape(tensor.shape[0], tensor.shape[1] * tensor.shape[2])
    if len(tensor.shape) == 3 and _OUT.fullmatch(name):
        return tensor.reshape(tensor.shape[0] * tensor.shape[1], tensor.shape[2])
    return tensor


def _config_from_shapes(
    ours: Mapping[str, tensors.Tensor],
) -> encoder_lib.EncoderConfig | None:
    """Derives the encoder's config; None if a T5's names are not all there."""
    gated = "encoder/layers_0/mlp/wi_0/kernel" in ours
    needed = {
        "table": "token_embedder/embedding",
        "bias": "encoder/relpos_bias/embedding",
        "query": "encoder/layers_0/attention/query/kernel",
        "wo": "encoder/layers_0/mlp/wo/kernel",
    }
    if any(name not in ours for name in needed.values()):
        return None
    shapes = {key: ours[name].shape for key, name in needed.items()}
    buckets, heads = shapes["bias"]
    projection = ours.get("projection/kernel")
    return encoder_lib.EncoderConfig(
        t5=t5_config.T5Config(
            vocab_size=shapes["table"][0],
            d_model=shapes["table"][1],
            num_heads=heads,
            head_dim=shapes["query"][1] // heads,
            d_ff=shapes["wo"][0],
            num_layers=source_lib.count_layers(set(ours), "encoder"),
            num_decoder_layers=source_lib.count_layers(set(ours), "decoder"),
            mlp_activations=("gelu", "linear") if gated else ("relu",),
            relpos_num_buckets=buckets,
        ),
        projection_dim=projection.shape[1] if projection else None,
    )


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a local path looks like a T5X checkpoint."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / INDEX_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(1)
    # A msgpack map: "checkpoint" is also the name of TensorFlow's text index.
    return bool(first) and (first[0] & 0xF0 == 0x80 or first[0] in (0xDE, 0xDF))
