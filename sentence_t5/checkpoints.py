"""Checkpoints: parameters, training state and meta data, saved and restored.

Each step has three items: ``params``, which is all that inference reads; ``train``
(optimizer state, step, random key); and ``meta``, JSON such as the place in the data.
Saves run in the background; ``close`` (or leaving the ``with`` block) waits until they
are committed and raises what went wrong in them.

Long because all that runs need of Orbax is here; imported weights alone are written by
``pretrained.writing``.
"""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from sentence_t5 import checkpoint_files as files
from sentence_t5.descriptions import (
    Description,
    check_same_encoder,
    read_description,
    write_description,
)
from sentence_t5.preemption import PreemptionGuard

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Description",
    "PreemptionGuard",
    "check_same_encoder",
    "check_tree",
    "load_params",
    "read_description",
    "write_description",
]

_logger = logging.getLogger(__name__)

# Statuses that mean trouble with the machine or the store; they condemn no checkpoint.
_TROUBLE = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
)

PyTree = Any


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep.

    The checkpoint of step 0 is always kept, and so is the one named by
    ``restore_path`` if it lies in the same folder.

    Attributes:
        save_period: steps between saves.
        keep: number of newest checkpoints to keep; None keeps all.
        keep_period: checkpoints whose step is a multiple of this are kept as well.
        keep_best: number of checkpoints with the best ``best_metric`` to keep as well.
        best_metric: name of the metric, as ``save`` gets it.
        best_mode: whether ``max`` or ``min`` is best.
        restore_path: checkpoint whose weights a new run starts from, in any format
            that ``pretrained`` reads.
        allow_missing: patterns of parameters that may start fresh where
            ``restore_path`` lacks them (``projection/.*`` for a raw T5).
        ignore: patterns of tensors of ``restore_path`` to leave out (``decoder/.*``).
    """

    save_period: int = 1000
    keep: int | None = 3
    keep_period: int | None = None
    keep_best: int = 0
    best_metric: str | None = None
    best_mode: str = "max"
    restore_path: str | None = None
    allow_missing: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        """Checks the fields against each other.

        Raises:
            ValueError: a period or count out of range, or ``keep_best`` without metric.
        """
        for name in ("save_period", "keep", "keep_period"):
            value = getattr(self, name)
            if value is None and name != "save_period":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"CheckpointConfig.{name}: got {value!r}, expected 1 or more."
                )
        if self.keep_best < 0 or (self.keep_best and not self.best_metric):
            raise ValueError(
                f"CheckpointConfig.keep_best is {self.keep_best} and best_metric "
                f"{self.best_metric!r}: expected 0 or more, and a metric's name if any."
            )
        if self.best_mode not in ("max", "min"):
            raise ValueError(
                f"CheckpointConfig.best_mode: got {self.best_mode!r}, expected 'max' "
                "or 'min'."
            )


class Checkpointer:
    """Saves and restores the checkpoints of one model_dir.

    One trainer at a time may use a model_dir; readers use ``load_params``. With several
    processes, all of them must make the same calls.
    """

    def __init__(self, config: CheckpointConfig, model_dir: str | os.PathLike):
        """Opens ``model_dir/checkpoints``, clearing away what a killed save left.

        Args:
            config: when to save and what to keep.
            model_dir: the run's folder; made if need be.

        Raises:
            ValueError: there are checkpoints, but none of them is whole.
        """
        self.config = config
        self.directory = files.absolute(model_dir) / files.CHECKPOINTS_DIR
        self._saving: int | None = None
        self._clear_away()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_KeepRules(config, _protected(config, self)),
                # With a best_fn the manager stores the metrics that rules look at.
                best_fn=(lambda metrics: 0.0) if config.best_metric else None,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._log_commit
                ),
            ),
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        try:
            self.close()
        except Exception:
            if exc is None:
                raise
            _logger.exception("A save failed while the run was ending with an error.")

    def all_steps(self) -> list[int]:
        """Returns the saved steps, ascending, the one being saved included."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the newest saved step, or None."""
        return max(self.all_steps(), default=None)

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is due for saving and not saved yet."""
        return step % self.config.save_period == 0 and step not in self.all_steps()

    def save(
        self,
        step: int,
        *,
        params: PyTree,
        train: PyTree,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving a step; waits first for the save before it.

        The arrays are copied before this returns, so they may be donated next.

        Args:
            step: number of updates made, larger than any saved step.
            params: the model's parameters.
            train: optimizer state, random key and whatever else a resumed run needs.
            meta: JSON-able values, such as the position in the data.
            metrics: evaluation results of this very step, for ``keep_best``.

        Raises:
            ValueError: the step is saved already, or a later one is; ``metrics``
                without ``best_metric``.
            RuntimeError: this or the previous save failed.
        """
        metrics = self._check_metrics(step, metrics)
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"Step {step} can't be saved: {self.directory} has step {latest} "
                "already. Use another model_dir for another run."
            )
        self._saving = step
        try:
            # The decision to save is the caller's: Orbax's own is off with force.
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    train=ocp.args.StandardSave(train),
                    meta=ocp.args.JsonSave(dict(meta)),
                ),
                metrics=metrics,
                force=True,
            )
        except Exception as error:
            raise RuntimeError(self._failure(error)) from error
        if not saved:
            raise RuntimeError(self._failure("Orbax refused the step"))

    def wait(self) -> None:
        """Blocks until the save under way is committed.

        Raises:
            RuntimeError: it failed.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise RuntimeError(self._failure(error)) from error

    def close(self) -> None:
        """Commits the save under way and ends the writer's threads.

        Raises:
            RuntimeError: the save failed.
        """
        try:
            self.wait()
        except RuntimeError:
            try:
                self._manager.close()
            except Exception as error:
                _logger.debug("The writer could not be closed either: %s", error)
            raise
        self._manager.close()

    def restore_latest(
        self, abstract_params: PyTree, abstract_train: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Any], int] | None:
        """Restores the newest checkpoint that can be read.

        Damaged ones are passed over with a warning and set aside under another name; a
        checkpoint of another model is an error. Damage is what can't be read: Orbax
        keeps no checksums of the numbers, so that flipped bits within them are read.

        Args:
            abstract_params: ``jax.ShapeDtypeStruct`` leaves, with the shardings wanted.
            abstract_train: the same for the training state.

        Returns:
            params, train, meta and the step; None if nothing was ever saved.

        Raises:
            ValueError: names, shapes or dtypes differ, or no checkpoint can be read.
        """
        self.wait()
        passed_over = []
        for step in reversed(self.all_steps()):
            step_dir = self.directory / str(step)
            try:
                restored = self._restore(step_dir, abstract_params, abstract_train)
            except _DamagedError as error:
                passed_over.append((step_dir, str(error)))
                continue
            self._set_aside(passed_over, step)
            return (*restored, step)
        if passed_over:
            raise ValueError(_none_whole(self.directory, passed_over))
        return None

    def check_latest(
        self, abstract_params: PyTree, abstract_train: PyTree
    ) -> dict[str, Any] | None:
        """Checks the newest checkpoint before anything is written; reads no arrays.

        Args:
            abstract_params: as of ``restore_latest``.
            abstract_train: as of ``restore_latest``.

        Returns:
            Its meta; None if nothing was ever saved, or nothing can be read, which
            ``restore_latest`` reports.

        Raises:
            ValueError: names, shapes or dtypes differ.
        """
        for step in reversed(self.all_steps()):
            try:
                step_dir = self.directory / str(step)
                self._check(step_dir, abstract_params, abstract_train)
                return _restore_items(step_dir, meta=ocp.args.JsonRestore()).meta
            except _DamagedError:
                continue
        return None

    def _check(self, step_dir, abstract_params, abstract_train) -> None:
        """Compares one step's trees with those wanted; reads no arrays."""
        wanted = {files.PARAMS: abstract_params, files.TRAIN: abstract_train}
        stored = _read_together(
            lambda: {item: _stored_tree(step_dir / item) for item in wanted}
        )
        for item, tree in wanted.items():
            check_tree(step_dir / item, stored[item], tree)

    def _restore(self, step_dir, abstract_params, abstract_train):
        """Restores one step; raises _DamagedError on all processes if one can't."""
        self._check(step_dir, abstract_params, abstract_train)
        restored = _restore_items(
            step_dir,
            params=ocp.args.StandardRestore(abstract_params),
            train=ocp.args.StandardRestore(abstract_train),
            meta=ocp.args.JsonRestore(),
        )
        return restored.params, restored.train, restored.meta

    def _clear_away(self) -> None:
        """Removes interrupted saves and sets folders aside that are not checkpoints."""
        steps = files.list_steps(self.directory)[::-1]
        found = {step: files.problem(self.directory / str(step)) for step in steps}
        broken = [(self.directory / str(s), why) for s, why in found.items() if why]
        unfinished = files.list_unfinished(self.directory)
        if steps and len(broken) == len(steps):
            raise ValueError(_none_whole(self.directory, broken))
        _barrier("sentence_t5:checkpoints_inspected")
        for path in unfinished:
            _logger.warning(
                "Passing over %s: its save was interrupted. Removing it.", path
            )
            if jax.process_index() == 0:
                path.rmtree()
        self._rename(broken)
        _barrier("sentence_t5:checkpoints_cleared")

    def _set_aside(self, broken: Sequence[tuple[epath.Path, str]], step: int) -> None:
        """Renames damaged checkpoints after an older one was restored."""
        if not broken:
            return
        _barrier("sentence_t5:checkpoint_restored")
        self._rename(broken)
        _logger.warning("Going on from step %d.", step)
        _barrier("sentence_t5:checkpoints_set_aside")
        self._manager.reload()

    def _rename(self, broken: Sequence[tuple[epath.Path, str]]) -> None:
        for step_dir, reason in broken:
            _logger.warning(
                "Passing over the checkpoint %s: %s. Setting it aside as %s.broken.",
                step_dir,
                reason,
                step_dir.name,
            )
            if jax.process_index() == 0:
                files.set_aside(step_dir)

    def _check_metrics(
        self, step: int, metrics: Mapping[str, float] | None
    ) -> dict[str, float] | None:
        """Checks that the metric the rules look at is there."""
        name = self.config.best_metric
        if metrics is None or name is None:
            return None
        if name not in metrics:
            raise ValueError(
                f"CheckpointConfig.best_metric is {name!r}, but step {step} has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}."
            )
        return {key: float(value) for key, value in metrics.items()}

    def _failure(self, reason: object) -> str:
        # The manager has already forgotten what it would have deleted next.
        whole = [
            step
            for step in files.list_steps(self.directory)
            if files.problem(self.directory / str(step)) is None
        ]
        last = f"the last good one is step {max(whole)}" if whole else "none is saved"
        return (
            f"Saving checkpoint {self._saving} in {self.directory} failed ({last}): "
            f"{reason}"
        )

    def _log_commit(self) -> None:
        _logger.info("Committed checkpoint %s in %s.", self._saving, self.directory)


@dataclasses.dataclass(frozen=True)
class _KeepRules:
    """Orbax's preservation policy: a checkpoint stays if any rule keeps it."""

    config: CheckpointConfig
    protected: frozenset[int]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Returns one flag per checkpoint, in the order given."""
        del context
        cfg = self.config
        steps = [info.step for info in checkpoints]
        kept = set(steps if cfg.keep is None else sorted(steps)[-cfg.keep :])
        kept |= self.protected
        if cfg.keep_period:
            kept |= {step for step in steps if step % cfg.keep_period == 0}
        if cfg.keep_best:
            scores = {
                info.step: info.metrics[cfg.best_metric]
                for info in checkpoints
                if info.metrics and cfg.best_metric in info.metrics
            }
            sign = 1 if cfg.best_mode == "max" else -1
            ranked = sorted(
                (step for step, score in scores.items() if math.isfinite(score)),
                key=lambda step: (-sign * scores[step], step),
            )
            kept |= set(ranked[: cfg.keep_best])
        return [step in kept for step in steps]


def _protected(config: CheckpointConfig, checkpointer: Checkpointer) -> frozenset[int]:
    """Returns the steps that are never deleted: the initial checkpoint's."""
    protected = {0}
    if config.restore_path:
        path = files.absolute(config.restore_path)
        for folder in (path, path.parent):
            if folder.parent == checkpointer.directory and folder.name.isdigit():
                protected.add(int(folder.name))
    return frozenset(protected)


def load_params(
    path: str | os.PathLike,
    step: int | None = None,
    shardings: PyTree | None = None,
    expected: PyTree | None = None,
) -> tuple[PyTree, int | None]:
    """Reads parameters alone, onto any mesh or none.

    Args:
        path: a model_dir, its ``checkpoints`` folder, one step's folder or its
            ``params`` item.
        step: which step of a model_dir; the newest by default.
        shardings: a tree of shardings like the parameters, to read each device's part
            straight into place; None gives numpy arrays.
        expected: ``jax.ShapeDtypeStruct`` leaves that names, shapes and dtypes must
            equal; their shardings are not looked at.

    Returns:
        The parameters as a nested dict, and the step they are of.

    Raises:
        FileNotFoundError: no checkpoint there, or not this step.
        ValueError: it is damaged, or not what was expected.
    """
    directory, step, passed_over = files.find_params(path, step)
    for line in passed_over:
        _logger.warning("Passing over the checkpoint %s.", line)
    with _damage_named(directory):
        stored = _stored_tree(directory)
    key = files.params_key(directory)
    stored = stored if key is None else stored[key]
    if expected is not None:
        check_tree(directory, stored, expected)
    if shardings is None:
        restore_args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored
        )
    else:
        restore_args = jax.tree.map(
            lambda _, sharding: ocp.ArrayRestoreArgs(sharding=sharding),
            stored,
            shardings,
        )
    args = ocp.args.PyTreeRestore(restore_args=restore_args)
    if key is not None:
        args = ocp.args.PyTreeRestore(
            item={key: stored}, restore_args={key: restore_args}, partial_restore=True
        )
    with (
        _damage_named(directory),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader,
    ):
        params = reader.restore(directory, args=args)
    return params if key is None else params[key], step


def check_tree(where: epath.Path, stored: PyTree, wanted: PyTree) -> None:
    """Compares names, shapes and dtypes of a checkpoint with what is wanted.

    Args:
        where: the checkpoint, for the message.
        stored: leaves with ``shape`` and ``dtype``, as they are on disk.
        wanted: leaves with ``shape`` and ``dtype``, or typed random keys.

    Raises:
        ValueError: they differ; every difference is listed.
    """
    have, want = _describe_leaves(stored), _describe_leaves(wanted)
    lines = [f"missing in it: {k} {want[k]}" for k in want if k not in have]
    lines += [f"not wanted: {k} {have[k]}" for k in have if k not in want]
    lines += [
        f"{k}: it has {have[k]}, wanted {want[k]}"
        for k in want
        if k in have and have[k] != want[k]
    ]
    if lines:
        more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise ValueError(
            f"The checkpoint {where} is not of this model and optimizer:\n  "
            + "\n  ".join(lines[:20] + more)
            + "\nUse the config it was made with, or another model_dir."
        )


class _DamagedError(Exception):
    """A checkpoint's files are missing, cut off or damaged."""


def _read_together(read):
    """Calls ``read``; damage that one process meets counts for all of them."""
    reason, result = None, None
    try:
        result = read()
    except Exception as error:
        if not _is_damage(error):
            raise
        reason = _first_line(error)
    damaged = reason is not None
    if jax.process_count() > 1:
        damaged = bool(multihost_utils.process_allgather(np.array(damaged)).any())
    if damaged:
        raise _DamagedError(reason or "another process could not read it")
    return result


def _restore_items(step_dir: epath.Path, **args: Any) -> ocp.args.Composite:
    """Reads some items of a step, on all processes or on none."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return _read_together(
            lambda: reader.restore(step_dir, args=ocp.args.Composite(**args))
        )


@contextlib.contextmanager
def _damage_named(directory: epath.Path):
    """Names the checkpoint in an error that comes from its files."""
    try:
        yield
    except Exception as error:
        if not _is_damage(error):
            raise
        raise ValueError(
            f"The checkpoint {directory} can't be read: {_first_line(error)}"
        ) from error


def _is_damage(error: BaseException | None) -> bool:
    """Whether an error comes from the files, not from the machine.

    Readers raise ValueError for most of what a file can do to them, somewhere in the
    chain. If it was a bug after all, every checkpoint meets it and none is set aside.
    """
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(status in str(e)[:1000] for e in chain for status in _TROUBLE):
        return False
    kinds = FileNotFoundError | KeyError | ValueError | NotImplementedError
    return any(isinstance(e, kinds) for e in chain)


def _first_line(error: BaseException) -> str:
    """Shortens a reader's error, which may go on for pages, to its cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {text[:500]}"


def _stored_tree(directory: epath.Path) -> PyTree:
    """Returns the shapes and dtypes of an item on disk."""
    tree = ocp.StandardCheckpointHandler().metadata(directory).tree
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _describe_leaves(tree: PyTree) -> dict[str, str]:
    """Returns each leaf's dtype and shape by path; keys as the integers they are."""

    def describe(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        return f"{np.dtype(leaf.dtype).name} [{' '.join(map(str, leaf.shape))}]"

    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): describe(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _none_whole(directory: epath.Path, broken: Sequence[tuple[epath.Path, str]]) -> str:
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in broken)
    return (
        f"No checkpoint in {directory} can be read ({reasons}). Nothing was changed. "
        "Restore the files, or name another model_dir to start afresh."
    )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
