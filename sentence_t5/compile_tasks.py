"""What the tasks of a gin file add to every batch, from their settings alone.

    medi.mixture.with_instructions, adapted.task.left_instruction  ─► ..._lengths
    medi.mixture.without_in_batch, adapted.task.in_batch_negatives ─► in_batch

No task is built, since that reads files that the machine need not have.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import gin

from sentence_t5 import datasets, gin_reader, names
from sentence_t5.gin_reader import MACRO
from sentence_t5.tasks import adapted, medi, mixtures

_logger = logging.getLogger(__name__)

_Reference = gin.config.ConfigurableReference
_TASK = "mixture_or_task_name"


@dataclasses.dataclass(frozen=True)
class Extras:
    """Arrays that a batch has only with some tasks.

    Attributes:
        has_instructions: the lengths of instructions.
        has_switch: whether rows are negatives to each other (``names.IN_BATCH``).
    """

    has_instructions: bool = False
    has_switch: bool = False

    def __or__(self, other: "Extras") -> "Extras":
        """Returns what a mixture of both has."""
        return Extras(
            self.has_instructions or other.has_instructions,
            self.has_switch or other.has_switch,
        )


NO_EXTRAS = Extras()


def find(
    dataset: datasets.DatasetConfig, reference: gin.config.ConfigurableReference
) -> Extras:
    """Says what the batches of a dataset have, as ``batching.TrainBatches`` does.

    A task that ``medi.mixture.without_in_batch`` names is taken for one with enough
    rows. A function of other packages may do anything: what it adds isn't known, which
    the log says.

    Args:
        dataset: the dataset, whatever its task.
        reference: the gin file's reference to it, which has the task.
    """
    with gin.config_scope(_scope(reference)):
        return _of_task(_parameters(reference).get(_TASK), dataset)


def _of_task(value: Any, dataset: datasets.DatasetConfig) -> Extras:
    """Says what a task or mixture adds, in the scope that refers to it."""
    value = _behind_macros(value)
    if isinstance(value, str):
        return _of_registered(dataclasses.replace(dataset, mixture_or_task_name=value))
    # What is still open (``%gin.REQUIRED``) is a reference to a constant.
    if not isinstance(value, _Reference) or value.configurable.selector[:4] == "gin.":
        return NO_EXTRAS
    function = value.configurable.wrapped
    with gin.config_scope(_scope(value)):
        given = _parameters(value)
        if function is medi.mixture:
            return Extras(
                bool(_behind_macros(given["with_instructions"])),
                bool(_behind_macros(given["without_in_batch"])),
            )
        if function is adapted.task:
            return _of_adapted(given, dataset)
        if function is mixtures.mixture:
            extras = NO_EXTRAS
            for task in _behind_macros(given["tasks"]):
                extras |= _of_task(task, dataset)
            return extras
    if not function.__module__.startswith("sentence_t5.tasks."):
        _logger.warning(
            "Whether the rows of %r have instructions, or are no negatives to each "
            "other, isn't known without building it: the step is that of plain pairs.",
            value,
        )
    return NO_EXTRAS


def _of_registered(dataset: datasets.DatasetConfig) -> Extras:
    """Says what a task of SeqIO's registry adds."""
    key = f"{names.INPUTS}{names.INSTRUCTION_LENGTH}"
    tasks = [task for task, _ in dataset.tasks()]
    return Extras(
        any(key in task.output_features for task in tasks),
        not all(getattr(task.source, "in_batch_negatives", True) for task in tasks),
    )


def _of_adapted(given: Mapping[str, Any], dataset: datasets.DatasetConfig) -> Extras:
    old = _of_task(given["task"], dataset)
    texts = [_behind_macros(given[f"{side}_instruction"]) for side in ("left", "right")]
    in_batch = _behind_macros(given["in_batch_negatives"])
    return Extras(
        old.has_instructions or any(text and text.strip() for text in texts),
        old.has_switch if in_batch is None else not in_batch,
    )


def _scope(reference: gin.config.ConfigurableReference) -> list[str]:
    """Returns the scope that gin calls a reference's function in."""
    return reference.scopes or gin.current_scope()


def _parameters(reference: gin.config.ConfigurableReference) -> dict[str, Any]:
    """Returns a function's parameters, not evaluated: as set in this scope, or None."""
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in gin_reader.parameters(
            reference.configurable.wrapped
        ).items()
    }
    return defaults | gin.get_bindings(
        reference.configurable.selector, resolve_references=False
    )


def _behind_macros(value: Any) -> Any:
    """Returns what a macro stands for; anything else as it is."""
    while isinstance(value, _Reference) and value.configurable.selector == MACRO:
        name = "/".join([*value.scopes, MACRO])
        value = gin.get_bindings(name, resolve_references=False)["value"]
    return value
