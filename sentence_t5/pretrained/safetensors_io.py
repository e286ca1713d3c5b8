"""The safetensors format in numpy: tensors read in place, written one at a time.

    u64 length ─ JSON header {name: {dtype, shape, data_offsets}} ─ little-endian data

The file is memory-mapped and its pages are given back after each read, so that a
process never holds a file beside the arrays made from it.

Source: the format's description in the ``safetensors`` project's README.
"""

import json
import math
import os
import struct
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from sentence_t5.pretrained import mapped_files, tensors

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


def open_file(path: str | os.PathLike) -> dict[str, tensors.Tensor]:
    """Opens a safetensors file.

    Args:
        path: of a local file.

    Returns:
        Its tensors by name; nothing but the header is read.

    Raises:
        ValueError: the file is cut short or is not in this format; the message names
            the file and, where it can, the first tensor that does not fit.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = _read_header(file, size, path)
        mapped = mapped_files.map_file(file)
    opened = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {entry['dtype']}, expected one of "
                f"{', '.join(_DTYPES)}."
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > size:
            raise ValueError(
                f"{path} is cut short: tensor {name} ends at byte {end}, the file has "
                f"{size}. Copy or download it again."
            )
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{path}: tensor {name} of shape {shape} and dtype {entry['dtype']} "
                f"takes {end - begin} bytes, which do not fit."
            )
        opened[name] = mapped_files.tensor_at(mapped, begin, shape, dtype)
    return opened


def _read_header(file, size: int, path: str) -> tuple[dict, int]:
    """Returns the header and the position of the first data byte."""
    length = _LENGTH.unpack(file.read(8))[0] if size >= 8 else size
    if 8 + length > size:
        raise ValueError(
            f"{path} is not a whole safetensors file: its header should take {length} "
            f"bytes, the file has {size}. Copy or download it again."
        )
    try:
        return json.loads(file.read(length)), 8 + length
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}).") from error


def write_file(
    path: str | os.PathLike,
    arrays: Mapping[str, tensors.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file, holding one tensor in memory at a time.

    Args:
        path: of the file, which is replaced as a whole at the end.
        arrays: name -> tensor, in the order they are written.
        metadata: strings for the header.
    """
    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in arrays.items():
        end = offset + tensor.size * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    unfinished = f"{os.fspath(path)}.unfinished"
    with open(unfinished, "wb") as file:
        file.write(_LENGTH.pack(len(encoded)) + encoded)
        for tensor in arrays.values():
            # As bytes: memoryview knows no bfloat16.
            flat = np.ascontiguousarray(tensor.read()).reshape(-1)
            file.write(flat.view(np.uint8).data)
    os.replace(unfinished, path)
