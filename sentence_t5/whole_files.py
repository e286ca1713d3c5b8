"""Files as a whole: written in one go or not at all, and told apart by their hash."""

import hashlib
import os
from collections.abc import Callable
from typing import BinaryIO

from etils import epath

_CHUNK_BYTES = 1 << 22


def write(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file in one go, so that readers never see half of it.

    Args:
        path: the file, which may be there already; its folder must be.
        content: all of it.
    """
    path = epath.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def sha256(path: str | os.PathLike, opened_by: Callable[..., BinaryIO] = open) -> str:
    """Returns the hex digest of a file's contents, read piece by piece.

    Args:
        path: the file.
        opened_by: takes the path and a mode; what opens local files by default.
    """
    digest = hashlib.sha256()
    with opened_by(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
