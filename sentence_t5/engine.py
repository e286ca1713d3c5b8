"""The names a gin file binds, whichever trainer runs it.

A run file says ``from sentence_t5 import engine`` and binds ``engine.train.model``,
``engine.dataset.batch_size`` and so on. gin resolves a binding by the object a name
points at, so that one file serves two engines: under ``python -m sentence_t5.train``
the names point at this package's objects; under T5X's own ``train.py`` they point at
T5X-backed ones with the same parameters (``t5x_engine``), and ``train`` at the running
script's function.

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
_T5X = {
    "train": ("sentence_t5.t5x_engine.launch", "train"),
    "model": ("sentence_t5.t5x_engine.model", "Model"),
    "dataset": ("sentence_t5.t5x_engine.data", "DatasetConfig"),
    "checkpoints": ("sentence_t5.t5x_engine.state", "CheckpointConfig"),
    "partitioner": ("sentence_t5.t5x_engine.partitioner", "Partitioner"),
    "trainer": ("sentence_t5.t5x_engine.trainer", "Trainer"),
}
_T5X_SCRIPTS = ("train", "main")


def running_t5x(main: ModuleType | None = None) -> bool:
    """Says whether the running script is T5X's ``train.py``, or its ``main.py``.

    Args:
        main: the ``__main__`` module; the running one by default.
    """
    main = main or sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name in [f"t5x.{name}" for name in _T5X_SCRIPTS]
    script = os.path.abspath(getattr(main, "__file__", None) or "")
    folder, name = script.split(os.sep)[-2:]
    return folder == "t5x" and name in [f"{name}.py" for name in _T5X_SCRIPTS]


def ours(selector: str) -> Any | None:
    """Returns this package's own object for a gin selector, whatever engine runs.

    Args:
        selector: in full, such as ``sentence_t5.engine.model``. T5X's ``train`` is
            ``__main__.train``.

    Returns:
        The object; None if the selector is none of the engine's names.
    """
    module, _, name = selector.rpartition(".")
    if module not in (__name__, "__main__") or name not in _OURS:
        return None
    return _load(_OURS[name])


def _load(where: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(where[0]), where[1])


def __getattr__(name: str) -> Any:
    """Returns the object behind a name, for the engine that is running."""
    if name not in _OURS:
        raise AttributeError(
            f"sentence_t5.engine has no {name!r}; it has {', '.join(_OURS)}."
        )
    is_t5x = running_t5x()
    found = _load((_T5X if is_t5x else _OURS)[name])
    # T5X calls the function of its own script, whose first mention starts our checks.
    return found() if is_t5x and name == "train" else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS})
