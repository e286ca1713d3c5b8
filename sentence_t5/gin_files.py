"""From a command line to a checked configuration, and from there to a run.

    --gin_file=F ... --train_file=T --gin.NAME=V    (gin_flags; later ones win)
      ─► gin_reader: what was set, and where
      ─► gin_checks: nothing without effect, nothing missing
      ─► the arguments of ``engine.train``

A mistake on the way is a ``ConfigError``, which ``main`` prints; so it does with what
``train`` refuses. A traceback is left to what nobody foresaw.
"""

import argparse
import dataclasses
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import gin

from sentence_t5 import (
    distributed,
    engine,
    gin_checks,
    gin_explain,
    gin_flags,
    gin_reader,
)
from sentence_t5.gin_reader import ConfigError, Key

_logger = logging.getLogger(__name__)

_ROOT = "engine.train"
# The same function, by the name that T5X gives it.
_T5X_ROOT = "__main__.train"
# What ``check_values`` builds, and what it gives by position, which gin doesn't
# evaluate: a name in place of a task that reads data.
_WITHOUT_DATA = {
    "model": (),
    "checkpoint_cfg": (),
    "train_dataset_cfg": ("not built",),
    "train_eval_dataset_cfg": ("not built",),
    "infer_eval_dataset_cfg": ("not built",),
}
_REFUSED = 1
_USAGE_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration without mistakes, which gin holds until the next one is read.

    Attributes:
        reader: what was set, and where.
        usage: what of it is used.
        root: selector of the function that runs it.
    """

    reader: gin_reader.Reader
    usage: gin_checks.Usage
    root: str

    def arguments(self, *, lock: bool = True) -> dict[str, Any]:
        """Builds the root function's arguments.

        Args:
            lock: lock the configuration first, so that nothing changes it any more.

        Raises:
            ConfigError: a value is missing, or is refused by what it is given to.
        """
        if self.usage.required:
            raise ConfigError(
                "\n".join(_missing(key, self) for key in self.usage.required)
            )
        if lock:
            gin.finalize()
        try:
            return gin.get_bindings(self.root)
        except RecursionError as e:
            raise ConfigError("A reference leads back to itself.") from e
        except (OSError, TypeError, ValueError) as e:
            raise ConfigError(_message(e)) from e

    def check_values(self) -> None:
        """Builds what needs no data, folder or device, to see whether it is accepted.

        Raises:
            ConfigError: a value is refused by what it is given to.
        """
        references = gin.get_bindings(self.root, resolve_references=False)
        for parameter, given in _WITHOUT_DATA.items():
            reference = references.get(parameter)
            if reference is None:
                continue
            try:
                reference.scoped_configurable_fn(*given)
            except (TypeError, ValueError) as e:
                raise ConfigError(_message(e)) from e
            except RuntimeError:
                if not self.usage.required:  # Which gin doesn't go on without.
                    raise

    def text(self) -> str:
        """Writes what is used as one gin file, defaults included, to repeat the run.

        The text is the same under both engines, and both read it.
        """
        table: dict[tuple[str, str], dict[str, Any]] = {}
        for scope, selector, parameter in self.usage.used:
            value = self.reader.bindings[scope, selector, parameter][-1].value
            table.setdefault((scope, selector), {})[parameter] = value
        for (scope, selector, parameter), default in self.defaults().items():
            table.setdefault((scope, selector), {})[parameter] = default
        text = gin.config._config_str(table) + "\n"
        if self.root == _T5X_ROOT:
            text = text.replace("import __main__\n", "").replace(self.root, _ROOT)
        return text

    def explain(self, name: str = "") -> str:
        """Says what values are set to, and where; see ``gin_explain``."""
        return gin_explain.explain(self.reader, self.usage, self.defaults(), name)

    def defaults(self) -> dict[Key, Any]:
        """Returns the parameters that no statement sets, and their defaults."""
        found = {}
        for scope, selector in sorted(self.usage.calls):
            if selector.startswith("gin."):
                continue
            partial = ["/".join(scope[:i]) for i in range(len(scope) + 1)]
            function = engine.ours(selector) or gin.config._REGISTRY[selector].wrapped
            for name, spec in gin_reader.parameters(function).items():
                is_set = any((p, selector, name) in self.usage.used for p in partial)
                if not is_set and spec.default is not spec.empty:
                    found["/".join(scope), selector, name] = spec.default
        return found


_current: Config | None = None


def load(flags: argparse.Namespace) -> Config:
    """Reads the gin files and flags and checks them.

    Args:
        flags: from ``gin_flags.parse_flags``.

    Returns:
        The configuration; gin holds it too.

    Raises:
        ConfigError: a mistake in a file or flag.
    """
    global _current
    if not flags.gin_file:
        raise ConfigError(
            "No gin file is given. Pass one, such as --gin_file=gin/st5_tiny_mean.gin."
        )
    extra = [path for path in flags.gin_search_paths.split(",") if path]
    reader = gin_reader.Reader(gin_reader.search_paths(extra))
    settings = gin_flags.settings(flags)
    gin_flags.read_files(reader, flags)
    for setting in settings:
        if not reader.has(setting.target):
            raise ConfigError(
                f"{setting.flag} sets {setting.target}, which the given gin files "
                f"don't have: {', '.join(reader.files)}."
            )
        reader.read_flag(setting.target, repr(setting.value), setting.flag)
    for binding in flags.gin_bindings:
        name, _, value = binding.removeprefix("--gin.").partition("=")
        reader.read_flag(name.strip(), value.strip(), binding)
    root = _root(reader)
    usage = gin_checks.check(reader.bindings, root)
    _current = Config(reader, usage, root)
    return _current


def _root(reader: gin_reader.Reader) -> str:
    selectors = {selector for _, selector, _ in reader.bindings}
    for selector in selectors:
        if gin_reader.show_selector(selector) in (_ROOT, _T5X_ROOT):
            return selector
    raise ConfigError(
        f"The given gin files don't say what to run: none binds {_ROOT}. Start with "
        "one that does, such as --gin_file=gin/st5_tiny_mean.gin."
    )


def _missing(key: Key, config: Config) -> str:
    shown = gin_reader.show_key(key)
    flag = gin_flags.BY_TARGET.get(shown)
    if flag is None:
        how = f"--gin.{shown}=..."
    elif config.root == _T5X_ROOT:  # Which has no plain flags.
        value = "\"'...'\"" if flag.kind is str else "..."
        how = f"--gin.{shown}={value} ({flag.help})"
    else:
        how = f"--{flag.name}=... ({flag.help})"
    origin = config.reader.bindings[key][-1].origin
    return f"{shown} has no value ({origin} leaves it open). Pass {how}."


def summarize(model_dir: str, summary_writer: Any = None, step: int = 0) -> None:
    """Writes ``config.gin``, from which the run can be repeated, into ``model_dir``.

    Args:
        model_dir: a folder, local or remote; made if it is not there.
        summary_writer: a clu metric writer that gets the text too, or None.
        step: the step to write it at.
    """
    import jax
    from etils import epath

    if jax.process_index() != 0:
        return
    body = _current.text() if _current else gin.config_str()
    text = f"{_header()}\n{body}"
    folder = epath.Path(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.gin").write_text(text)
    if summary_writer is not None:
        summary_writer.write_texts(step, {"config": gin.markdown(text)})


def _header() -> str:
    """Says how the run was started, for whoever finds the file."""
    from sentence_t5 import __version__

    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return (
        f"# sentence_t5 {__version__}, run in {os.getcwd()} as\n"
        + "\n".join(f"#   {line}" for line in command.splitlines())
        + "\n# Repeat with --gin_file=<this file>.\n"
    )


def make_parser(command: str) -> argparse.ArgumentParser:
    """Makes the parser of ``train`` or ``config``."""
    parser = argparse.ArgumentParser(
        prog=f"sentence-t5 {command}",
        description={
            "train": "Trains a sentence encoder as gin files say.",
            "config": "Checks gin files and flags; prints each value and its origin.",
        }[command],
        epilog="Also --gin.NAME=VALUE for any macro or parameter. See docs/gin.md.",
        allow_abbrev=False,
    )
    gin_flags.add_flags(parser)
    if command == "train":
        distributed.add_flags(parser)
    return parser


def is_for_the_user(error: Exception) -> bool:
    """Says whether an error's message is all that whoever ran the command needs.

    It is for what the system refuses (a file, a folder, a disk) and for the values that
    this package refuses. Errors of other packages, and of other types, are a defect's,
    which needs its traceback.

    Args:
        error: as caught, with its traceback.
    """
    from sentence_t5 import preflight, reporting  # Imports JAX.

    if isinstance(error, OSError):
        return True
    refusals = (ValueError, preflight.OtherHostError, reporting.NonFiniteError)
    if not isinstance(error, refusals):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == "sentence_t5"


def _message(error: Exception) -> str:
    """Returns an error's text without the calls that gin appends, innermost first."""
    message, *calls = str(error).split("\n  In call to configurable ")
    inside = f" (in {calls[0].split()[0].strip(chr(39))})" if calls else ""
    return message.strip() + inside


def _arguments_together(config: Config) -> dict[str, Any]:
    """Builds the arguments; a file that one host lacks ends all hosts."""
    from sentence_t5 import preflight  # Imports JAX, which --help needn't wait for.

    with preflight.together("reading the configuration"):
        arguments = config.arguments()
    preflight.check_same("configuration", config.text())
    return arguments


def main(argv: Sequence[str] | None = None, *, command: str = "train") -> int:
    """Reads a command line and trains, or explains what training would do.

    Args:
        argv: arguments after the command; the process's by default.
        command: ``train``, or ``config`` to print the configuration instead.

    Returns:
        0; 2 for a mistake in the files or flags, 1 for what training refuses. Both are
        printed, the latter's traceback is logged at DEBUG.
    """
    # TensorFlow only feeds the data: keep its start-up quiet.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = make_parser(command)
    try:
        flags = gin_flags.parse_flags(sys.argv[1:] if argv is None else argv, parser)
        config = load(flags)
        if command == "config" or flags.explain is not None:
            print(config.explain(flags.explain or ""))
            config.check_values()
            return 0
        distributed.initialize(flags)
        engine.train(**_arguments_together(config))
    except ConfigError as error:
        print(f"sentence-t5 {command}: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except Exception as error:
        if not is_for_the_user(error):
            raise
        _logger.debug("Training was refused here:", exc_info=True)
        print(f"sentence-t5 {command}: error: {_message(error)}", file=sys.stderr)
        return _REFUSED
    return 0
