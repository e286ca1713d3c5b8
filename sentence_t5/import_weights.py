"""``sentence-t5 import``: make a model_dir out of somebody else's checkpoint.

    sentence-t5 import sentence-transformers/sentence-t5-base --model_dir=runs/st5
    sentence-t5 import t5-base --model_dir=runs/raw --pooling=first

The folder is one that ``encode``, ``evaluate`` and ``export`` take, and that training
can start from (``--initial_checkpoint_path``). The report says what became of
each name.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from sentence_t5 import checkpoint_files, descriptions, pretrained
from sentence_t5 import encoder as encoder_lib
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.pretrained import writing

_DEFAULT_MAX_LENGTH = 512


def import_weights(
    path: str | os.PathLike,
    model_dir: str | os.PathLike,
    *,
    pooling: str | None = None,
    pool_instruction: bool | None = None,
    vocabulary: str | os.PathLike | None = None,
    extra_ids: int | None = None,
    max_length: int | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    step: int | None = None,
) -> pretrained.Report:
    """Writes a model_dir whose checkpoint of step 0 holds the weights.

    Args:
        path: as in ``pretrained.open_checkpoint``.
        model_dir: folder to write; it must hold no checkpoints.
        pooling: instead of the checkpoint's own (the mean, for a plain T5).
        pool_instruction: instead of what the checkpoint says; False for INSTRUCTOR.
        vocabulary: SentencePiece model, where the checkpoint has none of its own.
        extra_ids: sentinels behind the vocabulary's pieces; 100 for T5.
        max_length: tokens that texts are trimmed to; the checkpoint's, or 512.
        allow_missing: patterns of parameters that may start fresh.
        ignore: patterns of tensors to leave out.
        step: the step, where a folder of ours holds several.

    Returns:
        What became of every name.

    Raises:
        FileExistsError: ``model_dir`` holds checkpoints.
        ValueError: no vocabulary, one larger than the table, or weights that don't fit.
    """
    root = checkpoint_files.absolute(model_dir) / checkpoint_files.CHECKPOINTS_DIR
    if checkpoint_files.list_steps(root):
        raise FileExistsError(f"{model_dir} holds checkpoints. Name another folder.")
    loaded = pretrained.load_encoder(
        path,
        pooling=pooling,
        pool_instruction=pool_instruction,
        allow_missing=allow_missing,
        ignore=ignore,
        step=step,
    )
    tokenizer = _make_tokenizer(loaded, vocabulary, extra_ids, path)
    if max_length is None:
        max_length = loaded.max_length or _DEFAULT_MAX_LENGTH
    descriptions.write_description(
        model_dir,
        loaded.config,
        tokenizer,
        max_length,
        prompts=loaded.prompts,
        default_prompt=loaded.default_prompt,
    )
    imported = {"path": str(path), "format": loaded.report.family}
    writing.write_step(model_dir, 0, loaded.parts, {"step": 0, "imported": imported})
    return loaded.report


def _make_tokenizer(
    loaded: pretrained.PretrainedEncoder,
    vocabulary: str | os.PathLike | None,
    extra_ids: int | None,
    path: str | os.PathLike,
) -> tokenizer_lib.Tokenizer:
    own = loaded.vocabulary
    if vocabulary is not None:
        return tokenizer_lib.Tokenizer(
            vocabulary, 100 if extra_ids is None else extra_ids
        )
    if own is None:
        raise ValueError(
            f"{path} has no vocabulary. Name its SentencePiece model with "
            "--vocabulary; T5's is spiece.model."
        )
    return tokenizer_lib.Tokenizer(
        own.model_bytes, own.extra_ids if extra_ids is None else extra_ids
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    args = vars(_parse(argv))
    path, model_dir = args.pop("checkpoint"), args.pop("model_dir")
    try:
        print(import_weights(path, model_dir, **args))
    except (OSError, ValueError) as error:
        print(f"import: {error}", file=sys.stderr)
        return 1
    print(f"{model_dir}: ready")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 import",
        description="Make a model_dir out of a checkpoint of Hugging Face, "
        "sentence-transformers, T5X or this package.",
    )
    parser.add_argument(
        "checkpoint", help="folder, T5X file, or a model's id on the Hugging Face hub"
    )
    parser.add_argument("--model_dir", required=True, help="folder to write")
    parser.add_argument(
        "--pooling",
        choices=encoder_lib.POOLINGS,
        help="the checkpoint's own by default; mean for a plain T5",
    )
    parser.add_argument(
        "--pool_instruction",
        action=argparse.BooleanOptionalAction,
        help="pool a prompt's tokens too; --no-pool_instruction for INSTRUCTOR models",
    )
    parser.add_argument("--vocabulary", help="SentencePiece model, if it has none")
    parser.add_argument("--extra_ids", type=int, help="sentinels; 100 for T5")
    parser.add_argument("--max_length", type=int, help="tokens a text is trimmed to")
    parser.add_argument(
        "--allow_missing", nargs="+", default=(), metavar="PATTERN",
        help="parameters that may start fresh, such as 'projection/.*'",
    )  # fmt: skip
    parser.add_argument(
        "--ignore", nargs="+", default=(), metavar="PATTERN",
        help="tensors to leave out, such as 'decoder/.*'",
    )  # fmt: skip
    parser.add_argument("--step", type=int, help="checkpoint of a model_dir")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
