"""Where TensorStore finds files: a local folder or a bucket.

A bucket that can't be reached fails here at once, where the clients would retry for
minutes.
"""

import os
from typing import Any

import tensorstore

from sentence_t5 import buckets


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path names a bucket."""
    return str(path).startswith(buckets.SCHEME)


def kvstore(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns TensorStore's description of a folder."""
    if not is_remote(folder):
        return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}
    bucket, _, path = str(folder).removeprefix(buckets.SCHEME).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path.rstrip('/')}/"}


def read_file(path: str) -> bytes:
    """Reads a small file from a bucket.

    Raises:
        FileNotFoundError: the bucket can't be reached, or the file isn't there.
    """
    buckets.check_reachable(path)
    folder, _, name = path.rpartition("/")
    store = tensorstore.KvStore.open(kvstore(folder)).result()
    found = store.read(name).result()
    if found.state != "value":
        raise FileNotFoundError(f"There is no {path}.")
    return found.value
