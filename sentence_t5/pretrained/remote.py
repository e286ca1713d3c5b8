"""Where TensorStore finds files: a local folder or a bucket.

A bucket that can't be reached fails here at once, where the clients would retry for
minutes.
"""

import os
import socket
from typing import Any

import tensorstore

_HOST = ("storage.googleapis.com", 443)
_TIMEOUT_SECONDS = 3.0
_SCHEME = "gs://"


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path names a bucket."""
    return str(path).startswith(_SCHEME)


def kvstore(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns TensorStore's description of a folder."""
    if not is_remote(folder):
        return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}
    bucket, _, path = str(folder).removeprefix(_SCHEME).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path.rstrip('/')}/"}


def read_file(path: str) -> bytes:
    """Reads a small file from a bucket.

    Raises:
        FileNotFoundError: the bucket can't be reached, or the file isn't there.
    """
    check_reachable(path)
    folder, _, name = path.rpartition("/")
    store = tensorstore.KvStore.open(kvstore(folder)).result()
    found = store.read(name).result()
    if found.state != "value":
        raise FileNotFoundError(f"There is no {path}.")
    return found.value


def check_reachable(path: str) -> None:
    """Raises if a bucket can't be reached from here.

    Raises:
        FileNotFoundError: with what to do instead.
    """
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    try:
        socket.create_connection(_HOST, timeout=_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise FileNotFoundError(
            f"{path} can't be reached from here ({_HOST[0]}: {error}). Copy it to a "
            "local folder (gcloud storage cp -r) and name that."
        ) from error
