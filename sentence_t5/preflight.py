"""Checks between the hosts of a run, before anything costs.

A mistake on one host of many (a file that only the others have, a folder on its own
disk) leaves the others waiting for it in the next collective. Here they tell each other
first, and all end with the same message. With one process nothing is checked.
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from sentence_t5 import checkpoint_files

_MESSAGE_BYTES = 2048
_SHOWN = 200
_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2


class OtherHostError(RuntimeError):
    """Another host failed; the message has its name and its error."""


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Lets an error on any host inside the block end all of them, with its message.

    All hosts must enter and leave the block; inside there may be no collectives.

    Args:
        what: what is done inside, to go after "failed at".

    Raises:
        OtherHostError: the block raised on another host but not here, where it would
            have raised the error itself.
    """
    error = None
    try:
        yield
    except Exception as raised:
        if jax.process_count() == 1:
            raise
        error = raised
    if jax.process_count() == 1:
        return
    report = "" if error is None else f"{_host()}: {type(error).__name__}: {error}"
    reports = _gather(report)
    if error is not None:
        raise error
    failed = [f"host {i} ({text})" for i, text in enumerate(reports) if text]
    if failed:
        raise OtherHostError(
            f"{len(failed)} of {len(reports)} hosts failed at {what}, this one did "
            f"not: {failed[0]}"
        )


def check_same(what: str, text: str) -> None:
    """Checks that a text is the same on all hosts, such as a config or a fingerprint.

    Args:
        what: what the text is, for the message.
        text: this host's.

    Raises:
        ValueError: it differs, on every host.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(text.encode()).hexdigest()
    first, *others = _gather(f"{digest}{text[:_SHOWN]}")
    for i, other in enumerate(others, start=1):
        if other[: len(digest)] != first[: len(digest)]:
            raise ValueError(
                f"The hosts do not have the same {what}: host 0 has "
                f"{first[len(digest) :]!r}, host {i} {other[len(digest) :]!r}. Start "
                "all with the same code, command and files."
            )


def check_shared(model_dir: str | os.PathLike) -> None:
    """Checks that what one host writes into ``model_dir`` is seen by all.

    On a disk of each host's own, every host would save its part of a checkpoint where
    nobody finds it.

    Args:
        model_dir: the run's folder; made if need be.

    Raises:
        ValueError: some hosts don't see what host 0 wrote, on every host.
    """
    if jax.process_count() == 1:
        return
    folder = checkpoint_files.absolute(model_dir)
    token = multihost_utils.broadcast_one_to_all(
        np.frombuffer(os.urandom(8), dtype=np.uint8)
    )
    mark = folder / f".shared-{np.asarray(token).tobytes().hex()}"
    with together(f"writing into model_dir {folder}"):
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(_host())
    try:
        blind = [text for text in _gather("" if _appears(mark) else _host()) if text]
    finally:
        if jax.process_index() == 0:
            mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"model_dir {folder} is not one folder for all hosts: "
            f"{', '.join(blind[:5])} ({len(blind)} of {jax.process_count()} hosts) "
            "don't see what host 0 writes there. Use a bucket (gs://...) or a folder "
            "on a file system that all hosts mount."
        )


def _appears(mark) -> bool:
    """Waits a while for a file: network file systems may show it late."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _host() -> str:
    return socket.gethostname()


def _gather(text: str) -> list[str]:
    """Returns every host's text, the first two thousand bytes of it."""
    mine = np.zeros(_MESSAGE_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_MESSAGE_BYTES], np.uint8)
    mine[: len(encoded)] = encoded
    gathered = np.asarray(multihost_utils.process_allgather(mine))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in gathered]
