"""The flags that choose and change a configuration.

The syntax is T5X's (``--gin_file``, ``--gin.NAME=value``, ``--gin_search_paths``), plus
plain flags for the values that every run needs, quoted here rather than by the user.
What they come to is for ``gin_files``.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from sentence_t5 import gin_reader
from sentence_t5.gin_reader import ConfigError


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
BY_TARGET = {flag.target: flag for flag in FLAGS}


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


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a plain flag sets.

    Attributes:
        target: a macro or parameter.
        value: its value.
        flag: the flag as it was given.
    """

    target: str
    value: Any
    flag: str


def settings(flags: argparse.Namespace) -> list[Setting]:
    """Returns what the plain flags set; ``--negatives`` says how many are used, too.

    Args:
        flags: from ``parse_flags``.

    Raises:
        ConfigError: a value is not of its flag's kind.
    """
    found = []
    for flag, text in _given(flags).items():
        value, shown = flag.value(text), f"--{flag.name}={text}"
        found.append(Setting(flag.target, value, shown))
        if flag.name == "negatives" and flags.num_negatives is None:
            found.append(Setting("NUM_NEGATIVES", len(value), shown))
    return found


def read_files(reader: gin_reader.Reader, flags: argparse.Namespace) -> list[str]:
    """Reads the given gin files, then those that plain flags need and they lack.

    Args:
        reader: what reads them.
        flags: from ``parse_flags``.

    Returns:
        The files' names, in order, without those that they include.

    Raises:
        ConfigError: a file is missing or has a mistake.
    """
    files = list(flags.gin_file)
    for name in files:
        reader.read_file(name)
    for flag in _given(flags):
        if flag.file and not reader.has(flag.target):
            reader.read_file(flag.file, included_at=f"--{flag.name}")
            files.append(flag.file)
    return files


def _given(flags: argparse.Namespace) -> dict[Flag, str]:
    """Returns the plain flags that were given, and their texts."""
    texts = {flag: getattr(flags, flag.name) for flag in FLAGS}
    return {flag: text for flag, text in texts.items() if text is not None}
