"""A gin file's step and its shapes, on the devices of a slice that isn't there.

Of the configuration, the model, the mesh, the trainer and the batch's shape are built.
The task isn't: it would read files that the machine need not have (``compile_tasks``).
Only a guide's description is read, for the width of its vectors.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp

from sentence_t5 import (
    batching,
    compile_tasks,
    datasets,
    descriptions,
    flops,
    gin_files,
    names,
    packing,
    steps,
    tpu_topologies,
)

STEPS = ("train", "encode")
_NO_TASK = ""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A step and what it is to be compiled for.

    Attributes:
        trainer: has the step, on a mesh of the slice's devices.
        dataset: lengths, batch size and number of negatives; its task is never read.
        topology: the slice; None for the devices at hand.
        step: one of ``STEPS``.
        extras: what the task adds to a batch.
    """

    trainer: steps.Trainer
    dataset: datasets.DatasetConfig
    topology: tpu_topologies.Topology | None
    step: str
    extras: compile_tasks.Extras = compile_tasks.NO_EXTRAS

    def check(self) -> None:
        """Checks what tracing the step would refuse.

        Raises:
            ConfigError: as ``batch``.
            ValueError: the batch can't be encoded in chunks of the microbatch's size.
        """
        self.batch()
        if self.step == "encode":
            return
        chunks = self.trainer.num_chunks(self.dataset.batch_size)
        if self.dataset.packed_length is not None:
            packing.check_rows(
                self._packed_rows()[0],
                self.trainer.partitioner.num_batch_shards,
                chunks,
            )

    def lengths(self) -> tuple[int, ...]:
        """Returns the tokens of each text of a pair."""
        tokens = self.dataset.lengths()
        negatives = [tokens[names.NEGATIVE_TARGETS]] * self.dataset.num_negatives
        return (tokens[names.INPUTS], tokens[names.TARGETS], *negatives)

    def batch(self) -> steps.Batch | jax.ShapeDtypeStruct:
        """Returns the shapes of what the step takes beside the state or parameters.

        Raises:
            ConfigError: they depend on the data, or on a guide that can't be read.
        """
        sharding = self.trainer.partitioner.batch_sharding

        def array(*shape, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        size, negatives = self.dataset.batch_size, self.dataset.num_negatives
        if self.step == "encode":
            return array(size, self.lengths()[0])
        is_packed = self.dataset.packed_length is not None
        batch = self._packed(array) if is_packed else self._padded(array)
        if negatives:
            batch[names.NEGATIVE_MASK] = array(size, negatives, dtype=jnp.bool_)
        if self.extras.has_switch:
            batch[names.IN_BATCH] = array(size, dtype=jnp.bool_)
        if (path := self.trainer.model.loss.guide) is not None:
            width = _guide_width(path)
            sides = {names.LEFT_GUIDE: (), names.RIGHT_GUIDE: ()}
            if negatives:
                sides[names.NEGATIVE_GUIDE] = (negatives,)
            for key, texts in sides.items():
                batch[key] = array(size, *texts, width, dtype=jnp.float32)
        return batch

    def _padded(self, array: Callable[..., jax.ShapeDtypeStruct]) -> steps.Batch:
        """Returns the shapes of texts in rows of their own."""
        size, negatives = self.dataset.batch_size, self.dataset.num_negatives
        shapes = {names.INPUTS: (size,), names.TARGETS: (size,)}
        if negatives:
            shapes[names.NEGATIVE_TARGETS] = (size, negatives)
        batch = {}
        for feature, shape in shapes.items():
            tokens_key, lengths_key = batching.KEYS[feature]
            batch[tokens_key] = array(*shape, self.dataset.lengths()[feature])
            if self.extras.has_instructions:
                batch[lengths_key] = array(*shape)
        return batch

    def _packed(self, array: Callable[..., jax.ShapeDtypeStruct]) -> steps.Batch:
        """Returns the shapes of packed texts."""
        size, num_texts = self.dataset.batch_size, 2 + self.dataset.num_negatives
        rows, length = self._packed_rows()
        shards = self.trainer.partitioner.num_batch_shards
        slots = packing.num_slots(size * num_texts, rows)
        batch = {
            names.PACKED_TOKENS: array(rows, length),
            names.PACKED_SLOTS: array(rows, length),
            names.PACKED_NUMBERS: array(rows, slots),
            names.PACKED_PLACES: array(shards, size // shards, num_texts),
        }
        if self.extras.has_instructions:
            batch[names.PACKED_INSTRUCTION_LENGTHS] = array(rows, slots)
        return batch

    def _packed_rows(self) -> tuple[int, int]:
        rows, length = self.dataset.packed_rows, self.dataset.packed_length
        if rows is None:
            raise gin_files.ConfigError(
                "DatasetConfig.packed_rows is open, and without the data it can't be "
                "found. Training on it logs the number; set "
                "--gin.train/engine.dataset.packed_rows to it."
            )
        return rows, length

    def lower(self) -> jax.stages.Lowered:
        """Traces the step."""
        state = self.trainer.abstract_state
        if self.step == "encode":
            return self.trainer.encode_step.lower(state.params, self.batch(), None)
        return self.trainer.train_step.lower(state, self.batch())

    def flops(self) -> flops.Flops:
        """Counts the step's operations."""
        config = self.trainer.model.encoder
        size, lengths = self.dataset.batch_size, self.lengths()
        if self.step == "encode":
            return flops.encode_step(config, size, lengths[0])
        rows = [(size, length) for length in lengths]
        if self.dataset.packed_length is not None:
            rows = [self._packed_rows()]
        return flops.train_step(
            config,
            rows,
            batch_size=size,
            num_candidates=size * (len(lengths) - 1),
            is_chunked=self.trainer.microbatch_size is not None,
        )


def set_up(
    config: gin_files.Config,
    topology: tpu_topologies.Topology | None,
    step: str = "train",
) -> Setup:
    """Builds the model, the mesh and the batch's shape of a gin file, and nothing else.

    Args:
        config: from ``gin_files.load``.
        topology: the slice; None for the devices at hand.
        step: one of ``STEPS``.

    Raises:
        ConfigError: a value that is needed is missing or refused.
        ValueError: model, batch and mesh don't fit together.
        RuntimeError: libtpu isn't installed.
    """
    references = gin.get_bindings(config.root, resolve_references=False)

    def build(parameter: str, *given: Any, **named: Any) -> Any:
        try:
            return references[parameter].scoped_configurable_fn(*given, **named)
        except (TypeError, ValueError) as error:
            # gin appends the call chain.
            message = str(error).split("\n  In call to configurable ")[0]
            raise gin_files.ConfigError(message.strip()) from error

    # gin doesn't evaluate what is given by position: no task is built.
    dataset = build("train_dataset_cfg", _NO_TASK)
    extras = compile_tasks.find(dataset, references["train_dataset_cfg"])
    model = build("model")
    devices = None if topology is None else tpu_topologies.devices(topology)
    partitioner = build("partitioner", devices=devices)
    partitioner.check(model.encoder, dataset.batch_size)
    trainer = build("trainer_cls", model=model, partitioner=partitioner)
    return Setup(trainer, dataset, topology, step, extras)


def _guide_width(path: str) -> int:
    """Returns the width of a guide's vectors.

    Raises:
        ConfigError: there is no model, or it isn't whole.
    """
    try:
        return descriptions.read_description(path).encoder.embedding_dim
    except (OSError, ValueError) as error:
        raise gin_files.ConfigError(
            f"LossConfig.guide is {path}, and the width of its vectors is part of the "
            f"step: {error}"
        ) from error
