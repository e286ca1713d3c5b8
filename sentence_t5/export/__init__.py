"""``sentence-t5 export``: hand a model to other people's tools.

    sentence-t5 export MODEL --format=sentence-transformers --output=FOLDER

A checkpoint of any format that ``pretrained`` opens becomes a sentence-transformers
folder, a StableHLO program or an ONNX graph.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from sentence_t5 import pretrained

FORMATS = ("sentence-transformers", "stablehlo", "onnx")


def export(
    path: str | os.PathLike,
    output: str | os.PathLike,
    output_format: str = "sentence-transformers",
    step: int | None = None,
) -> None:
    """Writes a model in another format.

    Args:
        path: of the model, as in ``pretrained.open_checkpoint``.
        output: folder to write, which must be new or empty.
        output_format: one of ``FORMATS``.
        step: the checkpoint of a model_dir; the newest by default.

    Raises:
        FileExistsError: ``output`` holds files.
        ValueError: the format can't hold this encoder, or ``path`` holds none.
        ImportError: what the format takes is not installed.
    """
    if output_format not in FORMATS:
        raise ValueError(
            f"format: got {output_format!r}, expected one of {', '.join(FORMATS)}."
        )
    folder = pathlib.Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists and is not an empty folder. Name another folder."
        )
    source = pretrained.open_checkpoint(path, step)
    if source.config is None:
        raise ValueError(
            f"{path} does not say which encoder its weights are: {source.family}, "
            "without a config. Name the model_dir with encoder.json in it."
        )
    if output_format == "sentence-transformers":
        from sentence_t5.export import model_card, st_folder

        st_folder.check_pooling(source.config)
        st_folder.write_folder(source, folder, model_card.make_card(source, path))
        return
    from sentence_t5.export import programs

    if output_format == "onnx":
        programs.write_onnx(source, folder)
    else:
        programs.write_stablehlo(source, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="sentence-t5 export",
        description="Write a model as a sentence-transformers folder, a StableHLO "
        "program or an ONNX graph.",
    )
    parser.add_argument("model", help="a model_dir, or any checkpoint import reads")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument("--step", type=int, help="checkpoint; the newest by default")
    args = parser.parse_args(argv)
    try:
        export(args.model, args.output, args.format, args.step)
    except (OSError, ValueError, ImportError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {args.format}")
    return 0
