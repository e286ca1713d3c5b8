"""Where checkpoints lie on disk, and whether one is whole; nothing is restored here.

    model_dir/
      encoder.json  spiece.model          what the weights mean
      checkpoints/
        200/ params/ train/ meta/         committed
        300.orbax-checkpoint-tmp/         a save that was interrupted
        250.broken/                       could not be read, set aside

Under T5X's own train.py the steps lie in model_dir itself, in T5X's layout:

      checkpoint_200/ state/ dataset/     committed; the parameters are state's "target"

A folder is a checkpoint once its metadata hold the time of the commit. Paths may lie in
a bucket (``gs://``).
"""

import json
import os
import re
from collections.abc import Iterable

from etils import epath

CHECKPOINTS_DIR = "checkpoints"
PARAMS = "params"
TRAIN = "train"
META = "meta"
ITEMS = (PARAMS, TRAIN, META)
T5X_PREFIX = "checkpoint_"
T5X_STATE = "state"
# Where T5X's state has the parameters.
T5X_PARAMS = "target"
# Names the leaves of an item.
TREE_METADATA = "_METADATA"

_UNFINISHED = ".orbax-checkpoint-tmp"
_BROKEN = ".broken"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMIT_MARKER = "commit_success.txt"


def absolute(path: str | os.PathLike) -> epath.Path:
    """Makes a path absolute, as the writers need it; buckets are left as they are."""
    if "://" in str(path):
        return epath.Path(path)
    return epath.Path(os.path.abspath(os.path.expanduser(path)))


def list_steps(root: epath.Path) -> list[int]:
    """Returns the steps that have a folder in ``root``, whole or not, ascending."""
    if not root.exists():
        return []
    return sorted(int(p.name) for p in root.iterdir() if _is_step(p.name))


def list_t5x_steps(model_dir: epath.Path) -> list[int]:
    """Returns the steps that T5X's train.py saved, whole or not, ascending."""
    if not model_dir.exists():
        return []
    names = [p.name.removeprefix(T5X_PREFIX) for p in model_dir.glob(f"{T5X_PREFIX}*")]
    return sorted(int(name) for name in names if _is_step(name))


def whole_steps(model_dir: epath.Path) -> list[int]:
    """Returns the steps of a run that are whole, whichever engine saved them."""
    root = model_dir / CHECKPOINTS_DIR
    ours = [s for s in list_steps(root) if problem(root / str(s)) is None]
    return sorted(
        ours
        + [
            step
            for step in list_t5x_steps(model_dir)
            if problem(model_dir / f"{T5X_PREFIX}{step}", (T5X_STATE,)) is None
        ]
    )


def check_engine(model_dir: str | os.PathLike, *, is_t5x: bool) -> None:
    """Refuses a folder whose checkpoints the other engine saved, and a file.

    Raises:
        ValueError: it holds some; a run would start anew beside them.
        NotADirectoryError: it is a file.
    """
    folder = absolute(model_dir)
    if folder.is_file():
        raise NotADirectoryError(
            f"model_dir {folder} is a file, expected a folder. Name a folder; it is "
            "made if it isn't there."
        )
    other = list_steps(folder / CHECKPOINTS_DIR) if is_t5x else list_t5x_steps(folder)
    if other:
        saved_by, starts = "T5X's train.py", "sentence_t5.train"
        if is_t5x:
            saved_by, starts = starts, saved_by
        raise ValueError(
            f"{folder} has {other[-1]} steps saved by {saved_by}, which {starts} can't "
            "go on from. Go on with the former, or take another model_dir; "
            "INITIAL_CHECKPOINT_PATH starts it from these weights."
        )


def list_unfinished(root: epath.Path) -> list[epath.Path]:
    """Returns the folders of saves that were interrupted before their commit."""
    if not root.exists():
        return []
    return sorted(p for p in root.iterdir() if _UNFINISHED in p.name)


def problem(step_dir: epath.Path, items: Iterable[str] = ITEMS) -> str | None:
    """Says why a step's folder is no whole checkpoint; None if it looks like one.

    Reads small metadata only, so that damage inside the arrays is not seen.

    Args:
        step_dir: folder of one step.
        items: the items that must be there.

    Returns:
        The reason, or None.
    """
    try:
        metadata = json.loads((step_dir / _STEP_METADATA).read_text())
        if not metadata.get("commit_timestamp_nsecs"):
            return f"{_STEP_METADATA} has no time of commit"
        markers = [(step_dir / item / _COMMIT_MARKER).exists() for item in items]
        if any(markers) and not (step_dir / _COMMIT_MARKER).exists():
            return f"{_COMMIT_MARKER} is missing"
        for item in items:
            if item == META:
                json.loads((step_dir / item / "metadata").read_text())
                continue
            tree = json.loads((step_dir / item / TREE_METADATA).read_text())
            manifest = step_dir / item / "manifest.ocdbt"
            if tree.get("use_ocdbt") and not manifest.exists():
                return f"{item}/{manifest.name} is missing"
        metrics = step_dir / "metrics" / "metrics"
        if metrics.exists():
            json.loads(metrics.read_text())
    except FileNotFoundError as error:
        return f"a file is missing ({error})"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"its metadata are cut off or damaged ({error})"
    return None


def set_aside(step_dir: epath.Path) -> epath.Path:
    """Renames a broken step's folder, so that its step can be saved again."""
    target = step_dir.parent / f"{step_dir.name}{_BROKEN}"
    if target.exists():
        target.rmtree()
    return step_dir.rename(target)


def find_params(
    path: str | os.PathLike, step: int | None = None
) -> tuple[epath.Path, int | None, list[str]]:
    """Finds the parameters that a path stands for.

    Args:
        path: a model_dir, its ``checkpoints`` folder, one step's folder, or the
            ``params`` item in it; or a model_dir or a step's folder of T5X's.
        step: the step to take from a model_dir; the newest whole one by default.

    Returns:
        The item's folder (``state`` of a T5X checkpoint, see ``params_key``), its step
        (None if the folders don't say), and a line for each newer step that was passed
        over.

    Raises:
        FileNotFoundError: no checkpoint there, or not this step.
        ValueError: the step is broken, or ``step`` contradicts ``path``.
    """
    base = absolute(path)
    if not base.exists():
        raise FileNotFoundError(f"No checkpoint at {base}: there is no such folder.")
    if (base / TREE_METADATA).exists():
        return base, _check_step(base, base.parent.name, step), []
    is_t5x = base.name.startswith(T5X_PREFIX)
    item = T5X_STATE if is_t5x else PARAMS
    if (base / item).exists():
        found = _check_step(base, base.name.removeprefix(T5X_PREFIX), step)
        _raise_if_broken(base, item)
        return base / item, found, []
    nested = base / CHECKPOINTS_DIR
    root = nested if nested.exists() else base
    prefix, item, steps = "", PARAMS, list_steps(root)
    if not steps and list_t5x_steps(base):
        root, prefix, item, steps = base, T5X_PREFIX, T5X_STATE, list_t5x_steps(base)
    if not steps:
        raise FileNotFoundError(
            f"No checkpoint in {root}. Expected a model_dir with {CHECKPOINTS_DIR}/"
            f"<step>/, that folder, or one step's; {base} holds: "
            f"{', '.join(sorted(p.name for p in base.iterdir())[:10]) or 'nothing'}."
        )
    if step is not None:
        if step not in steps:
            raise FileNotFoundError(
                f"No step {step} in {root}; there are {', '.join(map(str, steps))}."
            )
        _raise_if_broken(root / f"{prefix}{step}", item)
        return root / f"{prefix}{step}" / item, step, []
    passed_over = []
    for candidate in reversed(steps):
        step_dir = root / f"{prefix}{candidate}"
        reason = problem(step_dir, (item,))
        if reason is None:
            return step_dir / item, candidate, passed_over
        passed_over.append(f"{step_dir}: {reason}")
    raise ValueError(f"No checkpoint in {root} is whole: {'; '.join(passed_over)}.")


def params_key(folder: epath.Path) -> str | None:
    """Returns where in an item's tree the parameters are; None if they are all of it.

    Args:
        folder: from ``find_params``.
    """
    return T5X_PARAMS if folder.name == T5X_STATE else None


def find_model_dir(path: str | os.PathLike, description_file: str) -> epath.Path:
    """Returns the folder with the description, at ``path`` or up to three above.

    Raises:
        FileNotFoundError: it is in none of them, or there is nothing at ``path``.
    """
    base = absolute(path)
    for folder in (base, *list(base.parents)[:3]):
        if (folder / description_file).exists():
            return folder
    if not base.exists():
        raise FileNotFoundError(
            f"No {description_file} in {base}: there is no such folder."
        )
    raise FileNotFoundError(
        f"No {description_file} in {base} or above it: it says which encoder and "
        "vocabulary a checkpoint belongs to, and train() writes it into model_dir. Of "
        "a checkpoint of another format, `sentence-t5 import` makes a model_dir."
    )


def _is_step(name: str) -> bool:
    return re.fullmatch(r"\d+", name) is not None


def _check_step(base: epath.Path, name: str, step: int | None) -> int | None:
    """Returns the step a folder's name stands for, which must agree with ``step``."""
    found = int(name) if _is_step(name) else None
    if step is not None and step != found:
        raise ValueError(f"{base} is of step {found}, but step {step} was asked for.")
    return found


def _raise_if_broken(step_dir: epath.Path, item: str) -> None:
    reason = problem(step_dir, (item,))
    if reason:
        raise ValueError(f"The checkpoint {step_dir} is not whole: {reason}.")
