"""Files as a whole: written in one go, or not at all."""

import os

from etils import epath


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
