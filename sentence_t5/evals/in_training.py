"""Evaluation during training: an STS task by correlation, held-out pairs by loss.

Works on the training mesh, with the parameters where they are. Every row counts exactly
once, whatever the batch size: the last batch is padded and masked.
"""

import collections

import numpy as np

from sentence_t5 import datasets, names, steps
from sentence_t5.evals import sts


class _Evaluator:
    """Reads one dataset's examples for a trainer's mesh."""

    def __init__(self, trainer: steps.Trainer, config: datasets.DatasetConfig):
        """Loads the examples and checks that they fit the model and the mesh.

        Args:
            trainer: its steps and mesh are used.
            config: what to evaluate on; ``batch_size`` rows at a time.

        Raises:
            ValueError: they don't fit.
        """
        self._trainer = trainer
        self._config = config
        trainer.partitioner.check(trainer.model.encoder, config.batch_size)
        self._examples = datasets.load_examples(config)
        datasets.check_token_ids(self._examples, trainer.model.encoder.t5.vocab_size)
        self._batches()  # what it refuses is said now
        self.name = self._examples.task_name

    def _batches(self):
        return datasets.eval_batches(
            self._config, self._examples, **self._trainer.partitioner.host_share()
        )


class StsEvaluator(_Evaluator):
    """Compares cosines with a task's scores."""

    def __init__(self, trainer: steps.Trainer, config: datasets.DatasetConfig):
        """Loads the judged pairs; see ``_Evaluator``.

        Args:
            trainer: its steps and mesh are used.
            config: what to evaluate on.

        Raises:
            ValueError: the task has no scores, or doesn't fit.
        """
        super().__init__(trainer, config)
        self._gold = datasets.scores(self._examples)

    def __call__(self, params) -> dict[str, float | None]:
        """Returns the correlations of cosines with the task's scores, × 100.

        Args:
            params: the encoder's parameters, in their shards.

        Returns:
            ``sts/<task>/spearman`` and ``sts/<task>/pearson``; None where undefined.
        """
        sides = {names.LEFT_TOKENS: [], names.RIGHT_TOKENS: []}
        lengths_of = {
            names.LEFT_TOKENS: names.LEFT_INSTRUCTION_LENGTHS,
            names.RIGHT_TOKENS: names.RIGHT_INSTRUCTION_LENGTHS,
        }
        for batch in self._batches():
            wanted = [key for pair in lengths_of.items() for key in pair]
            on_mesh = self._trainer.partitioner.put_batch(
                {key: batch[key] for key in wanted if key in batch}
            )
            for key, embedded in sides.items():
                embedded.append(
                    self._trainer.encode_step(
                        params, on_mesh[key], on_mesh.get(lengths_of[key])
                    )
                )
        left, right = (
            np.concatenate([np.asarray(rows) for rows in batches])[: len(self._gold)]
            for batches in sides.values()
        )
        result = sts.correlate(sts.cosine(left, right), self._gold)
        return {
            f"sts/{self.name}/spearman": result.spearman,
            f"sts/{self.name}/pearson": result.pearson,
        }


class LossEvaluator(_Evaluator):
    """Averages the training loss over held-out pairs."""

    def __init__(
        self,
        trainer: steps.Trainer,
        config: datasets.DatasetConfig,
        max_batches: int,
    ):
        """Loads the pairs; see ``_Evaluator``.

        Args:
            trainer: its steps and mesh are used.
            config: what to evaluate on.
            max_batches: how many batches to look at; -1 for all.

        Raises:
            ValueError: they don't fit.
        """
        super().__init__(trainer, config)
        self._max_batches = max_batches

    def __call__(self, params) -> dict[str, float]:
        """Returns the training loss and its metrics on held-out pairs.

        The value depends on the batch size, as every in-batch loss does.

        Args:
            params: the encoder's parameters, in their shards.

        Returns:
            ``eval/<task>/<metric>``, averaged over rows.
        """
        sums, total = collections.Counter(), 0
        for i, batch in enumerate(self._batches()):
            if i == self._max_batches:
                break
            num_rows = min(
                self._config.batch_size,
                len(self._examples) - i * self._config.batch_size,
            )
            values = self._trainer.eval_step(
                params, self._trainer.partitioner.put_batch(batch)
            )
            total += num_rows
            for key, value in values.items():
                sums[key] += num_rows * float(value)
        return {f"eval/{self.name}/{key}": v / total for key, v in sums.items()}
