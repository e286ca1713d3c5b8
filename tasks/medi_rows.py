"""The form of MEDI's rows, checked; without SeqIO, so that evaluation reads them too.

    {"query": [instruction, text], "pos": [instruction, text],
     "neg": [instruction, text], "task_id": ...}

`neg` may also be a list of such pairs, an empty list, null or absent.
"""

from collections.abc import Mapping
from typing import Any

from sentence_t5 import names

Row = Mapping[str, Any]

SIDES = {
    "query": names.INPUTS,
    "pos": names.TARGETS,
    "neg": names.NEGATIVE_TARGETS,
}


def parse(where: str, record: Mapping[str, Any]) -> Row:
    """Turns a record into a row of a task with instructions.

    Args:
      where: file and line, for errors.
      record: a JSON object of the module's form.

    Returns:
      `inputs`, `targets` and a list of `negative_targets`, and the instruction of each
      under the same name with `_instruction` after it.

    Raises:
      ValueError: another form.
    """
    row: dict[str, Any] = {}
    for side, key in SIDES.items():
        value = record.get(side)
        if key != names.NEGATIVE_TARGETS:
            before, text = _pair(where, side, value)
        else:
            value = value or []
            several = not value or isinstance(value[0], list)
            pairs = [_pair(where, side, v) for v in (value if several else [value])]
            before, text = [b for b, _ in pairs], [t for _, t in pairs]
        row |= {key: text, key + names.INSTRUCTION: before}
    return row


def task_id_of(where: str, record: Mapping[str, Any]) -> str:
    """Returns a record's task.

    Raises:
      ValueError: it has none.
    """
    task_id = record.get("task_id")
    if not isinstance(task_id, str | int) or isinstance(task_id, bool):
        raise ValueError(f"{where}: no task_id, got {task_id!r}.")
    return str(task_id)


def _pair(where: str, side: str, value: Any) -> tuple[str, str]:
    """Checks an instruction and its text."""
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(text, str) for text in value):
        raise ValueError(
            f"{where}: {side!r} must be [instruction, text], got {value!r}. An empty "
            "instruction is ''."
        )
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where}: {side!r} holds half a surrogate pair: {value!r}."
        ) from None
    return value[0].strip(), value[1]
