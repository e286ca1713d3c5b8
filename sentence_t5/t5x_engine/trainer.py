"""T5X's Trainer, with our optimizer's schedule and lines in metrics.jsonl too.

T5X's own gradient accumulation is refused: it computes the loss of each microbatch by
itself, so that a pair would be told apart from the pairs of its microbatch only.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from clu import values as clu_values
from etils import epath
from t5x import trainer as t5x_trainer
from t5x import utils

from sentence_t5 import metrics_file, reporting
from sentence_t5.t5x_engine import model as model_lib
from sentence_t5.t5x_engine import partitioner as partitioner_lib


class Trainer(t5x_trainer.Trainer):
    """Runs the steps of one model on one mesh."""

    def __init__(
        self,
        model: model_lib.Model,
        train_state: Any,
        partitioner: partitioner_lib.Partitioner,
        eval_names: Any,
        summary_dir: str,
        train_state_axes: Any,
        rng: jax.Array,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
    ):
        """Takes what T5X's ``train`` made.

        Args:
            model: what to train.
            train_state: its state.
            partitioner: where to.
            eval_names: names of the held-out sets.
            summary_dir: the run's folder.
            train_state_axes: PartitionSpecs like the state.
            rng: from which each step's dropout key is folded.
            microbatch_size: must be None.
            num_microbatches: must be None or 1.

        Raises:
            ValueError: microbatches are asked for.
        """
        check_microbatches(microbatch_size, num_microbatches)
        super().__init__(
            model=model,
            train_state=train_state,
            partitioner=partitioner,
            eval_names=eval_names,
            summary_dir=summary_dir,
            train_state_axes=train_state_axes,
            rng=rng,
            learning_rate_fn=model.optimizer.learning_rate,
            num_microbatches=None,
        )
        self._metrics_file = epath.Path(summary_dir) / metrics_file.NAME
        self._last: _Summary | None = None
        if jax.process_index() == 0:
            step = int(utils.get_local_data(train_state.step))
            metrics_file.keep_until(self._metrics_file, step)

    def train(
        self, batch_iter: Any, num_steps: int, start_step: int | None = None
    ) -> "_Summary":
        """Trains some steps; their metrics are reported once they are there.

        Raises:
            NonFiniteError: the loss of the steps before was NaN or infinite.
        """
        if self._last is not None and self._last.done():
            self._last.result()
        future = super().train(batch_iter, num_steps, start_step)
        step = start_step + num_steps if start_step is not None else None

        def report(done):
            if step is not None and done.exception() is None:
                self._write(step, "train/", done.result())

        future.add_done_callback(report)
        self._last = _Summary(future, step)
        return self._last

    def eval(self, batch_iters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Evaluates held-out pairs."""
        summaries = super().eval(batch_iters)
        step = int(utils.get_local_data(self.train_state.step))
        for name, summary in summaries.items():
            self._write(step, f"eval/{name}/", summary)
        return summaries

    def _write(self, step: int, prefix: str, summary: Mapping[str, Any]) -> None:
        if jax.process_index() == 0:
            scalars = {
                f"{prefix}{key}": float(value.value)
                for key, value in summary.items()
                if isinstance(value, clu_values.Scalar)
            }
            metrics_file.append(self._metrics_file, step, scalars)


class _Summary:
    """A future of metrics, which T5X waits for before it saves.

    A loss that is not finite is an error then, so that no checkpoint is made of it.
    """

    def __init__(self, future: Any, step: int | None):
        self._future = future
        self._step = step

    def done(self) -> bool:
        """Whether the metrics are there."""
        return self._future.done()

    def result(self) -> Mapping[str, Any]:
        """Waits for the metrics.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        summary = self._future.result()
        loss = float(summary["loss"].value)
        if not math.isfinite(loss):
            raise reporting.NonFiniteError(
                f"The loss of the steps up to {self._step} is {loss}. Nothing was "
                "saved since; the last checkpoint is good. Try a lower learning rate "
                "or float32 activations (T5Config.dtype)."
            )
        return summary


def check_microbatches(microbatch_size: int | None, num: int | None) -> None:
    """Refuses to split the batch.

    Raises:
        ValueError: it is asked for; the message says why not.
    """
    if num is not None and num > 1:
        raise ValueError(
            f"engine.trainer.num_microbatches is {num}, expected 1: a pair is told "
            f"apart from the other pairs of its batch, which would be {num} times "
            "fewer in a microbatch, so that loss and gradients would be others. Leave "
            "it out. A batch that doesn't fit into memory is encoded in parts, with "
            "exact gradients, by `python -m sentence_t5.train "
            "--gin.engine.trainer.microbatch_size=...`."
        )
    if microbatch_size is not None:
        raise ValueError(
            f"engine.trainer.microbatch_size is {microbatch_size}, which only `python "
            "-m sentence_t5.train` has, with the same gin file. Under T5X, leave it "
            "out: use more devices, a smaller batch, or T5Config.remat='full'."
        )
