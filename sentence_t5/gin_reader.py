"""Finds and reads gin files, remembering where each value was set.

gin-config's own ``parse_config`` keeps no record of which file set what, and its errors
come without the line. This reader walks the same statements (by gin's parser, into
gin's configuration) and adds both. It never skips what it does not know.

It uses private parts of gin-config 0.5 (``_parse_scope``, ``_IMPORTS``), which
``tests/test_gin_files.py`` pins.
"""

import dataclasses
import difflib

# gin-config 0.5.0 uses importlib.util without importing it.
import importlib.util  # noqa: F401
import inspect
import io
import os
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gin
from gin import config_parser

# (scope, selector, parameter), as gin keeps them; a macro NAME is the parameter "value"
# of "gin.macro" in scope NAME.
Key = tuple[str, str, str]
MACRO = "gin.macro"

# What gin raises for a name that leads nowhere.
_UNRESOLVED = (AttributeError, ImportError, KeyError, NameError, ValueError)
_PACKAGE_DIR = pathlib.Path(__file__).resolve().parent


class ConfigError(ValueError):
    """A mistake in a gin file or flag; the message says where and what to do."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value was set.

    Attributes:
        where: ``file:line``, or the flag as it was given.
        is_flag: whether it came from the command line.
    """

    where: str
    is_flag: bool = False

    def __str__(self) -> str:
        return self.where


@dataclasses.dataclass(frozen=True)
class Binding:
    """One statement ``key = value``, and where it stands."""

    value: Any
    origin: Origin


def search_paths(extra: Iterable[str] = ()) -> list[str]:
    """Lists the folders a relative gin file is looked for in, first match first.

    Args:
        extra: folders of the user's, which come first.

    Returns:
        ``extra``, the working directory, the checkout's root if this is a checkout,
        the installed package.
    """
    checkout = _PACKAGE_DIR.parent
    folders = [*extra, os.getcwd()]
    if (checkout / "setup.py").is_file():
        folders.append(str(checkout))
    folders.append(str(_PACKAGE_DIR))
    return list(dict.fromkeys(folders))


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" for the nearest known word, or nothing."""
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[close[0]]}?" if close else ""


def show_selector(selector: str) -> str:
    """Shortens a selector the way a gin file writes it: T5Config, engine.train."""
    parts = selector.split(".")
    return parts[-1] if parts[-1][:1].isupper() else ".".join(parts[-2:])


def show_key(key: Key) -> str:
    """Writes a key the way a gin file does."""
    scope, selector, parameter = key
    if selector == MACRO:
        return scope
    return f"{scope + '/' if scope else ''}{show_selector(selector)}.{parameter}"


class Reader:
    """Reads gin files and flags into gin's configuration.

    Attributes:
        bindings: every value ever given to a key, in order; the last one holds.
        files: the files read, as they were named.
    """

    def __init__(self, folders: Sequence[str]):
        """Starts from an empty configuration.

        Args:
            folders: where relative names are looked for, see ``search_paths``.
        """
        gin.clear_config()
        self.bindings: dict[Key, list[Binding]] = {}
        self.files: list[str] = []
        self._folders = folders
        self._open: list[str] = []

    def has(self, shown: str) -> bool:
        """Says whether a macro or parameter was given a value."""
        return any(show_key(key) == shown for key in self.bindings)

    def read_file(self, name: str, included_at: str = "") -> None:
        """Reads one file and what it includes.

        Args:
            name: an absolute path, or one relative to a search path.
            included_at: ``file:line`` of the include statement, for messages.

        Raises:
            ConfigError: the file is missing, includes itself or has a mistake.
        """
        path = self._find(name, included_at)
        if path in self._open:
            raise ConfigError(f"{included_at}: {name} includes itself.")
        self._open.append(path)
        self.files.append(name)
        with open(path, encoding="utf-8") as file:
            self._read(file, name)
        self._open.pop()

    def read_flag(self, name: str, value: str, flag: str) -> None:
        """Reads ``name = value`` from the command line.

        Args:
            name: a macro, or a parameter such as ``T5Config.d_model``.
            value: in gin's syntax.
            flag: the flag as it was given, for messages.

        Raises:
            ConfigError: the name is unknown or the value is not in gin's syntax.
        """
        self._read(io.StringIO(f"{name} = {value}"), Origin(flag, is_flag=True))

    def _find(self, name: str, included_at: str) -> str:
        folders = [""] if os.path.isabs(name) else self._folders
        for folder in folders:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return os.path.abspath(path)
        looked = f" Looked in {', '.join(folders)}." if folders != [""] else ""
        by = f" (included at {included_at})" if included_at else ""
        raise ConfigError(
            f"There is no gin file {name}{by}.{looked}{self._suggest_file(name)}"
        )

    def _suggest_file(self, name: str) -> str:
        shipped = {}
        for folder in self._folders:
            for path in pathlib.Path(folder, "gin").glob("**/*.gin"):
                shown = path.relative_to(folder).as_posix()
                shipped.setdefault(shown, shown)
                shipped.setdefault(path.name, shown)
        close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.6)
        return f" Did you mean {shipped[close[0]]}?" if close else ""

    def _read(self, source: io.TextIOBase, shown: str | Origin) -> None:
        """Parses one source, whose symbols are its own."""
        with gin.config._parse_scope() as scope:
            for statement, origin in _statements(scope, source, shown):
                if isinstance(statement, config_parser.BindingStatement):
                    self._bind(scope, statement, origin)
                elif isinstance(statement, config_parser.BlockDeclaration):
                    _resolve(scope, statement.selector, origin)
                elif isinstance(statement, config_parser.ImportStatement):
                    _import(scope, statement, origin)
                else:
                    self.read_file(statement.filename, included_at=origin.where)
            gin.config._IMPORTS.update(scope.imports)

    def _bind(self, scope, statement, origin: Origin) -> None:
        if statement.arg_name:
            configurable = _resolve(scope, statement.selector, origin)
            _check_parameter(configurable, statement.arg_name, origin)
            target = (statement.scope, statement.selector, statement.arg_name)
            key = (statement.scope, configurable.selector, statement.arg_name)
        else:
            parts = [statement.scope, statement.selector]
            key = target = ("/".join(filter(None, parts)), MACRO, "value")
        gin.bind_parameter(target, statement.value)
        self.bindings.setdefault(key, []).append(Binding(statement.value, origin))


def _statements(
    scope, source: io.TextIOBase, shown: str | Origin
) -> Iterator[tuple[Any, Origin]]:
    """Yields each statement with its origin; a mistake in one becomes a ConfigError."""

    def at(line: int | None) -> Origin:
        if isinstance(shown, Origin):
            return shown
        return Origin(f"{shown}:{line}" if line else shown)

    parser = None
    while True:
        try:
            if parser is None:
                delegate = gin.config.ParserDelegate()
                parser = config_parser.ConfigParser(source, delegate)
            statement = parser.parse_statement()
        except (SyntaxError, tokenize.TokenError) as e:
            raise ConfigError(_syntax_message(e, at)) from e
        except _UNRESOLVED as e:  # A reference to something that is not there.
            line = parser.current_token.start[0] if parser else None
            raise ConfigError(f"{at(line)}: {_unresolved(scope, e)}") from e
        if statement is None:
            return
        yield statement, at(statement.location.line_num)


def _syntax_message(error: Exception, at) -> str:
    line = getattr(error, "lineno", None)
    origin = at(line)
    if origin.is_flag:
        return (
            f"{origin}: the value is not in gin's syntax. A text needs quotes of its "
            "own, such as --gin.NAME=\"'text'\"."
        )
    text = (getattr(error, "text", None) or "").strip()
    message = getattr(error, "msg", None) or str(error)
    return f"{origin}: {message}" + (f" In: {text}" if text else "")


def _resolve(scope, selector: str, origin: Origin):
    """Returns the function or class a selector names."""
    try:
        configurable = scope.get_configurable(selector)
    except _UNRESOLVED as e:
        raise ConfigError(f"{origin}: {_unresolved(scope, e)}") from e
    if configurable is None:
        raise ConfigError(f"{origin}: {_nothing_called(selector)}")
    return configurable


def _nothing_called(selector: str) -> str:
    known = {show_selector(name) for name, _ in gin.config._REGISTRY.items()}
    return f"the gin files use nothing called {selector}." + suggest(selector, known)


def _unresolved(scope, error: Exception) -> str:
    """Explains why gin could not find what a name stands for."""
    message = str(error.args[0] if error.args else error).splitlines()[0].rstrip(".")
    if found := re.fullmatch(
        r"No configurable matching reference '@(.*?)(\(\))?'", message
    ):
        return _nothing_called(found[1])
    if isinstance(error, NameError):
        name = message.split("'")[1]
        return f"{message}.{suggest(name, scope._symbol_table)}"
    if isinstance(error, AttributeError) and "resolve selector" in message:
        selector = message.split("resolve selector ")[1].split(";")[0]
        root, *inner, name = selector.split(".")
        parent = scope._symbol_table[root]
        for attribute in inner:
            parent = getattr(parent, attribute, parent)
        known = [name for name in dir(parent) if not name.startswith("_")]
        return f"there is no {selector}.{suggest(name, known)}"
    if isinstance(error, ImportError):
        return f"cannot load what this names: {message}."
    return f"{message}."


def _import(scope, statement, origin: Origin) -> None:
    try:
        scope.process_import(statement)
    except ImportError as e:
        missing = f" ({e})" if e.name != statement.module else ""
        raise ConfigError(
            f"{origin}: cannot import {statement.module}{missing}. Is its package "
            "installed, and is the name right?"
        ) from e
    except ValueError as e:
        raise ConfigError(f"{origin}: {e}") from e


def parameters(function) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function or class that gin may bind."""
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


def _check_parameter(configurable, name: str, origin: Origin) -> None:
    known = parameters(configurable.wrapped)
    if name in known or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    raise ConfigError(
        f"{origin}: {show_selector(configurable.selector)} has no parameter {name}."
        f"{suggest(name, known)} It has {', '.join(known)}."
    )
