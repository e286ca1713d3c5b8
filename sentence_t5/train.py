"""Training: ``train()``, and ``python -m sentence_t5.train --gin_file=...``.

    data, model, mesh ─► restore or start ─► training_loop

The batch of a step is a pure function of the seed and the step, so that a checkpoint's
place in the data is its step.
"""

import sys

if __name__ == "__main__":
    # As `sentence-t5 train`, under the import name: gin knows functions by the module
    # they live in.
    from sentence_t5 import cli

    sys.exit(cli.main(["train", *sys.argv[1:]]))

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sentence_t5 import (
    batching,
    checkpoint_files,
    checkpoints,
    data_record,
    datasets,
    guides,
    options,
    packing,
    partitioning,
    preflight,
    pretrained,
    reporting,
    steps,
    training_loop,
)
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.evals import in_training

_logger = logging.getLogger(__name__)


Preempted = training_loop.Preempted


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
    profile_steps: tuple[int, int] | None = None,
    compilation_cache_dir: str | None = None,
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
        profile_steps: the first and the last step to trace for TensorBoard's profile
            page, or None.
        compilation_cache_dir: where compiled programs are kept, so that the next start
            needn't compile them; None keeps none.

    Returns:
        The final state.

    Raises:
        ValueError: data, model, mesh and checkpoints don't fit together.
        NonFiniteError: a loss, gradient or update is NaN; the last checkpoint is good.
        Preempted: SIGTERM came; this step was saved.
    """
    for name, value in (("eval_period", eval_period), ("stats_period", stats_period)):
        options.check_positive(f"train.{name}", value)
    profiler = training_loop.Profiler(model_dir, profile_steps)
    keep_compiled(compilation_cache_dir)
    checkpoint_files.check_engine(model_dir, is_t5x=False)
    partitioner.check(model.encoder, train_dataset_cfg.batch_size)
    trainer = trainer_cls(model=model, partitioner=partitioner)
    _check_start(checkpoint_cfg, model_dir, train_dataset_cfg)
    data = _load_data(
        trainer,
        train_dataset_cfg,
        train_eval_dataset_cfg,
        infer_eval_dataset_cfg,
        eval_steps,
    )
    preflight.check_shared(model_dir)
    with (
        checkpoints.Checkpointer(checkpoint_cfg, model_dir) as checkpointer,
        checkpoints.PreemptionGuard() as guard,
        training_loop.CompiledSteps(trainer) as compiled,
    ):
        latest = checkpointer.latest_step()
        _check_steps(latest, total_steps, model_dir)
        if latest is not None:
            _check_same_run(trainer, checkpointer, data, model_dir)
        checkpoints.write_description(
            model_dir,
            model.encoder,
            data.tokenizer,
            max(train_dataset_cfg.task_feature_lengths.values()),
        )
        if summarize_config_fn is not None:
            summarize_config_fn(model_dir)
        if (latest or 0) < total_steps:
            first, _ = data.batches.batch(latest or 0)
            compiled.begin(jax.eval_shape(data.guide, partitioner.put_batch(first)))
        state, start = _restore_or_start(trainer, checkpointer, random_seed)
        _log_overview(trainer, state, data.batches, train_dataset_cfg, total_steps)
        with (
            reporting.Reporter(
                model_dir,
                start_step=start,
                total_steps=total_steps,
                batch_size=train_dataset_cfg.batch_size,
                param_names=trainer.param_names,
            ) as reporter,
            datasets.prefetch(data.batches, start, partitioner.put_batch) as stream,
            profiler,
        ):
            loop = training_loop.Loop(
                trainer,
                compiled,
                state,
                checkpointer,
                reporter,
                guard,
                data.evaluate,
                data.guide,
                data.record,
                total_steps=total_steps,
                eval_period=eval_period,
                stats_period=stats_period,
                profiler=profiler,
            )
            del state  # donated to the first step
            if start == 0 and checkpointer.latest_step() is None:
                loop.begin()
            if start < total_steps:
                loop.run(stream)
    _logger.info("Done: %s", model_dir)
    return loop.state


def keep_compiled(folder: str | None) -> None:
    """Keeps compiled programs in a folder, for this and later processes."""
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _check_start(
    config: checkpoints.CheckpointConfig,
    model_dir: str,
    dataset_config: datasets.DatasetConfig,
) -> None:
    """Finds the weights to start from, before hours go into tokenizing."""
    with preflight.together("looking for the weights to start from"):
        saved = checkpoint_files.absolute(model_dir) / checkpoint_files.CHECKPOINTS_DIR
        if config.restore_path is None or checkpoint_files.list_steps(saved):
            return
        tokenizer = datasets.tokenizer(dataset_config)
        pretrained.check_vocabulary(config.restore_path, tokenizer, config.ignore)


@dataclasses.dataclass(frozen=True)
class _Data:
    """What a run reads, and what it does with it.

    Attributes:
        batches: the training batches, by step.
        record: what a checkpoint says of them.
        tokenizer: their vocabulary.
        guide: adds a guide's vectors to a batch.
        evaluate: parameters → results by name.
    """

    batches: batching.TrainBatches | packing.PackedBatches
    record: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer
    guide: Callable[[steps.Batch], steps.Batch]
    evaluate: Callable[[Any], training_loop.Results]


def _load_data(
    trainer: steps.Trainer,
    config: datasets.DatasetConfig,
    loss_config: datasets.DatasetConfig | None,
    sts_config: datasets.DatasetConfig | None,
    loss_batches: int,
) -> _Data:
    """Loads all data, on all hosts or on none, and checks that they have the same."""
    partitioner = trainer.partitioner
    with preflight.together("loading the data"):
        examples = datasets.load_examples(config)
        datasets.check_token_ids(examples, trainer.model.encoder.t5.vocab_size)
        tokenizer = datasets.tokenizer(config)
        guides.check_guide(trainer.model.loss.guide, tokenizer)
        batches = datasets.make_batches(
            config,
            examples,
            **partitioner.host_share(),
            num_shards=partitioner.num_batch_shards,
            num_chunks=trainer.num_chunks(config.batch_size),
        )
        record = data_record.describe(config, examples)
        evaluate = _make_evaluate(trainer, loss_config, sts_config, loss_batches)
    preflight.check_same("training data", examples.fingerprint)
    guide = guides.make_guide(trainer.model.loss.guide, partitioner)
    return _Data(batches, record, tokenizer, guide, evaluate)


def _check_same_run(
    trainer: steps.Trainer,
    checkpointer: checkpoints.Checkpointer,
    data: _Data,
    model_dir: str,
) -> None:
    """Refuses to go on with another model, optimizer or data, before any is lost."""
    checkpoints.check_same_encoder(model_dir, trainer.model.encoder, data.tokenizer)
    abstract = trainer.abstract_state
    meta = checkpointer.check_latest(
        abstract.params, training_loop.train_item(abstract)
    )
    if meta is not None:
        data_record.check_same(meta["data"], data.record, checkpointer.directory)


def _restore_or_start(
    trainer: steps.Trainer, checkpointer: checkpoints.Checkpointer, random_seed: int
) -> tuple[steps.TrainState, int]:
    """Goes on from the newest checkpoint, or starts from given or fresh weights."""
    abstract = trainer.abstract_state
    restored = checkpointer.restore_latest(
        abstract.params, training_loop.train_item(abstract)
    )
    if restored is not None:
        params, train_item, _, step = restored
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


def _make_evaluate(
    trainer: steps.Trainer,
    loss_config: datasets.DatasetConfig | None,
    sts_config: datasets.DatasetConfig | None,
    loss_batches: int,
) -> Callable[[Any], training_loop.Results]:
    """Returns a function from parameters to results by name; loads the data now."""
    parts = []
    if loss_config is not None:
        parts.append(in_training.LossEvaluator(trainer, loss_config, loss_batches))
    if sts_config is not None:
        parts.append(in_training.StsEvaluator(trainer, sts_config))

    def evaluate(params):
        results = {}
        for part in parts:
            results |= part(params)
        return results

    return evaluate


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
        f"{sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}",
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
