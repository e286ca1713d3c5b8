"""Whether a bucket can be reached: its clients would retry for minutes."""

import os
import socket

SCHEME = "gs://"
_HOST = ("storage.googleapis.com", 443)
_TIMEOUT_SECONDS = 3.0


def check_reachable(path: str) -> None:
    """Raises if a bucket can't be reached from here.

    Args:
        path: in the bucket, starting with ``SCHEME``.

    Raises:
        FileNotFoundError: with what to do instead.
    """
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    try:
        socket.create_connection(_HOST, timeout=_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise FileNotFoundError(
            f"{path} can't be reached from here ({_HOST[0]}: {error}). Copy it to this "
            "machine (gcloud storage cp -r) and name that."
        ) from error
