"""``sentence-t5 encode``: turn a text file, one text a line, into vectors.

    sentence-t5 encode --model_dir=runs/mean --input=texts.txt --output=vectors.npy

Row ``i`` of the float32 [n E] array belongs to line ``i + 1``; a blank line is a text.
The file is read and written in parts, so that it may be larger than memory. It is read
twice, to count its lines first: a pipe is copied into a temporary file (``TMPDIR``).
"""

import argparse
import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence

from sentence_t5 import command_paths, inference, progress, vector_files

# Lines encoded at once: enough to sort by length well, few enough to hold.
_PART_LINES = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    args = _parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        command_paths.check_file("--input", args.input, "a text file, one text a line")
        command_paths.check_target("--output", args.output)
        with _readable_twice(args.input) as path:
            num_lines = sum(1 for _ in read_lines(path, shown_as=args.input))
            model = inference.SentenceT5.load(
                args.model_dir, args.step, dtype=args.dtype, dim=args.dim
            )
            encode_file(
                model,
                path,
                args.output,
                num_lines=num_lines,
                batch_size=args.batch_size,
                max_length=args.max_length,
                on_truncate=args.on_truncate,
                on_crowding=args.on_crowding,
                instruction=args.instruction,
                prompt_name=args.prompt_name,
            )
    except (OSError, ValueError, FloatingPointError) as error:
        print(f"encode: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {num_lines} vectors of width {model.embedding_dim}")
    return 0


def encode_file(
    model: inference.SentenceT5,
    input_path: str | os.PathLike,
    output_path: str | os.PathLike,
    *,
    num_lines: int,
    part_lines: int = _PART_LINES,
    **options,
) -> None:
    """Encodes the lines of a file into a ``.npy`` file, part by part.

    Args:
        model: the model.
        input_path: UTF-8 text, one text a line; no pipe whose lines were counted.
        output_path: where to write float32 [n E]; complete or not there at all.
        num_lines: lines in the input.
        part_lines: lines held in memory at once.
        **options: of ``SentenceT5.encode``.

    Raises:
        OSError: there is no room for the vectors.
        ValueError: the input has more lines or fewer.
    """
    temporary = f"{os.fspath(output_path)}.part"
    shape = (num_lines, model.embedding_dim)
    try:
        vectors = vector_files.create(temporary, shape)
        lines = read_lines(input_path)
        start = 0
        several = num_lines > part_lines
        with progress.bar("encode", num_lines, "text", shown=several) as bar:
            while part := list(itertools.islice(lines, part_lines)):
                if start + len(part) > num_lines:
                    raise _other_lines(input_path, num_lines, "more")
                show_progress = False if several else None
                vectors[start : start + len(part)] = model.encode(
                    part, show_progress=show_progress, **options
                )
                start += len(part)
                bar.update(len(part))
        if start < num_lines:
            raise _other_lines(input_path, num_lines, f"{start}")
        vectors.flush()
        os.replace(temporary, output_path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _other_lines(path: str | os.PathLike, expected: int, got: str) -> ValueError:
    """Returns the error of a file that isn't what it was when it was counted."""
    return ValueError(
        f"{path}: expected the {expected} lines that were counted, got {got}. "
        "Something writes to the file: encode a copy."
    )


@contextlib.contextmanager
def _readable_twice(path: str) -> Iterator[str]:
    """Yields the path, or that of a temporary copy of what can be read only once."""
    if os.path.isfile(path):
        yield path
        return
    with open(path, "rb") as pipe, tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield copy.name


def read_lines(
    path: str | os.PathLike, shown_as: str | os.PathLike | None = None
) -> Iterator[str]:
    """Yields the lines of a UTF-8 file without their ends.

    Args:
        path: the file.
        shown_as: what errors call it; its path by default.

    Raises:
        ValueError: a line that is not UTF-8; it is named.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{shown_as or path}, line {number}: byte {error.start} is not "
                    f"UTF-8 (0x{line[error.start]:02x}). Convert the file to UTF-8."
                ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 encode",
        description="Turn a UTF-8 text file, one text a line, into a .npy of vectors.",
    )
    parser.add_argument("--model_dir", required=True, help="what train wrote")
    parser.add_argument("--input", required=True, help="text file, one text a line")
    parser.add_argument("--output", required=True, help=".npy file to write")
    parser.add_argument("--step", type=int, help="checkpoint; the newest by default")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, help="the model's own by default")
    parser.add_argument(
        "--on_truncate", choices=("warn", "error", "ignore"), default="warn"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--dim", type=int, help="numbers to keep of each vector")
    parser.add_argument(
        "--instruction", help="put before each text; '' for none, not even the default"
    )
    parser.add_argument("--prompt_name", help="of one of the model's own prompts")
    parser.add_argument(
        "--on_crowding",
        choices=("error", "keep_text"),
        default="error",
        help="if an instruction leaves its text too little room",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
