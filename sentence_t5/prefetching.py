"""Builds batches ahead of the training loop, in a thread."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from sentence_t5.batching import Batch, Batches


class Prefetcher:
    """Builds batches and puts them on the devices ahead of time, in a thread.

    Iterating gives (step, batch, row ids) for start_step, start_step + 1, ... What goes
    wrong in the thread is raised where the batch is asked for. Close it, or use `with`.
    """

    def __init__(
        self,
        batches: Batches,
        start_step: int,
        put: Callable[[Batch], Any],
        depth: int = 2,
    ):
        """Starts the thread; see `datasets.prefetch`."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}.")
        self._queue: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(batches, start_step, put), daemon=True
        )
        self._thread.start()

    def _run(self, batches: Batches, step: int, put: Callable[[Batch], Any]):
        try:
            while not self._stop.is_set():
                batch, ids = batches.batch(step)
                self._offer((step, put(batch), ids))
                step += 1
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[int, Any, np.ndarray]:
        while not self._stop.is_set():
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self.close()
                raise item
            return item
        raise StopIteration

    def close(self) -> None:
        """Stops the thread and drops what it has built."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
