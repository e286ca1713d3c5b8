"""From the axes of a sweep to its runs: a checked command for each, of both engines.

    sizes × poolings × axes ─► [Run(name, values, arguments, t5x_arguments, ...)]

Every run's configuration is read the way training reads it, so that a misspelt name, an
unknown size or an axis without effect ends the sweep before its first run starts.
"""

import argparse
import dataclasses
import itertools
import pathlib
import re
import shlex
from collections.abc import Iterable, Sequence

from sentence_t5 import engine, gin_files, gin_flags, gin_reader

SIZE = "size"
POOLING = "pooling"
_GIN_FILE = "gin_file"
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        values: axis -> value, as they were written.
        model_dir: its folder.
        arguments: of `python -m sentence_t5.train`.
        t5x_arguments: of T5X's train.py, for the same configuration.
        total_steps: steps it is to have in the end.
        num_params: parameters of its model.
        settings: gin name -> value, as text; all that the run is made of but its
            folder.
    """

    name: str
    values: dict[str, str]
    model_dir: str
    arguments: tuple[str, ...]
    t5x_arguments: tuple[str, ...]
    total_steps: int
    num_params: int
    settings: dict[str, str]

    def command(self) -> str:
        """Returns the command line for this package's engine."""
        return " ".join(["python -m sentence_t5.train", *map(quote, self.arguments)])

    def t5x_command(self) -> str:
        """Returns the command line for T5X."""
        return " ".join(
            ["python3 ${T5X_DIR}/t5x/train.py", *map(quote, self.t5x_arguments)]
        )


def quote(word: str) -> str:
    """Quotes a word for a shell, in double quotes if it has single ones of gin's."""
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def split_values(text: str) -> list[str]:
    """Splits an axis' values at the commas outside brackets and quotes.

    Example: "1,2" gives two values, "('relu',),('gelu','linear')" two as well.

    Args:
        text: the values, between commas.

    Raises:
        ConfigError: a value is empty, or a bracket or quote is left open.
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        depth += (not quote) * ((letter in _OPENING) - (letter in _CLOSING))
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if depth or quote or not all(values):
        raise gin_reader.ConfigError(
            f"{text!r} is no list of values between commas: a bracket or quote is left "
            "open, or a value is empty."
        )
    return values


def parse_axis(text: str) -> tuple[str, list[str]]:
    """Reads ``NAME=v1,v2``.

    Raises:
        ConfigError: it is not of that form.
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").removeprefix("gin.")
    if not equals or not name:
        raise gin_reader.ConfigError(
            f"--axis={text}: expected NAME=v1,v2 with the name of a flag or of a gin "
            "macro or parameter, such as --axis=learning_rate=0.001,0.01."
        )
    return name, split_values(values)


def plan(
    *,
    sizes: Sequence[str],
    poolings: Sequence[str],
    axes: Sequence[tuple[str, Sequence[str]]],
    gin_file: Sequence[str],
    more: Sequence[str],
    out: str,
) -> list[Run]:
    """Expands the axes, the last one fastest, and checks every run.

    Args:
        sizes: names of files in ``gin/sizes``, or none.
        poolings: names of files in ``gin/pooling``, or none.
        axes: further axes: a flag or gin name, and its values.
        gin_file: gin files for all runs.
        more: further arguments for all runs.
        out: folder of the sweep.

    Returns:
        The runs.

    Raises:
        ConfigError: a name or value is wrong, or two runs would be the same.
    """
    if any(word.split("=")[0] == "--model_dir" for word in more):
        raise gin_reader.ConfigError(
            "A sweep gives each run a folder of its own: pass --out, not --model_dir."
        )
    names = [name for name, _ in axes]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise gin_reader.ConfigError(f"Axes given twice: {', '.join(repeated)}.")
    parsed = gin_flags.parse_flags(more, gin_files.make_parser("train"))
    folders = gin_reader.search_paths(_search_paths(parsed))
    _check_known(SIZE, sizes, "gin/sizes", folders)
    _check_known(POOLING, poolings, "gin/pooling", folders)
    is_base = bool(gin_file) and _says_what_to_run(gin_file, folders)
    if not is_base and not sizes:
        raise gin_reader.ConfigError(
            "Nothing says what to run: pass --sizes, or a --gin_file that does, such "
            "as gin/st5_tiny_mean.gin."
        )
    if not is_base:
        poolings = poolings or ["mean"]
        for size, pooling in itertools.product(sizes, poolings):
            _check_run_file(size, pooling, folders)
    table = [(SIZE, sizes), (POOLING, poolings), *axes]
    table = [(name, values) for name, values in table if values]
    runs = []
    for combination in itertools.product(*(values for _, values in table)):
        values = dict(zip([name for name, _ in table], combination, strict=True))
        runs.append(_make_run(values, gin_file, is_base, more, out))
    _check_different(runs)
    return runs


def _make_run(
    values: dict[str, str],
    gin_file: Sequence[str],
    is_base: bool,
    more: Sequence[str],
    out: str,
) -> Run:
    """Builds a run's arguments and reads its configuration."""
    files = list(gin_file)
    if is_base:
        files += [f"gin/sizes/{values[SIZE]}.gin"] if SIZE in values else []
        files += [f"gin/pooling/{values[POOLING]}.gin"] if POOLING in values else []
    else:
        files.insert(0, f"gin/st5_{values[SIZE]}_{values[POOLING]}.gin")
    flags = {flag.name for flag in gin_flags.FLAGS}
    set_by_axes = []
    for name, value in values.items():
        if name == _GIN_FILE:
            files.append(value)
        elif name in flags:
            set_by_axes.append(f"--{name}={value}")
        elif name not in (SIZE, POOLING):
            set_by_axes.append(f"--gin.{name}={value}")
    name = run_name(values)
    model_dir = f"{out.rstrip('/')}/{name}"
    arguments = (
        *(f"--gin_file={file}" for file in files),
        f"--model_dir={model_dir}",
        *more,
        *set_by_axes,
    )
    parsed = gin_flags.parse_flags(arguments, gin_files.make_parser("train"))
    t5x_arguments = _t5x_arguments(parsed)
    config = gin_files.load(parsed)
    if config.usage.required:
        missing = ", ".join(gin_reader.show_key(key) for key in config.usage.required)
        raise gin_reader.ConfigError(f"{name}: {missing} has no value. Pass it.")
    return Run(
        name=name,
        values=values,
        model_dir=model_dir,
        arguments=arguments,
        t5x_arguments=t5x_arguments,
        total_steps=_value_of(config, "total_steps"),
        num_params=_num_params(),
        settings=read_settings(config.text()),
    )


def run_name(values: dict[str, str]) -> str:
    """Names a run after its values, in characters that any file system takes."""
    parts = [values[axis] for axis in (SIZE, POOLING) if axis in values]
    words = ["_".join(parts)] if parts else []
    for axis, value in values.items():
        if axis == _GIN_FILE:
            words.append(pathlib.PurePath(value).stem)
        elif axis not in (SIZE, POOLING):
            words.append(f"{axis}={value}")
    clean = [re.sub(r"[^\w.=+-]+", "-", word).strip("-") for word in words]
    return ",".join(clean) or "run"


def read_settings(text: str) -> dict[str, str]:
    """Reads a ``config.gin`` into gin name -> value, leaving out the run's folder.

    Args:
        text: as ``gin_files.summarize`` writes it, a statement going on in lines that
            start with a space.
    """
    statements: list[str] = []
    for line in text.splitlines():
        if line[:1] in (" ", "\t") and statements:
            statements[-1] += " " + line.strip().rstrip("\\")
        elif line.strip() and not line.startswith("#"):
            statements.append(line.rstrip("\\ "))
    settings = {}
    for statement in statements:
        name, equals, value = statement.partition("=")
        if equals and name.strip() != "MODEL_DIR":
            settings[name.strip()] = re.sub(r"\s+", " ", value.strip())
    return settings


def _t5x_arguments(parsed: argparse.Namespace) -> tuple[str, ...]:
    """Writes a command line in the words that T5X knows: gin files and bindings."""
    folders = _search_paths(parsed)
    reader = gin_reader.Reader(gin_reader.search_paths(folders))
    files = gin_flags.read_files(reader, parsed)
    settings = gin_flags.settings(parsed)
    return (
        *(f"--gin_file={file}" for file in files),
        *([f"--gin_search_paths={parsed.gin_search_paths}"] if folders else []),
        *(f"--gin.{each.target}={each.value!r}" for each in settings),
        *parsed.gin_bindings,
    )


def _value_of(config: gin_files.Config, parameter: str):
    """Follows a parameter of the root function through macros to its value."""
    key = ("", config.root, parameter)
    value = config.reader.bindings[key][-1].value
    while hasattr(value, "scopes"):
        macro = ("/".join(value.scopes), gin_reader.MACRO, "value")
        value = config.reader.bindings[macro][-1].value
    return value


def _num_params() -> int:
    """Counts the parameters of the model in the configuration that gin holds."""
    import gin

    try:
        return gin.get_configurable(engine.model)().encoder.num_params()
    except ValueError as error:  # gin's own kind of it can't go to another process.
        raise gin_reader.ConfigError(str(error)) from None


def _search_paths(parsed: argparse.Namespace) -> list[str]:
    return [path for path in parsed.gin_search_paths.split(",") if path]


def _says_what_to_run(gin_file: Iterable[str], folders: Sequence[str]) -> bool:
    """Whether gin files wire a run, or only change one."""
    reader = gin_reader.Reader(folders)
    for file in gin_file:
        reader.read_file(file)
    return reader.has("engine.train.model")


def _check_known(
    axis: str, given: Sequence[str], where: str, folders: Sequence[str]
) -> None:
    """Refuses a size or pooling without a file, listing those that have one."""
    known = {
        path.stem
        for folder in folders
        for path in (pathlib.Path(folder) / where).glob("*.gin")
    }
    for word in given:
        if word not in known:
            raise gin_reader.ConfigError(
                f"There is no {axis} {word!r}.{gin_reader.suggest(word, known)} There "
                f"are {', '.join(sorted(known))}."
            )


def _check_run_file(size: str, pooling: str, folders: Sequence[str]) -> None:
    name = f"gin/st5_{size}_{pooling}.gin"
    if not any((pathlib.Path(folder) / name).is_file() for folder in folders):
        raise gin_reader.ConfigError(
            f"There is no {name}. The pooling {pooling!r} goes on top of a run's file: "
            f"--gin_file=gin/st5_tiny_mean.gin --sizes={size} --poolings={pooling}."
        )


def _check_different(runs: Sequence[Run]) -> None:
    """Refuses an axis that changes nothing, and names that fall together."""
    by_name: dict[str, Run] = {}
    by_settings: dict[frozenset, Run] = {}
    for run in runs:
        same = by_name.setdefault(run.name, run)
        if same is not run:
            raise gin_reader.ConfigError(
                f"Two runs would share the folder {run.name}: {same.values} and "
                f"{run.values}. Write their values differently, or sweep them apart."
            )
        same = by_settings.setdefault(frozenset(run.settings.items()), run)
        if same is not run:
            raise gin_reader.ConfigError(
                f"{same.name} and {run.name} would be the same run: what tells them "
                "apart is overridden by another flag or file."
            )
