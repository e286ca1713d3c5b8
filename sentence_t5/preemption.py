"""Preemption: leaving a run cleanly when the machine is taken away."""

import logging
import signal
import threading

import jax
from jax.experimental import multihost_utils

_logger = logging.getLogger(__name__)


class PreemptionGuard:
    """Notices SIGTERM, so that the loop can save and leave.

    In one process a signal handler sets a flag; the handler that was there before
    comes back on exit. Under ``jax.distributed`` JAX catches the signal itself and all
    processes agree on the step to stop at, some steps later.
    """

    def __init__(self):
        self.requested = False
        self._previous = None

    def __enter__(self) -> "PreemptionGuard":
        self._distributed = jax.distributed.is_initialized()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not self._distributed and in_main_thread:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def reached(self, step: int) -> bool:
        """Whether to stop after ``step``; all processes get the same answer."""
        if self._distributed:
            self.requested |= multihost_utils.reached_preemption_sync_point(step)
        return self.requested

    def _on_signal(self, signum, frame) -> None:
        self.requested = True
        _logger.warning("SIGTERM: saving after this step, then leaving.")
