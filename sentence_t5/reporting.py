"""What a run tells the world: console lines, TensorBoard events, ``metrics.jsonl``.

One process writes. Numbers arrive as device arrays and are fetched here, once for all
steps since the last report, so that the loop itself never waits.
"""

import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from clu import metric_writers
from etils import epath

from sentence_t5 import metrics_file

_logger = logging.getLogger(__name__)

_CONSOLE = "sentence_t5 console"
# Finite as long as the step is sound; the first that isn't says what went wrong.
_MUST_BE_FINITE = ("loss", "grad_norm", "update_norm")


class NonFiniteError(FloatingPointError):
    """A loss, gradient or update became NaN or infinite."""


class Reporter:
    """Collects step metrics on the device and reports them when asked to."""

    def __init__(
        self,
        model_dir: str,
        *,
        start_step: int,
        total_steps: int,
        batch_size: int,
        param_names: Sequence[str],
    ):
        """Opens the files; lines of steps after ``start_step`` are dropped.

        Args:
            model_dir: the run's folder.
            start_step: updates already done.
            total_steps: updates to do in all.
            batch_size: pairs in the global batch.
            param_names: of the parameters, in the order of ``grad_norm_by_param``.
        """
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._param_names = param_names
        self._window: list[tuple[int, dict[str, jax.Array]]] = []
        self._rows_crc = 0
        self._reported_step = start_step
        self._reported_time = time.perf_counter()
        self._path = None
        self._writer = None
        if jax.process_index() == 0:
            self._path = epath.Path(model_dir) / metrics_file.NAME
            metrics_file.keep_until(self._path, start_step)
            self._writer = metric_writers.SummaryWriter(model_dir)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writer is not None:
            self._writer.close()

    def start_clock(self) -> None:
        """Starts timing: compilation and evaluation before this don't count."""
        self._reported_time = time.perf_counter()

    def collect(
        self, step: int, values: dict[str, jax.Array], rows: np.ndarray
    ) -> None:
        """Keeps a step's metrics, still on the device, and sums up its row ids."""
        self._window.append((step, values))
        self._rows_crc = zlib.crc32(rows.tobytes(), self._rows_crc)

    def report(self, more: Mapping[str, float], *, pause: float = 0.0) -> None:
        """Fetches what was collected, checks it, and reports means over the window.

        Args:
            more: values known on the host, reported as they are.
            pause: seconds since the last report that were not spent training.

        Raises:
            NonFiniteError: a step's loss, gradient or update is NaN or infinite.
        """
        if not self._window:
            return
        steps = [step for step, _ in self._window]
        values = jax.device_get([values for _, values in self._window])
        self._window.clear()
        self._check_finite(steps, values)
        now = time.perf_counter()
        seconds = max(now - self._reported_time - pause, 1e-9) / len(steps)
        self._reported_time = now
        self._reported_step = steps[-1]
        means = {
            key: float(np.mean([v[key] for v in values]))
            for key in values[0]
            if values[0][key].ndim == 0
        }
        rate = self._batch_size / seconds
        left = seconds * (self._total_steps - steps[-1])
        _logger.info(
            "step %d/%d  loss %.4f  accuracy %.3f  %.0f pairs/s  %s left",
            steps[-1], self._total_steps, means["loss"], means["accuracy"], rate,
            _duration(left),
        )  # fmt: skip
        self._write(
            steps[-1],
            {f"train/{key}": value for key, value in means.items()}
            | {"train/pairs_per_second": rate, "train/rows_crc32": self._rows_crc}
            | dict(more),
        )
        self._rows_crc = 0

    def evaluation(self, step: int, results: Mapping[str, float | None]) -> None:
        """Reports evaluation results; None stands for an undefined score."""
        if not results:
            return
        shown = "  ".join(
            f"{key} {'undefined' if value is None else format(value, '.2f')}"
            for key, value in results.items()
        )
        _logger.info("step %d/%d  %s", step, self._total_steps, shown)
        self._write(step, results)

    def _check_finite(self, steps: Sequence[int], values: Sequence[Mapping]) -> None:
        for step, step_values in zip(steps, values, strict=True):
            bad = [k for k in _MUST_BE_FINITE if not np.isfinite(step_values[k])]
            if not bad:
                continue
            norms = step_values["grad_norm_by_param"]
            where = [
                name
                for name, norm in zip(self._param_names, norms, strict=True)
                if not np.isfinite(norm)
            ]
            named = ", ".join(where[:5]) + (" ..." if len(where) > 5 else "")
            raise NonFiniteError(
                f"Step {step}: {bad[0]} is {step_values[bad[0]]}. Gradients that are "
                f"not finite: {named or 'none'}. Nothing was saved since; the last "
                "checkpoint is good. Try a lower learning rate, float32 activations "
                "(T5Config.dtype), or look at the batch of this step."
            )

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        metrics_file.append(self._path, step, values)
        scalars = {k: v for k, v in values.items() if v is not None}
        self._writer.write_scalars(step, scalars)


def log_to_console() -> None:
    """Shows this package's log lines, and only its, from INFO up on stderr."""
    logger = logging.getLogger("sentence_t5")
    for old in [h for h in logger.handlers if h.get_name() == _CONSOLE]:
        logger.removeHandler(old)  # of an earlier run in this process
    handler = logging.StreamHandler()
    handler.set_name(_CONSOLE)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # The root logger's handlers, which TensorFlow installs, would print lines twice.
    logger.propagate = False


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
