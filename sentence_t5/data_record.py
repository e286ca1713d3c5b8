"""What a checkpoint records of its data, and whether that is the same.

Which rows a step has, and which negatives, is a pure function of these values and the
step. So a run that goes on with the same values goes on at its place in the data, and
one with others can't. How rows are laid out, lengths and packing, may change.
"""

import os
from collections.abc import Mapping
from typing import Any

from sentence_t5 import datasets


def describe(
    cfg: datasets.DatasetConfig, examples: datasets.Examples
) -> dict[str, Any]:
    """Returns what the order of the batches depends on, to be kept with a checkpoint.

    Args:
      cfg: what was read.
      examples: from `datasets.load_examples(cfg)`.
    """
    record = {
        "fingerprint": examples.fingerprint,
        "rows": len(examples),
        "batch_size": cfg.batch_size,
        "seed": cfg.seed,
        "shuffle": cfg.shuffle,
        "num_negatives": cfg.num_negatives,
    }
    # Younger than some checkpoints: said where it matters.
    if cfg.mix_by != "rows":
        record["mix_by"] = cfg.mix_by
    if cfg.on_crowding != "error":
        record["on_crowding"] = cfg.on_crowding
    return record


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], where: str | os.PathLike
) -> None:
    """Refuses to go on with other data than a checkpoint's.

    Args:
      before: what `describe` returned when it was saved.
      now: what it returns now.
      where: the folder of the checkpoint, for the message.

    Raises:
      ValueError: they differ.
    """
    changed = [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ValueError(
            f"{where} was trained on other data: {'; '.join(changed)}. Its place in "
            "the data can't be kept. Use another model_dir; --initial_checkpoint_path "
            "starts it from these weights."
        )
