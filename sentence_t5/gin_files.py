"""From a command line to a checked configuration, and from there to a run.

    --gin_file=F ... --train_file=T --gin.NAME=V    (later ones win)
      ─► gin_reader: what was set, and where
      ─► gin_checks: nothing without effect, nothing missing
      ─► the arguments of ``engine.train``

The syntax is T5X's (``--gin_file``, ``--gin.NAME=value``, ``--gin_search_paths``), plus
plain flags for the values that every run needs, quoted here rather than by the user.
"""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import gin

from sentence_t5 import distributed, engine, gin_checks, gin_explain, gin_reader
from sentence_t5.gin_reader import ConfigError, Key

_ROOT = "engine.train"
# The same function, by the name that T5X gives it.
_T5X_ROOT = "__main__.train"
_USAGE_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Flag:
    """A plain flag for a macro or a parameter.

    Attributes:
        name: of the flag, without dashes.
        target: the macro or parameter it sets.
        kind: how the value is written: str, int, float, or tuple for texts between
            commas.
        help: one line for ``--help``.
        file: a gin file that has the target, read after the given ones if they don't.
    """

    name: str
    target: str
    kind: type
    help: str
    file: str | None = None

    def value(self, text: str) -> Any:
        """Reads the flag's value.

        Raises:
            ConfigError: the text is not of the flag's kind.
        """
        try:
            return tuple(text.split(",")) if self.kind is tuple else self.kind(text)
        except ValueError:
            expected = {int: "a whole number", float: "a number"}[self.kind]
            raise ConfigError(
                f"--{self.name}: got {text!r}, expected {expected}."
            ) from None


_FILES = "gin/data/files.gin"
FLAGS = (
    Flag("model_dir", "MODEL_DIR", str, "folder of checkpoints, metrics, config.gin"),
    Flag("train_steps", "TRAIN_STEPS", int, "steps to train for"),
    Flag("batch_size", "BATCH_SIZE", int, "pairs in the global batch"),
    Flag("max_length", "MAX_LENGTH", int, "tokens kept of a text, EOS included"),
    Flag("packed_length", "PACKED_LENGTH", int, "pack texts into rows of this length"),
    Flag("train_file", "TRAIN_FILE", str, "a TSV or JSONL of text pairs", _FILES),
    Flag("left", "files.task.left", str, "its column of left texts", _FILES),
    Flag("right", "files.task.right", str, "its column of right texts", _FILES),
    Flag(
        "negatives", "files.task.negatives", tuple,
        "its column(s) of hard negatives, between commas", _FILES,
    ),
    Flag(
        "medi_file", "MEDI_FILE", str, "a JSONL of rows with instructions",
        "gin/data/medi.gin",
    ),
    Flag("num_negatives", "NUM_NEGATIVES", int, "hard negatives used of each pair"),
    Flag(
        "eval_file", "EVAL_FILE", str, "a TSV of sentence pairs with scores (STS)",
        "gin/data/sts_file.gin",
    ),
    Flag(
        "vocabulary", "VOCABULARY_PATH", str, "a SentencePiece model, T5's or your own",
        "gin/data/t5_vocabulary.gin",
    ),
    Flag(
        "initial_checkpoint_path", "INITIAL_CHECKPOINT_PATH", str,
        "model folder or checkpoint to take the first weights from",
    ),
    Flag(
        "allow_missing", "ALLOW_MISSING", tuple,
        "patterns of weights that it may lack, between commas: projection/.*",
    ),
    Flag(
        "ignore", "IGNORE", tuple,
        "patterns of weights in it to leave out, between commas: decoder/.*",
    ),
    Flag("learning_rate", "LEARNING_RATE", float, "the schedule's highest value"),
    Flag("seed", "RANDOM_SEED", int, "of the weights, the dropout and the data order"),
    Flag("eval_period", "EVAL_PERIOD", int, "steps between evaluations"),
    Flag("save_period", "SAVE_PERIOD", int, "steps between checkpoints"),
)  # fmt: skip
_BY_TARGET = {flag.target: flag for flag in FLAGS}


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
            # gin appends the call chain, innermost first.
            message, *calls = str(e).split("\n  In call to configurable ")
            inside = f" (in {calls[0].split()[0].strip(chr(39))})" if calls else ""
            raise ConfigError(message.strip() + inside) from e

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose and change a configuration."""
    parser.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE",
        help="a gin file, such as gin/st5_tiny_mean.gin; several are read in order",
    )  # fmt: skip
    parser.add_argument(
        "--gin_search_paths", default="", metavar="DIRS",
        help="folders to look for gin files in first, separated by commas",
    )  # fmt: skip
    parser.add_argument(
        "--gin_bindings", action="append", default=[], metavar="NAME=VALUE",
        help="same as --gin.NAME=VALUE: set a macro or a parameter, in gin's syntax",
    )  # fmt: skip
    parser.add_argument(
        "--explain", metavar="NAME",
        help="print what a macro or parameter is set to, and where; then exit",
    )  # fmt: skip
    for flag in FLAGS:
        parser.add_argument(f"--{flag.name}", help=f"{flag.help} (sets {flag.target})")


def parse_flags(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> argparse.Namespace:
    """Parses a command line with ``add_flags``' flags and ``--gin.NAME=value``.

    Args:
        argv: the arguments after the command.
        parser: has the flags; its own are parsed too.

    Returns:
        The flags.

    Raises:
        ConfigError: a flag is unknown or incomplete.
    """
    bindings, rest = [], []
    for argument in argv:
        if not argument.startswith("--gin."):
            rest.append(argument)
        elif "=" in argument:
            bindings.append(argument)
        else:
            raise ConfigError(f"{argument}: write {argument}=VALUE, in one word.")
    flags, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        word = unknown[0].split("=")[0]
        raise ConfigError(f"Unknown flag {word}.{gin_reader.suggest(word, known)}")
    flags.gin_bindings = [f"--gin.{b}" for b in flags.gin_bindings] + bindings
    return flags


def load(flags: argparse.Namespace) -> Config:
    """Reads the gin files and flags and checks them.

    Args:
        flags: from ``parse_flags``.

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
    for name in flags.gin_file:
        reader.read_file(name)
    _read_plain_flags(reader, flags)
    for binding in flags.gin_bindings:
        name, _, value = binding.removeprefix("--gin.").partition("=")
        reader.read_flag(name.strip(), value.strip(), binding)
    root = _root(reader)
    usage = gin_checks.check(reader.bindings, root)
    _current = Config(reader, usage, root)
    return _current


def _read_plain_flags(reader: gin_reader.Reader, flags: argparse.Namespace) -> None:
    given = {
        flag: flag.value(text)
        for flag in FLAGS
        if (text := getattr(flags, flag.name)) is not None
    }
    for flag in given:
        if flag.file and not reader.has(flag.target):
            reader.read_file(flag.file, included_at=f"--{flag.name}")
    for flag, value in given.items():
        shown = f"--{flag.name}={getattr(flags, flag.name)}"
        if not reader.has(flag.target):
            raise ConfigError(
                f"{shown} sets {flag.target}, which the given gin files don't have: "
                f"{', '.join(reader.files)}."
            )
        reader.read_flag(flag.target, repr(value), shown)
        if flag.name == "negatives" and flags.num_negatives is None:
            reader.read_flag("NUM_NEGATIVES", repr(len(value)), shown)


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
    flag = _BY_TARGET.get(shown)
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
    add_flags(parser)
    if command == "train":
        distributed.add_flags(parser)
    return parser


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
        0, or 2 for a mistake in the files or flags, which is printed.
    """
    # TensorFlow only feeds the data: keep its start-up quiet.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = make_parser(command)
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv, parser)
        config = load(flags)
        if command == "config" or flags.explain is not None:
            print(config.explain(flags.explain or ""))
            return 0
        distributed.initialize(flags)
        arguments = _arguments_together(config)
    except ConfigError as error:
        print(f"sentence-t5 {command}: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    engine.train(**arguments)
    return 0
