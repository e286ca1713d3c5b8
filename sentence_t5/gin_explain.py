"""Answers ``--explain``: what a value is, where it was set, and what it replaced.

BATCH_SIZE = 9  # --batch_size=9; before: 512 (gin/runs/nli.gin:15)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import gin

from sentence_t5 import gin_checks, gin_reader
from sentence_t5.gin_reader import MACRO, Binding, Key

_Reference = gin.config.ConfigurableReference
# What a signature shows for a field that a function fills, whose value isn't known.
_MADE = dataclasses._HAS_DEFAULT_FACTORY


def explain(
    reader: gin_reader.Reader,
    usage: gin_checks.Usage,
    defaults: Mapping[Key, Any],
    name: str = "",
) -> str:
    """Says what values are set to, and where.

    Args:
        reader: what was set.
        usage: what of it is used.
        defaults: the parameters that are not set.
        name: a macro, a parameter (``T5Config.d_model``), a function or class
            (``T5Config``: all its parameters), with or without a scope; "" for all.

    Returns:
        One line for each value: name, value, origin and what it replaced.

    Raises:
        ConfigError: nothing has that name.
    """
    lines = [
        _line(reader, key)
        for key in sorted(usage.used, key=lambda k: (k[1] != MACRO, k[1], k))
        if _matches(key, name)
    ]
    for key, default in defaults.items():
        if _matches(key, name) and default is not _MADE:
            lines.append(f"{gin_reader.show_key(key)} = {default!r}  # default")
    if not lines:
        known = {gin_reader.show_key(key) for key in usage.used}
        known |= {gin_reader.show_selector(selector) for _, selector in usage.calls}
        raise gin_reader.ConfigError(
            f"--explain={name}: the configuration uses nothing of that name."
            + gin_reader.suggest(name, known)
        )
    return "\n".join(lines)


def _line(reader: gin_reader.Reader, key: Key) -> str:
    *earlier, holds = reader.bindings[key]
    chain = [holds, *_macros_behind(reader, holds)]
    values = " = ".join(repr(binding.value) for binding in chain)
    origins = ", ".join(str(binding.origin) for binding in chain)
    line = f"{gin_reader.show_key(key)} = {values}  # {origins}"
    if earlier:
        line += "; before: " + ", ".join(
            f"{binding.value!r} ({binding.origin})" for binding in reversed(earlier)
        )
    return line


def _matches(key: Key, name: str) -> bool:
    """Whether a key is the one called ``name``, or belongs to it."""
    if not name:
        return True
    scope, selector, parameter = key
    wanted_scope, _, wanted = name.rpartition("/")
    if wanted_scope and wanted_scope != scope:
        return False
    if selector == MACRO:
        return scope == name
    # A parameter, a function or class, or both: the last words of the full name.
    full = f".{selector}.{parameter}"
    return f".{selector}".endswith(f".{wanted}") or full.endswith(f".{wanted}")


def _macros_behind(reader: gin_reader.Reader, binding: Binding) -> list[Binding]:
    """Returns the macros that a value goes through."""
    chain = []
    while isinstance(value := (chain or [binding])[-1].value, _Reference):
        key = ("/".join(value.scopes), MACRO, "value")
        if value.configurable.selector != MACRO or key not in reader.bindings:
            break
        chain.append(reader.bindings[key][-1])
    return chain
