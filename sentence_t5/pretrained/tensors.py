"""Tensor: a named array on disk that is read when asked for, whole or in part.

Every weights format is opened as a mapping from names to tensors. What a format stores
otherwise than we do (a transposed kernel, layers along an axis) is undone by a view, so
that one shard of an XXL parameter can be read without the rest of it.
"""

import math
from collections.abc import Callable

import numpy as np

Index = tuple[slice, ...]
Shape = tuple[int, ...]


class Tensor:
    """An array that is not read yet.

    Attributes:
        shape: of the whole array.
        dtype: as stored; readers up-cast.
    """

    def __init__(
        self, shape: Shape, dtype: np.dtype, read: Callable[[Index], np.ndarray]
    ):
        """Describes an array.

        Args:
            shape: of the whole array.
            dtype: of the array as stored.
            read: takes one slice per axis, gives that part. It may return a view of a
                memory-mapped file: callers copy.
        """
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self._read = read

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self.dtype})"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, index: Index | None = None) -> np.ndarray:
        """Reads the array, or the part that ``index`` names (one slice per axis)."""
        if index is None:
            index = (slice(None),) * len(self.shape)
        # Readers needn't know what a slice past the end means.
        index = tuple(
            slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)
        )
        part = self._read(index)
        expected = tuple(len(range(s.start, s.stop, s.step)) for s in index)
        if part.shape != expected:
            raise ValueError(f"read {part.shape} where {expected} was expected")
        return part

    @property
    def T(self) -> "Tensor":  # noqa: N802 (numpy's name)
        """The array with its axes reversed."""
        return Tensor(
            self.shape[::-1], self.dtype, lambda index: self._read(index[::-1]).T
        )

    def take(self, axis: int, i: int) -> "Tensor":
        """The ``i``-th slice along ``axis``, which is dropped."""
        before = self.shape[:axis]

        def read(index: Index) -> np.ndarray:
            index = (*index[:axis], slice(i, i + 1), *index[axis:])
            return np.squeeze(self._read(index), axis=axis)

        return Tensor(before + self.shape[axis + 1 :], self.dtype, read)

    def astype(self, dtype: np.dtype | type) -> "Tensor":
        """The same elements as another type."""
        dtype = np.dtype(dtype)
        return Tensor(
            self.shape,
            dtype,
            lambda index: self._read(index).astype(dtype, copy=False),
        )

    def reshape(self, *shape: int) -> "Tensor":
        """The same elements in another shape; any part of it reads the whole."""
        return Tensor(
            shape, self.dtype, lambda index: self.read().reshape(shape)[index]
        )


def from_array(array: np.ndarray) -> Tensor:
    """Wraps an array that is already in memory."""
    return Tensor(array.shape, array.dtype, lambda index: array[index])


def stack(tensors: list[Tensor]) -> Tensor:
    """Stacks arrays of one shape on a new leading axis."""
    first = tensors[0]

    def read(index: Index) -> np.ndarray:
        # Filled in place: a list of parts would hold the result twice.
        chosen = tensors[index[0]]
        shape = tuple(
            len(range(*s.indices(n)))
            for s, n in zip(index[1:], first.shape, strict=True)
        )
        out = np.empty((len(chosen), *shape), first.dtype)
        for row, tensor in zip(out, chosen, strict=True):
            row[...] = tensor.read(index[1:])
        return out

    return Tensor((len(tensors), *first.shape), first.dtype, read)


def equal(a: Tensor, b: Tensor, rows: int = 4096) -> bool:
    """Compares two arrays bit for bit, a few rows at a time."""
    if a.shape != b.shape:
        return False
    rest = (slice(None),) * (len(a.shape) - 1)
    return all(
        np.array_equal(
            a.read((slice(i, i + rows), *rest)), b.read((slice(i, i + rows), *rest))
        )
        for i in range(0, a.shape[0], rows)
    )
