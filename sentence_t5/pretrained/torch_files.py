"""``pytorch_model.bin`` read without torch, for folders that hold nothing newer.

    zip: …/data.pkl   a pickle of names, shapes and keys
         …/data/KEY   raw little-endian values, not compressed

The pickle may name only what builds tensors; anything else is refused, so that a file
can't run code here. Files of torch before 1.6 are no zip and are not read.

Source: ``torch.save`` of torch 2, ``torch/_utils.py:_rebuild_tensor_v2``.
"""

import collections
import os
import pickle
import struct
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sentence_t5.pretrained import mapped_files, tensors

_STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "BoolStorage": np.dtype("?"),
}
_LOCAL_HEADER_BYTES = 30


class _Storage(NamedTuple):
    """Values of one type at a position of the file."""

    begin: int
    dtype: np.dtype


def open_file(path: str | os.PathLike) -> dict[str, tensors.Tensor]:
    """Opens a file of ``torch.save(model.state_dict(), path)``.

    Args:
        path: of a local file.

    Returns:
        Its tensors by name; nothing but the pickle is read.

    Raises:
        ValueError: no such file, cut short, or holding more than tensors.
    """
    path = os.fspath(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no file of torch 1.6 or newer, or it is cut short. Save the "
            "model once more with a current transformers, or copy the file again."
        )
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        mapped = mapped_files.map_file(file)
        entries = {info.filename: info for info in archive.infolist()}
        pickled = next(name for name in entries if name.endswith("data.pkl"))
        root = pickled.removesuffix("data.pkl")

        def find(key: str) -> int:
            info = entries[f"{root}data/{key}"]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{path}: {info.filename} is compressed.")
            begin = info.header_offset
            header = mapped[begin : begin + _LOCAL_HEADER_BYTES]
            name_length, extra_length = struct.unpack("<HH", header[26:30])
            return begin + _LOCAL_HEADER_BYTES + name_length + extra_length

        with archive.open(pickled) as stream:
            reader = _Unpickler(stream, find, mapped)
            try:
                content = reader.load()
            except pickle.UnpicklingError as error:
                raise ValueError(f"{path}: {error}") from error
    return {k: v for k, v in content.items() if isinstance(v, tensors.Tensor)}


class _Unpickler(pickle.Unpickler):
    """Builds tensors and dicts of them, and nothing else."""

    def __init__(self, stream: Any, find: Any, mapped: Any):
        super().__init__(stream)
        self._find = find
        self._mapped = mapped

    def persistent_load(self, saved_id: Any) -> _Storage:
        _, dtype, key, _, _ = saved_id
        return _Storage(self._find(key), dtype)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no file of tensors does; not read."
        )

    def _rebuild(
        self, storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any
    ) -> tensors.Tensor:
        size = storage.dtype.itemsize
        return mapped_files.tensor_at(
            self._mapped,
            storage.begin + offset * size,
            tuple(shape),
            storage.dtype,
            tuple(step * size for step in strides),
        )
