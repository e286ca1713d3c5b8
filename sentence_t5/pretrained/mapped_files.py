"""Arrays inside memory-mapped files.

Pages that were read are given back at once: a mapped page counts as the process's own
memory while it stays, and a checkpoint would be held beside the arrays made from it.
"""

import math
import mmap
from typing import IO

import numpy as np

from sentence_t5.pretrained import tensors


def map_file(file: IO[bytes]) -> mmap.mmap:
    """Maps a whole file for reading; the mapping outlives the file object."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def tensor_at(
    mapped: mmap.mmap,
    begin: int,
    shape: tensors.Shape,
    dtype: np.dtype,
    strides: tuple[int, ...] | None = None,
) -> tensors.Tensor:
    """Describes the array at a position of a mapped file.

    Args:
        mapped: the file.
        begin: position of its first element, in bytes.
        shape: of the array.
        dtype: of the array.
        strides: bytes from one element to the next along each axis; of a C array by
            default.
    """
    if not math.prod(shape):
        return tensors.from_array(np.empty(shape, dtype))

    def read(index: tensors.Index) -> np.ndarray:
        whole = np.ndarray(shape, dtype, mapped, begin, strides)
        part = np.array(whole[index])
        size = dtype.itemsize + sum(
            (n - 1) * step for n, step in zip(shape, whole.strides, strict=True)
        )
        _give_pages_back(mapped, begin, size)
        return part

    return tensors.Tensor(shape, dtype, read)


def _give_pages_back(mapped: mmap.mmap, begin: int, size: int) -> None:
    """Takes pages that were read out of this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        aligned = begin - begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, aligned, begin + size - aligned)
