"""Finds what has no effect or is missing in a gin configuration, before anything runs.

gin accepts a misspelt macro or scope in silence: the run goes on with the old value. So
the configuration is walked the way gin evaluates it, from the root function through
every reference, and a statement that is never used is an error. That works as long as
everything is wired by ``@reference`` from the root.

A later file may replace a reference (another task, say). What the replaced one used in
an earlier file is then idle, not wrong; a flag that has no effect is always wrong.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin

from sentence_t5 import gin_reader
from sentence_t5.gin_reader import MACRO, Binding, Key

# A call: the scope it runs in, and the function.
Call = tuple[tuple[str, ...], str]


@dataclasses.dataclass
class Usage:
    """What an evaluation from the root reaches.

    Attributes:
        used: keys whose value is used.
        calls: the functions called, with their scopes.
        required: keys whose value is still ``%gin.REQUIRED``.
        undefined: macros that are used and never set -> a key that uses them.
    """

    used: set[Key] = dataclasses.field(default_factory=set)
    calls: set[Call] = dataclasses.field(default_factory=set)
    required: list[Key] = dataclasses.field(default_factory=list)
    undefined: dict[str, Key | None] = dataclasses.field(default_factory=dict)


def walk(
    bindings: Mapping[Key, Sequence[Binding]], root: str, *, replaced: bool = False
) -> Usage:
    """Follows every reference from the root function, in gin's order of scopes.

    Args:
        bindings: every value given to each key; the last one holds.
        root: selector of the root function.
        replaced: also follow values that a later statement or a narrower scope
            replaced, that is, everything that could have been used.

    Returns:
        What was reached.
    """
    table: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for (scope, selector, parameter), given in bindings.items():
        values = [b.value for b in (given if replaced else given[-1:])]
        table.setdefault((scope, selector), {})[parameter] = values
    usage = Usage()
    todo: list[tuple[Call, Key | None]] = [(((), root), None)]
    while todo:
        call, user = todo.pop()
        if call in usage.calls:
            continue
        usage.calls.add(call)
        scope, selector = call
        holding: dict[str, list[Key]] = {}
        for i in range(len(scope) + 1):  # A narrower scope wins.
            partial = "/".join(scope[:i])
            for parameter in table.get((partial, selector), {}):
                key = (partial, selector, parameter)
                if replaced:
                    holding.setdefault(parameter, []).append(key)
                else:
                    holding[parameter] = [key]
        if selector == MACRO and not holding:
            usage.undefined["/".join(scope)] = user
        for key in (key for keys in holding.values() for key in keys):
            usage.used.add(key)
            for value in table[key[:2]][key[2]]:
                for reference in _references(value):
                    if reference.scoped_selector == "gin.REQUIRED/gin.constant":
                        usage.required.append(key)
                        continue
                    inner = tuple(reference.scopes) or scope
                    todo.append(((inner, reference.configurable.selector), key))
    return usage


def _references(value: Any) -> Iterator[gin.config.ConfigurableReference]:
    return gin.config.iterate_references({"": value})


def check(bindings: Mapping[Key, Sequence[Binding]], root: str) -> Usage:
    """Refuses statements without effect and macros without a value.

    Args:
        bindings: every value given to each key, as ``gin_reader.Reader`` has them.
        root: selector of the root function.

    Returns:
        What the configuration uses. Its ``required`` is left to the caller.

    Raises:
        ConfigError: naming each mistake, where it stands and what was probably meant.
    """
    usage = walk(bindings, root)
    possible = walk(bindings, root, replaced=True)
    problems = [
        f"%{name} is used by {gin_reader.show_key(user)} ({bindings[user][-1].origin}) "
        "but never set." + gin_reader.suggest(name, _macros(bindings))
        for name, user in usage.undefined.items()
    ]
    for key, given in bindings.items():
        origin = given[-1].origin
        if key in usage.used or (key in possible.used and not origin.is_flag):
            continue
        problems.append(f"{origin}: {_why_unused(key, bindings, usage, possible)}")
    if problems:
        raise gin_reader.ConfigError("\n".join(problems))
    return usage


def _macros(keys) -> list[str]:
    return [scope for scope, selector, _ in keys if selector == MACRO]


def _why_unused(key: Key, bindings, usage: Usage, possible: Usage) -> str:
    scope, selector, _ = key
    shown = gin_reader.show_key(key)
    if key in possible.used:
        return f"{shown} has no effect: {_replaced_by(key, bindings, usage)}."
    if selector == MACRO:
        return f"nothing uses the macro {scope}." + gin_reader.suggest(
            scope, _macros(usage.used)
        )
    name = gin_reader.show_selector(selector)
    scopes = sorted({"/".join(s) for s, called in usage.calls if called == selector})
    if not scopes:
        called = {gin_reader.show_selector(s) for _, s in usage.calls}
        return f"nothing refers to {name}, so that {shown} has no effect." + (
            gin_reader.suggest(name, called)
        )
    used_in = ", ".join(s or "no scope" for s in scopes)
    return f"{name} is never used in scope {scope}, only in {used_in}." + (
        gin_reader.suggest(scope, scopes)
    )


def _replaced_by(key: Key, bindings, usage: Usage) -> str:
    """Says which statement took the place of a flag's."""
    _, selector, parameter = key
    winners = sorted(
        (used for used in usage.used if used[1:] == (selector, parameter)), key=str
    )
    if winners and selector != MACRO:
        shown = ", ".join(
            f"{gin_reader.show_key(w)} ({bindings[w][-1].origin})" for w in winners
        )
        return f"it is overridden by {shown}"
    replaced = ", ".join(
        f"{gin_reader.show_key(user)} ({given[-1].origin})"
        for user, given in bindings.items()
        if any(_uses(b.value, key) for b in given[:-1])
    )
    return f"what used it was replaced by {replaced or 'a later statement'}"


def _uses(value: Any, key: Key) -> bool:
    scope, selector, _ = key
    return any(
        reference.configurable.selector == selector
        and (selector != MACRO or reference.scopes == scope.split("/"))
        for reference in _references(value)
    )
