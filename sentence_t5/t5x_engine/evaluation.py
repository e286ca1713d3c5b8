"""STS during training under T5X: our examples and correlations, T5X's inference.

Stands where T5X puts a ``seqio.Evaluator``. The pairs are those that this package's own
trainer reads; their cosines come from the model's ``score_batch``, through the function
that T5X made for it.
"""

import concurrent.futures
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from clu import metric_writers
from etils import epath

from sentence_t5 import datasets, metrics_file, names
from sentence_t5.evals import sts
from sentence_t5.t5x_engine import data

_logger = logging.getLogger(__name__)


class StsEvaluator:
    """Scores one task of judged pairs.

    Attributes:
        eval_tasks: the task's name, alone.
    """

    def __init__(self, config: datasets.DatasetConfig, model_dir: str, vocab_size: int):
        """Loads the examples.

        Args:
            config: what to evaluate on.
            model_dir: where results are written.
            vocab_size: rows of the model's table.

        Raises:
            ValueError: the task has no scores.
        """
        self._examples = datasets.load_examples(config)
        datasets.check_token_ids(self._examples, vocab_size)
        self._gold = datasets.scores(self._examples)
        name = self._examples.task_name
        self.eval_tasks = [name]
        self._config = config
        self._metrics_file = epath.Path(model_dir) / metrics_file.NAME
        self._writer = None
        if jax.process_index() == 0:
            self._writer = metric_writers.SummaryWriter(
                os.path.join(model_dir, "inference_eval", name)
            )

    def evaluate(
        self, *, step: int, score_fn: Callable[..., Any], **_: Any
    ) -> tuple[concurrent.futures.Future, dict]:
        """Scores the pairs and reports the correlations, × 100.

        Args:
            step: updates done.
            score_fn: from an enumerated dataset to (index, cosine) pairs.

        Returns:
            A finished future of task -> metric -> value, and no outputs.
        """
        scored = score_fn(self._dataset().enumerate())
        cosines = np.array([cosine for _, cosine in sorted(scored)], np.float64)
        found = sts.correlate(cosines, self._gold)
        name = self.eval_tasks[0]
        results = {"spearman": found.spearman, "pearson": found.pearson}
        named = {f"sts/{name}/{key}": value for key, value in results.items()}
        _logger.info("step %d  %s", step, named)
        if self._writer is not None:
            metrics_file.append(self._metrics_file, step, named)
            defined = {k: v for k, v in named.items() if v is not None}
            self._writer.write_scalars(step, defined)
            self._writer.flush()
        done: concurrent.futures.Future = concurrent.futures.Future()
        done.set_result({name: results})
        return done, {}

    def close(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()

    def _dataset(self) -> tf.data.Dataset:
        """Returns the pairs, one by one; T5X batches, pads and shares them."""
        batches = list(datasets.eval_batches(self._config, self._examples))
        real = np.concatenate([batch[names.ROW_MASK] for batch in batches])
        features = [
            data.to_features(
                {key: batch[key] for key in (names.LEFT_TOKENS, names.RIGHT_TOKENS)}
            )
            for batch in batches
        ]
        return tf.data.Dataset.from_tensor_slices(
            {
                key: np.concatenate([part[key] for part in features])[real]
                for key in features[0]
            }
        )
