"""Files of vectors, ``.npy``, that are filled part by part through a memory map.

Their room on disk is taken when they are made: writing through a memory map to a disk
that has become full would kill the process (SIGBUS) without a word.
"""

import errno
import os

import numpy as np

# What systems say whose disks can't set room aside.
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def create(path: str | os.PathLike, shape: tuple[int, int]) -> np.memmap:
    """Makes a file of zeros and opens it for writing.

    Args:
        path: the file; one that is there is replaced.
        shape: ``[n E]``.

    Returns:
        float32 [n E].

    Raises:
        OSError: the disk has too little room; nothing is left behind.
    """
    try:
        vectors = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        with open(path, "r+b") as file:
            _take_room(file.fileno(), os.path.getsize(path))
    except OSError as error:
        if os.path.exists(path):
            os.remove(path)
        if error.errno != errno.ENOSPC:
            raise
        gigabytes = 4 * shape[0] * shape[1] / 1e9
        raise OSError(
            error.errno,
            f"{error.strerror}: {shape[0]} vectors of width {shape[1]} take "
            f"{gigabytes:.3g} GB in {os.path.dirname(os.path.abspath(path))}. Make "
            "room there, or name another folder",
        ) from error
    return vectors


def _take_room(descriptor: int, size: int) -> None:
    """Takes a file's room on disk, as far as system and disk let it be taken."""
    # Not on macOS.
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
