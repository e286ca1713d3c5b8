"""Training: ``train()``, and ``python -m sentence_t5.train --gin_file=...``.

    restore or start ─► for each step: batch ─► step ─► report? ─► evaluate? ─► save?

The order within a step is a contract: a checkpoint of step n holds n updates, comes
after the evaluation of step n, and is only written if every step up to n was finite.
The batch of a step is a pure function of the seed and the step, so that a checkpoint's
place in the data is its step.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from clu import parameter_overview

from sentence_t5 import (
    checkpoint_files,
    checkpoints,
    data_record,
    datasets,
    guides,
    partitioning,
    preflight,
    pretrained,
    reporting,
    steps,
)
from sentence_t5.evals import in_training

_logger = logging.getLogger(__name__)


class Preempted(SystemExit):
    """SIGTERM came; everything is saved. The process exits with 143, as if killed."""

    def __init__(self, step: int):
        super().__init__(143)
        self.step = step


def train(
    *,
    model: steps.Model,
    train_dataset_cfg: datasets.DatasetConfig,
    checkpoint_cfg: checkpoints.CheckpointConfig,
    partitioner: partitioning.Partitioner,
    model_dir: str,
    total_steps: int,
    trainer_cls: Callable[..., steps.Trainer] = steps.Trainer,
    train_eval_dataset_cfg: datasets.DatasetConfig | None = None,
    infer_eval_dataset_cfg: datasets.DatasetConfig | None = None,
    eval_steps: int = 20,
    eval_period: int = 1000,
    stats_period: int = 100,
    random_seed: int = 0,
    summarize_config_fn: Callable[..., None] | None = None,
) -> steps.TrainState:
    """Trains a sentence encoder, going on from ``model_dir`` if it was begun there.

    The parameters have T5X's names.

    Args:
        model: encoder, loss and optimizer.
        train_dataset_cfg: the pairs, and the global batch size.
        checkpoint_cfg: when to save, what to keep, and the weights to start from.
        partitioner: the mesh.
        model_dir: folder of checkpoints, metrics and the config; made if need be.
        total_steps: updates to do in all, counted from the start of this run (weights
            to start from don't count).
        trainer_cls: makes the steps from ``model`` and ``partitioner``.
        train_eval_dataset_cfg: held-out pairs whose loss is reported, or None.
        infer_eval_dataset_cfg: an STS task whose correlation is reported, or None.
        eval_steps: batches of ``train_eval_dataset_cfg`` to look at; -1 for all.
        eval_period: updates between evaluations.
        stats_period: updates between reports.
        random_seed: of the weights and the dropout.
        summarize_config_fn: called with ``model_dir`` to write the config beside the
            checkpoints.

    Returns:
        The final state.

    Raises:
        ValueError: data, model, mesh and checkpoints don't fit together.
        NonFiniteError: a loss, gradient or update is NaN; the last checkpoint is good.
        Preempted: SIGTERM came; this step was saved.
    """
    for name, value in (("eval_period", eval_period), ("stats_period", stats_period)):
        if value < 1:
            raise ValueError(f"train.{name}: got {value}, expected 1 or more.")
    checkpoint_files.check_engine(model_dir, is_t5x=False)
    partitioner.check(model.encoder, train_dataset_cfg.batch_size)
    trainer = trainer_cls(model=model, partitioner=partitioner)
    with preflight.together("loading the data"):
        examples = datasets.load_examples(train_dataset_cfg)
        datasets.check_token_ids(examples, model.encoder.t5.vocab_size)
        batches = datasets.make_batches(
            train_dataset_cfg,
            examples,
            **partitioner.host_share(),
            num_shards=partitioner.num_batch_shards,
            num_chunks=trainer.num_chunks(train_dataset_cfg.batch_size),
        )
        evaluate = _make_evaluate(
            trainer, train_eval_dataset_cfg, infer_eval_dataset_cfg, eval_steps
        )
        guide = guides.make_guide(
            model.loss.guide, partitioner, datasets.tokenizer(train_dataset_cfg)
        )
    preflight.check_same("training data", examples.fingerprint)
    preflight.check_shared(model_dir)
    data = data_record.describe(train_dataset_cfg, examples)
    with (
        checkpoints.Checkpointer(checkpoint_cfg, model_dir) as checkpointer,
        checkpoints.PreemptionGuard() as guard,
    ):
        _check_steps(checkpointer.latest_step(), total_steps, model_dir)
        checkpoints.write_description(
            model_dir,
            model.encoder,
            datasets.tokenizer(train_dataset_cfg),
            max(train_dataset_cfg.task_feature_lengths.values()),
        )
        if summarize_config_fn is not None:
            summarize_config_fn(model_dir)
        state, start = _restore_or_start(
            trainer, checkpointer, data, random_seed=random_seed
        )
        _log_overview(trainer, state, batches, train_dataset_cfg, total_steps)
        with (
            reporting.Reporter(
                model_dir,
                start_step=start,
                total_steps=total_steps,
                batch_size=train_dataset_cfg.batch_size,
                param_names=trainer.param_names,
            ) as reporter,
            datasets.prefetch(batches, start, partitioner.put_batch) as stream,
        ):

            def save(step, results):
                checkpointer.save(
                    step,
                    params=state.params,
                    train=_train_item(state),
                    meta={"step": step, "data": data},
                    metrics=_best_metric(checkpoint_cfg, results),
                )

            results = {}
            if start == 0 and checkpointer.latest_step() is None:
                results = evaluate(state.params)
                reporter.evaluation(0, results)
                save(0, results)
            compiled = {}
            pause = 0.0
            for step in range(start + 1, total_steps + 1):
                _, batch, rows = next(stream)
                batch = guide(batch)
                # One shape, but for packed batches that need more rows than most.
                shapes = tuple(array.shape for array in batch.values())
                if shapes not in compiled:
                    compiled[shapes], seconds = _compile(trainer, state, batch)
                    pause += seconds
                    if len(compiled) == 1:
                        reporter.start_clock()
                        pause = 0.0
                with jax.transfer_guard("disallow"):
                    state, values = compiled[shapes](state, batch)
                reporter.collect(step, values, rows)
                stop = guard.reached(step)
                last = step == total_steps or stop
                evaluating = not stop and (last or step % eval_period == 0)
                saving = last or checkpointer.should_save(step)
                if last or evaluating or saving or step % stats_period == 0:
                    rate = model.optimizer.learning_rate(step - 1)
                    reporter.report({"train/learning_rate": float(rate)}, pause=pause)
                    pause = 0.0
                began = time.perf_counter()
                if evaluating:
                    results = evaluate(state.params)
                    reporter.evaluation(step, results)
                if saving:
                    save(step, results if evaluating else {})
                pause += time.perf_counter() - began
                if stop:
                    checkpointer.wait()
                    _logger.warning("Step %d is saved; leaving on SIGTERM.", step)
                    raise Preempted(step)
    _logger.info("Done: %s", model_dir)
    return state


def _restore_or_start(
    trainer: steps.Trainer,
    checkpointer: checkpoints.Checkpointer,
    data: dict[str, Any],
    *,
    random_seed: int,
) -> tuple[steps.TrainState, int]:
    """Goes on from the newest checkpoint, or starts from given or fresh weights."""
    abstract = trainer.abstract_state
    restored = checkpointer.restore_latest(abstract.params, _train_item(abstract))
    if restored is not None:
        params, train_item, meta, step = restored
        data_record.check_same(meta["data"], data, checkpointer.directory)
        _logger.info("Resuming all state from step %d.", step)
        return steps.TrainState(params=params, **train_item), step
    config = checkpointer.config
    if config.restore_path is None:
        _logger.info("Starting from random weights, seed %d.", random_seed)
        return trainer.init_state(random_seed), 0
    params, report = pretrained.restore(
        config.restore_path,
        abstract.params,
        trainer.model.encoder,
        allow_missing=config.allow_missing,
        ignore=config.ignore,
        rng=jax.random.key(random_seed),
    )
    _logger.info("%s", report)
    _logger.info(
        "Starting from the weights of %s: step 0, fresh optimizer.", config.restore_path
    )
    return trainer.state_from_params(params, random_seed), 0


def _train_item(state: steps.TrainState) -> dict[str, Any]:
    """Returns what a checkpoint holds beside the parameters."""
    return {"step": state.step, "opt_state": state.opt_state, "rng": state.rng}


def _make_evaluate(
    trainer: steps.Trainer,
    loss_config: datasets.DatasetConfig | None,
    sts_config: datasets.DatasetConfig | None,
    loss_batches: int,
) -> Callable[[Any], dict[str, float | None]]:
    """Returns a function from parameters to results by name; loads the data now."""
    parts = []
    if loss_config is not None:
        pairs = in_training.Evaluator(trainer, loss_config)
        parts.append(lambda params: pairs.loss(params, loss_batches))
    if sts_config is not None:
        judged = in_training.Evaluator(trainer, sts_config)
        parts.append(judged.sts)

    def evaluate(params):
        results = {}
        for part in parts:
            results |= part(params)
        return results

    return evaluate


def _compile(trainer: steps.Trainer, state: steps.TrainState, batch: steps.Batch):
    """Compiles the train step for these shapes; returns it and the seconds it took."""
    began = time.perf_counter()
    compiled = trainer.train_step.lower(state, batch).compile()
    seconds = time.perf_counter() - began
    _logger.info("Compiled the step in %.1f s.", seconds)
    return compiled, seconds


def _best_metric(
    config: checkpoints.CheckpointConfig, results: dict[str, float | None]
) -> dict[str, float] | None:
    """Picks the metric that checkpoints are kept by, where it is known and defined."""
    value = results.get(config.best_metric)
    return None if value is None else {config.best_metric: value}


def _check_steps(latest: int | None, total_steps: int, model_dir: str) -> None:
    if total_steps < 0 or (latest is not None and latest > total_steps):
        raise ValueError(
            f"total_steps is {total_steps}, but {model_dir} has {latest or 0} steps "
            "already. Raise total_steps (--train_steps), or use another model_dir."
        )
    if latest == total_steps and latest:
        _logger.warning(
            "%s has all %d steps already: nothing is left to train.",
            model_dir, total_steps,
        )  # fmt: skip


def _log_overview(
    trainer: steps.Trainer,
    state: steps.TrainState,
    batches,
    config: datasets.DatasetConfig,
    total_steps: int,
) -> None:
    """Says once what is about to run, in numbers."""
    mesh = dict(trainer.partitioner.mesh.shape)
    _logger.info(
        "%s parameters, mesh %s on %d %s devices, hosts %d.",
        f"{parameter_overview.count_parameters(state.params):,}",
        mesh, jax.device_count(), jax.devices()[0].platform, jax.process_count(),
    )  # fmt: skip
    _logger.info(
        "Global batch %d pairs: each left side is told apart from %d other right sides "
        "and %d hard negatives. %d steps, %d to an epoch. Truncated texts: %s.",
        config.batch_size,
        0 if trainer.model.loss.own_right_only else config.batch_size - 1,
        config.batch_size * config.num_negatives,
        total_steps, batches.steps_per_epoch, dict(batches.num_truncated),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as a command line says; see ``gin_files.main``."""
    from sentence_t5 import gin_files, host_memory

    host_memory.keep_freed_memory()
    reporting.log_to_console()
    return gin_files.main(argv, command="train")


if __name__ == "__main__":
    # Under its import name: gin knows functions by the module they live in.
    from sentence_t5 import train as this_module

    sys.exit(this_module.main())
