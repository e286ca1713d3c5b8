"""The loop of a training run.

    for each step: batch ─► step ─► report? ─► evaluate? ─► save?

The order within a step is a contract: a checkpoint of step n holds n updates, comes
after the evaluation of step n, and is only written if every step up to n was finite.
Between reports nothing is read from the devices.
"""

import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from sentence_t5 import checkpoints, reporting, steps

_logger = logging.getLogger(__name__)

Results = dict[str, float | None]


class Preempted(SystemExit):
    """SIGTERM came; everything is saved. The process exits with 143, as if killed."""

    def __init__(self, step: int):
        super().__init__(143)
        self.step = step


class CompiledSteps:
    """The train step, compiled once for each shape of batch.

    Compiling is done in a thread, so that the state is made or restored meanwhile.
    """

    def __init__(self, trainer: steps.Trainer):
        """Compiles nothing yet.

        Args:
            trainer: has the step.
        """
        self._trainer = trainer
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compile")
        self._compiled: dict[tuple, concurrent.futures.Future] = {}

    def __enter__(self) -> "CompiledSteps":
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, batch: steps.Batch) -> concurrent.futures.Future:
        """Begins to compile the step, if it isn't for batches of these shapes yet.

        Args:
            batch: global arrays, or their shapes and dtypes.

        Returns:
            What will be the compiled step, from state and batch to state and metrics.
        """
        shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if shapes not in self._compiled:
            self._compiled[shapes] = self._thread.submit(self._compile, batch)
        return self._compiled[shapes]

    def _compile(self, batch: steps.Batch) -> Callable:
        began = time.perf_counter()
        lowered = self._trainer.train_step.lower(self._trainer.abstract_state, batch)
        compiled = lowered.compile()
        _logger.info("Compiled the step in %.1f s.", time.perf_counter() - began)
        return compiled


@dataclasses.dataclass
class Loop:
    """A run under way.

    Attributes:
        trainer: made the steps.
        compiled: the steps, compiled.
        state: what the steps change.
        checkpointer: saves.
        reporter: reports.
        guard: sees SIGTERM.
        evaluate: parameters → results by name.
        guide: adds a guide's vectors to a batch.
        data: what a checkpoint says of the data.
        total_steps: the last step.
        eval_period: steps between evaluations.
        stats_period: steps between reports.
        profiler: traces some steps.
    """

    trainer: steps.Trainer
    compiled: CompiledSteps
    state: steps.TrainState
    checkpointer: checkpoints.Checkpointer
    reporter: reporting.Reporter
    guard: checkpoints.PreemptionGuard
    evaluate: Callable[[Any], Results]
    guide: Callable[[steps.Batch], steps.Batch]
    data: dict[str, Any]
    total_steps: int
    eval_period: int
    stats_period: int
    profiler: "Profiler"

    def __post_init__(self):
        self._pause = 0.0  # seconds since the last report that weren't training

    def begin(self) -> None:
        """Evaluates and saves the untrained model."""
        results = self.evaluate(self.state.params)
        self.reporter.evaluation(0, results)
        self._save(0, results)

    def run(self, stream: Iterable[tuple[int, steps.Batch, np.ndarray]]) -> None:
        """Trains to the last step.

        Args:
            stream: for each step, the first at most the last: updates done before,
                batch, row ids.

        Raises:
            NonFiniteError: a loss, gradient or update is NaN.
            Preempted: SIGTERM came; this step was saved.
        """
        self.reporter.start_clock()
        for done, batch, rows in stream:
            step = done + 1
            with self.profiler.around(step):
                values = self._step(self.guide(batch))
                self.profiler.wait_for(step, values)
            self.reporter.collect(step, values, rows)
            stop = self.guard.reached(step)
            self._after(step, stop)
            if stop:
                self.checkpointer.wait()
                _logger.warning("Step %d is saved; leaving on SIGTERM.", step)
                raise Preempted(step)
            if step == self.total_steps:
                return

    def _step(self, batch: steps.Batch) -> steps.Metrics:
        # One shape, but for packed batches that need more rows than most.
        began = time.perf_counter()
        compiled = self.compiled.begin(batch).result()
        self._pause += time.perf_counter() - began
        with jax.transfer_guard("disallow"):
            self.state, values = compiled(self.state, batch)
        return values

    def _after(self, step: int, stop: bool) -> None:
        """Reports, evaluates and saves, where it is time to."""
        last = step == self.total_steps or stop
        evaluating = not stop and (last or step % self.eval_period == 0)
        saving = last or self.checkpointer.should_save(step)
        if last or evaluating or saving or step % self.stats_period == 0:
            rate = self.trainer.model.optimizer.learning_rate(step - 1)
            more = {"train/learning_rate": float(rate)}
            self.reporter.report(more, pause=self._pause)
            self._pause = 0.0
        began = time.perf_counter()
        results: Results = {}
        if evaluating:
            results = self.evaluate(self.state.params)
            self.reporter.evaluation(step, results)
        if saving:
            self._save(step, results)
        self._pause += time.perf_counter() - began

    def _save(self, step: int, results: Results) -> None:
        name = self.checkpointer.config.best_metric
        best = results.get(name)
        self.checkpointer.save(
            step,
            params=self.state.params,
            train=train_item(self.state),
            meta={"step": step, "data": self.data},
            metrics=None if best is None else {name: best},
        )


class Profiler:
    """Traces some steps for TensorBoard's profile page."""

    def __init__(self, folder: str, first_and_last: tuple[int, int] | None):
        """Traces nothing yet.

        Args:
            folder: where the trace goes.
            first_and_last: the steps to trace; None for none.

        Raises:
            ValueError: they aren't two steps in order.
        """
        self._folder = folder
        self._steps = range(0)
        if first_and_last is not None:
            first, last = first_and_last
            if not 1 <= first <= last:
                raise ValueError(
                    f"train.profile_steps: got {first_and_last}, expected the first "
                    "and the last step to trace, such as (10, 12)."
                )
            self._steps = range(first, last + 1)
        self._active = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def around(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Starts tracing, if it is time to; returns the step's mark in the trace."""
        if step in self._steps and not self._active:
            jax.profiler.start_trace(self._folder)
            self._active = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def wait_for(self, step: int, values: steps.Metrics) -> None:
        """Ends the trace after its last step, once that is done."""
        if self._active and step + 1 not in self._steps:
            jax.block_until_ready(values)
            self._stop()

    def _stop(self) -> None:
        if self._active:
            jax.profiler.stop_trace()
            self._active = False
            _logger.info("Traced steps: tensorboard --logdir=%s", self._folder)


def train_item(state: steps.TrainState) -> dict[str, Any]:
    """Returns what a checkpoint holds beside the parameters."""
    return {"step": state.step, "opt_state": state.opt_state, "rng": state.rng}
