"""The names a gin file binds, whichever trainer runs it.

A run file says ``from sentence_t5 import engine`` and binds ``engine.train.model``,
``engine.dataset.batch_size`` and so on. gin resolves a binding by the object a name
points at, so that one file serves two engines: under ``python -m sentence_t5.train``
the names point at this package's objects, under T5X's own ``train.py`` they will point
at T5X-backed ones with the same parameters.

Nothing is imported before it is asked for.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

# Name in a gin file -> (module, object).
_OURS = {
    "train": ("sentence_t5.train", "train"),
    "model": ("sentence_t5.steps", "Model"),
    "dataset": ("sentence_t5.datasets", "DatasetConfig"),
    "checkpoints": ("sentence_t5.checkpoints", "CheckpointConfig"),
    "partitioner": ("sentence_t5.partitioning", "Partitioner"),
    "trainer": ("sentence_t5.steps", "Trainer"),
}


def running_t5x(main: ModuleType | None = None) -> bool:
    """Says whether the running script is T5X's ``train.py``.

    Args:
        main: the ``__main__`` module; the running one by default.
    """
    main = main or sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name == "t5x.train"
    script = os.path.abspath(getattr(main, "__file__", None) or "")
    return script.split(os.sep)[-2:] == ["t5x", "train.py"]


def __getattr__(name: str) -> Any:
    """Returns the object behind a name, for the engine that is running."""
    if name not in _OURS:
        raise AttributeError(
            f"sentence_t5.engine has no {name!r}; it has {', '.join(_OURS)}."
        )
    if running_t5x():
        raise NotImplementedError(
            "This version of sentence_t5 does not run under T5X's train.py yet. Run "
            "the same gin file with `python -m sentence_t5.train --gin_file=...`."
        )
    module, attribute = _OURS[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS})
