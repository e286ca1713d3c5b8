"""``metrics.jsonl``: what a run measured, one line for each report.

    {"step": 200, "train/loss": 1.5, "train/pairs_per_second": 90.1, ...}
    {"step": 200, "sts/dev/spearman": 71.2}

Evaluations are all that is not under ``train/``. A kill may cut off the last line.
"""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from sentence_t5 import whole_files

NAME = "metrics.jsonl"
_TRAINING = "train/"


def append(path: epath.Path, step: int, values: Mapping[str, float | None]) -> None:
    """Appends a step's values; None stands for what is undefined."""
    with path.open("a") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def keep_until(path: epath.Path, step: int) -> None:
    """Drops what a killed run wrote after the checkpoint it goes on from."""
    if not path.exists():
        return
    text = path.read_text()
    kept = [f"{line}\n" for line in text.splitlines() if _is_until(_parse(line), step)]
    if "".join(kept) != text:
        whole_files.write(path, "".join(kept).encode())


def read(path: epath.Path, until: int | None = None) -> list[dict[str, Any]]:
    """Reads the whole lines, without one that a kill cut off; [] without a file.

    Args:
        path: the file.
        until: the last step to read; None reads all.

    Returns:
        For each line its ``step`` and values, in the order written.
    """
    if not path.exists():
        return []
    lines = map(_parse, path.read_text().splitlines())
    return [line for line in lines if _is_until(line, until)]


def evaluations(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns a line's evaluation results."""
    return {
        key: value
        for key, value in line.items()
        if key != "step" and not key.startswith(_TRAINING)
    }


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_until(line: dict[str, Any] | None, step: int | None) -> bool:
    if line is None or "step" not in line:
        return False
    return step is None or line["step"] <= step
