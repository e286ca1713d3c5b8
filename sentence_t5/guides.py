"""A guide: another encoder, frozen, whose cosines tell false negatives.

    batch ─► the guide's vectors of the same tokens ─► batch | {left_guide [B G], …}
          ─► candidates that it finds closer than the positive are left out of the loss

The guide lies on the training's mesh, sharded like a model in training, and encodes the
whole global batch at once, without gradients. It reads the token ids of the batch, so
that its vocabulary must be that of the data.

Source: Solatorio 2024, "GISTEmbed" (arXiv 2402.16829). There is no contrast between two
left or two right sides here, and so none to mask.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax

from sentence_t5 import (
    checkpoint_files,
    checkpoints,
    encoder,
    names,
    partitioning,
    steps,
    text_groups,
)
from sentence_t5 import tokenizer as tokenizer_lib

_logger = logging.getLogger(__name__)


def check_guide(path: str | None, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Checks that a guide is there and reads the ids of the data.

    Reads its description and vocabulary and finds its checkpoint; each host by itself,
    without collectives.

    Args:
        path: the guide's model_dir, or a checkpoint in it; None for no guide.
        tokenizer: what the batches' ids are of.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: an id is another piece in its vocabulary; its checkpoint is broken.
    """
    if path is None:
        return
    description = checkpoints.read_description(path)
    if difference := tokenizer.first_difference(description.tokenizer):
        number, ours, theirs = difference
        raise ValueError(
            f"LossConfig.guide is {path}, which is for another vocabulary: id {number} "
            f"is {theirs!r} there and {ours!r} in the data's, and the guide reads the "
            "same token ids. Name a model with the vocabulary of the data."
        )
    checkpoint_files.find_params(path)


def make_guide(
    path: str | None, partitioner: partitioning.Partitioner
) -> Callable[[steps.Batch], steps.Batch]:
    """Loads a guide and returns a function that adds its vectors to a batch.

    Loading contains collectives: all hosts call this, after ``check_guide`` on each.

    Args:
        path: the guide's model_dir, or a checkpoint in it; None for no guide, and a
            function that returns the batch as it is.
        partitioner: the mesh.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: its checkpoint is broken, or of another encoder than it says.
    """
    if path is None:
        return lambda batch: batch
    description = checkpoints.read_description(path)
    module = encoder.SentenceEncoder(description.encoder)
    shardings, expected = partitioner.encoder_params(description.encoder)
    params, step = checkpoints.load_params(path, shardings=shardings, expected=expected)
    _logger.info("Guided by %s, step %s.", path, step)

    def embed(params: Any, batch: steps.Batch) -> steps.Batch:
        with partitioner.scope():
            groups = text_groups.make_groups(batch)
            embedded = text_groups.embed_all(module, params, groups, None)
        sides = text_groups.ungroup(batch, embedded)
        keys = (names.LEFT_GUIDE, names.RIGHT_GUIDE, names.NEGATIVE_GUIDE)
        return {
            key: encoder.l2_normalize(side)
            for key, side in zip(keys, sides, strict=True)
            if side is not None
        }

    batch_sharding = partitioner.batch_sharding
    embed = jax.jit(
        embed, in_shardings=(shardings, batch_sharding), out_shardings=batch_sharding
    )
    return lambda batch: batch | embed(params, batch)
