"""``sentence-t5 inspect``: say what a checkpoint of any format holds.

sentence-t5 inspect PATH            format, encoder, vocabulary, prompts
sentence-t5 inspect PATH --names    every array as well
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence

from sentence_t5 import pretrained


def describe(path: str | os.PathLike, step: int | None = None) -> Iterator[str]:
    """Yields lines about a checkpoint, of which only headers are read.

    Args:
        path: as in ``pretrained.open_checkpoint``.
        step: the step, where a folder of ours holds several.
    """
    source = pretrained.open_checkpoint(path, step)
    yield f"{source.path}: {source.family}"
    if source.config is None:
        yield "encoder: unknown; the names are of no T5"
    else:
        t5 = source.config.to_dict().pop("t5")
        yield "T5: " + ", ".join(f"{k}={t5[k]}" for k in _SHAPE_FIELDS)
        yield (
            f"encoder: pooling={source.config.pooling}, "
            f"projection_dim={source.config.projection_dim}, "
            f"normalize={source.config.normalize}, "
            f"pool_instruction={source.config.pool_instruction}, "
            f"{source.config.num_params():,} parameters"
        )
    if source.vocabulary is None:
        yield "vocabulary: none"
    else:
        digest = hashlib.sha256(source.vocabulary.model_bytes).hexdigest()
        yield f"vocabulary: sha256 {digest}, {source.vocabulary.extra_ids} sentinels"
    yield f"max_length: {source.max_length}"
    for name, prompt in source.prompts.items():
        default = " (default)" if name == source.default_prompt else ""
        yield f"prompt {name}: {prompt!r}{default}"
    for name in source.never_needed:
        yield f"not needed: {name}"


def list_names(path: str | os.PathLike, step: int | None = None) -> Iterator[str]:
    """Yields one line per array: our name or its own, shape, dtype."""
    source = pretrained.open_checkpoint(path, step)
    for title, held in (("", source.tensors), ("foreign: ", source.foreign)):
        for name, tensor in sorted(held.items()):
            shape = " ".join(map(str, tensor.shape))
            yield f"{title}{name} [{shape}] {tensor.dtype}"


_SHAPE_FIELDS = (
    "vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "num_layers",
    "num_decoder_layers", "mlp_activations", "relpos_num_buckets",
    "relpos_max_distance", "layer_norm_epsilon",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="sentence-t5 inspect", description="Say what a checkpoint holds."
    )
    parser.add_argument("checkpoint", help="folder, file, or a model's id on the hub")
    parser.add_argument("--names", action="store_true", help="list every array")
    parser.add_argument("--step", type=int, help="checkpoint of a model_dir")
    args = parser.parse_args(argv)
    try:
        for line in describe(args.checkpoint, args.step):
            print(line)
        if args.names:
            for line in list_names(args.checkpoint, args.step):
                print(line)
    except (OSError, ValueError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
