"""Turns tokenized examples into padded batches, by index.

The order is a pure function of the seed and the step. Step s of an epoch of k = n // B
batches belongs to epoch s // k; each epoch is a permutation of the rows, computed for a
position without listing it, so that resuming is a seek. No batch mixes two epochs, and
no epoch holds a row twice. Host h of H builds rows [h B/H : (h+1) B/H] of the global
batch, which does not depend on H.

In a mixture, each task walks through epochs of its own. Mixed by rows, it gives every
batch the same number of rows, its share of B; mixed by batches, it gives whole batches,
its share of all (`schedules`).
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from sentence_t5 import names, permutation, schedules, text_rows
from sentence_t5.tokenized import TokenizedExamples

_logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]


class Batches(Protocol):
    """What training walks through."""

    def batch(self, step: int) -> tuple[Batch, np.ndarray]:
        """Builds this host's part of the batch for `step`, and its rows' ids."""


# Feature of a task -> keys of a batch: the tokens, and how many are an instruction's.
KEYS = {
    names.INPUTS: (names.LEFT_TOKENS, names.LEFT_INSTRUCTION_LENGTHS),
    names.TARGETS: (names.RIGHT_TOKENS, names.RIGHT_INSTRUCTION_LENGTHS),
    names.NEGATIVE_TARGETS: (
        names.NEGATIVE_TOKENS,
        names.NEGATIVE_INSTRUCTION_LENGTHS,
    ),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One task's place in the batches.

    Attributes:
      examples: its rows.
      num_rows: how many rows it gives to each global batch that it is in.
      first_id: the id of its row 0; the tasks of a mixture are numbered end to end.
    """

    examples: TokenizedExamples
    num_rows: int
    first_id: int = 0


class TrainBatches:
    """Batches by step number; see the module.

    Attributes:
      batch_size: pairs in the global batch.
      lengths: tokens per text of each feature.
      has_instructions: whether batches have lengths of instructions.
      steps_per_epoch: batches in one pass over the rows; for a mixture, over the task
        whose rows last longest.
      num_truncated: for each feature, how many texts are longer than its length.
      num_unused_negatives: negatives beyond `num_negatives`, left out of each epoch.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        lengths: Mapping[str, int],
        *,
        seed: int,
        shuffle: bool,
        num_negatives: int,
        process_index: int,
        process_count: int,
        schedule: schedules.Schedule | None = None,
    ):
        """Makes the batches; see `datasets.make_batches`.

        With a schedule, each batch is of one part; without, of sum(part.num_rows) rows
        of all parts.
        """
        self._parts = parts
        self._schedule = schedule
        self.lengths = dict(lengths)
        self._seed = seed
        self._shuffle = shuffle
        self.num_negatives = num_negatives
        batch_size = sum(part.num_rows for part in parts)
        # What a batch holds is fixed, so that a step is compiled once.
        self.has_instructions = any(p.examples.has_instructions for p in parts)
        self._has_switch = not all(p.examples.in_batch_negatives for p in parts)
        if schedule is not None:
            batch_size = parts[0].num_rows
        self.batch_size = batch_size
        self._process_index = process_index
        self._process_count = process_count
        self.steps_per_epoch = self._count_steps_per_epoch()
        self.num_truncated = text_rows.count_truncated(
            [p.examples for p in parts], lengths
        )
        self.num_unused_negatives = sum(
            int(np.maximum(np.diff(p.examples.negative_rows) - num_negatives, 0).sum())
            for p in parts
            if num_negatives
        )
        if self.num_unused_negatives:
            _logger.info(
                "%d hard negatives are left out of each epoch: rows with more than "
                "num_negatives=%d draw theirs anew each time.",
                self.num_unused_negatives,
                num_negatives,
            )

    def batch(self, step: int) -> tuple[Batch, np.ndarray]:
        """Builds this host's rows of the batch for `step`.

        Returns:
          The arrays (left and right tokens int32 [b L], with negatives also
          negative_tokens int32 [b N L] and negative_mask bool [b N]; where a task has
          instructions, their lengths int32 [b], [b N]; where a task's rows are no
          negatives to each other, in_batch bool [b]), and the rows' ids int64 [b].
        """
        share = self.batch_size // self._process_count
        first = self._process_index * share
        return self.rows(step, np.arange(first, first + share))

    def rows(self, step: int, places: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Builds any rows of the global batch for `step`.

        Args:
          step: which batch.
          places: the rows' places in it, int [b].

        Returns:
          As `batch`, the rows in the order of `places`.
        """
        ids = np.empty(len(places), np.int64)
        batch: Batch = {}
        for part, inside, rows, key in self._chosen(step, places):
            ids[inside] = part.first_id + rows
            for name, values in self._piece(part, rows, key).items():
                if name not in batch:
                    batch[name] = np.empty(
                        (len(places), *values.shape[1:]), values.dtype
                    )
                batch[name][inside] = values
        return batch, ids

    def text_lengths(self, step: int) -> np.ndarray:
        """Counts the tokens of all texts in the batch for `step`, without reading them.

        Returns:
          int [B 2+N]: left, right and negatives as padding would leave them; 0 where
          there is no negative.
        """
        places = np.arange(self.batch_size)
        lengths = np.zeros((self.batch_size, 2 + self.num_negatives), np.int64)
        for part, inside, rows, key in self._chosen(step, places):
            wanted = {names.INPUTS: rows[:, None], names.TARGETS: rows[:, None]}
            if self.num_negatives:
                wanted[names.NEGATIVE_TARGETS] = text_rows.choose_negatives(
                    part.examples.negative_rows, rows, self.num_negatives, key
                )
            columns = [
                text_rows.trimmed_lengths(
                    part.examples.texts[feature], texts, self.lengths[feature]
                )
                for feature, texts in wanted.items()
            ]
            lengths[inside] = np.concatenate(columns, axis=1)
        return lengths

    @property
    def num_kinds(self) -> int:
        """How many tasks a batch may be of, if it is of one; else 1."""
        return 1 if self._schedule is None else len(self._parts)

    def kind(self, step: int) -> int:
        """Returns which task the batch is of, if it is of one; else 0."""
        return 0 if self._schedule is None else self._schedule.at(step)[0]

    def _chosen(
        self, step: int, places: np.ndarray
    ) -> Iterator[tuple[Part, np.ndarray, np.ndarray, int]]:
        """Yields each part, which of `places` it fills, its rows there, and a key."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}.")
        start = 0
        for index, part_step in self._parts_of(step):
            part = self._parts[index]
            inside = (places >= start) & (places < start + part.num_rows)
            if inside.any():
                epoch, rows = self._rows(index, part_step, places[inside] - start)
                yield part, inside, rows, permutation.mix(self._seed, index, epoch, 1)
            start += part.num_rows

    def _parts_of(self, step: int) -> list[tuple[int, int]]:
        """Returns the parts in a batch, each with the number of its batches before."""
        if self._schedule is not None:
            return [self._schedule.at(step)]
        return [(index, step) for index in range(len(self._parts))]

    def _count_steps_per_epoch(self) -> int:
        steps = [len(p.examples) // p.num_rows for p in self._parts]
        if self._schedule is not None:
            shares = self._schedule.shares
            steps = [int(n / share) for n, share in zip(steps, shares, strict=True)]
        return max(steps)

    def _piece(self, part: Part, rows: np.ndarray, key: int) -> Batch:
        """Builds the rows of one part, with what any other part has."""
        piece = _arrays(
            part.examples,
            rows,
            self.lengths,
            self.num_negatives,
            key,
            with_instruction_lengths=self.has_instructions,
        )
        if self._has_switch:
            in_batch = part.examples.in_batch_negatives
            piece[names.IN_BATCH] = np.full(len(rows), in_batch)
        return piece

    def _rows(
        self, index: int, step: int, places: np.ndarray
    ) -> tuple[int, np.ndarray]:
        """Returns the epoch, and the rows at places in a part's share of a batch."""
        part = self._parts[index]
        num = len(part.examples)
        epoch, batch = divmod(step, num // part.num_rows)
        positions = places.astype(np.int64) + batch * part.num_rows
        if not self._shuffle:
            return epoch, positions
        return epoch, permutation.permute(
            positions, num, permutation.mix(self._seed, index, epoch)
        )


def eval_batches(
    examples: TokenizedExamples,
    lengths: Mapping[str, int],
    *,
    batch_size: int,
    num_negatives: int,
    process_index: int,
    process_count: int,
) -> Iterator[Batch]:
    """Yields this host's rows of every batch, in order; see `datasets.eval_batches`."""
    share = batch_size // process_count
    for first in range(0, len(examples), batch_size):
        rows = np.arange(share, dtype=np.int64) + first + process_index * share
        mask = rows < len(examples)
        real = rows[mask]
        found = _arrays(
            examples,
            real,
            lengths,
            num_negatives,
            key=0,
            with_instruction_lengths=examples.has_instructions,
        )
        if not examples.in_batch_negatives:
            found[names.IN_BATCH] = np.zeros(len(real), bool)
        if examples.scores is not None:
            found[names.SCORES] = np.asarray(examples.scores[real], np.float32)
        batch = {names.ROW_MASK: mask}
        for name, values in found.items():
            batch[name] = np.zeros((share, *values.shape[1:]), values.dtype)
            batch[name][mask] = values
        yield batch


def _arrays(
    examples: TokenizedExamples,
    rows: np.ndarray,
    lengths: Mapping[str, int],
    num_negatives: int,
    key: int,
    *,
    with_instruction_lengths: bool,
) -> Batch:
    """Pads the texts of some rows; `key` draws the negatives of rows with more."""
    batch = {}

    def add(feature: str, wanted: np.ndarray) -> None:
        """Adds some texts of a feature, [...] → tokens [... L]; -1 is no text."""
        tokens_key, lengths_key = KEYS[feature]
        real = wanted >= 0
        length = lengths[feature]
        tokens = np.zeros((*wanted.shape, length), np.int32)
        counts = np.zeros(wanted.shape, np.int32)
        tokens[real], counts[real] = text_rows.pad(
            examples.texts[feature], wanted[real], length
        )
        batch[tokens_key] = tokens
        if with_instruction_lengths:
            batch[lengths_key] = counts

    add(names.INPUTS, rows)
    add(names.TARGETS, rows)
    if num_negatives:
        chosen = text_rows.choose_negatives(
            examples.negative_rows, rows, num_negatives, key
        )
        add(names.NEGATIVE_TARGETS, chosen)
        batch[names.NEGATIVE_MASK] = chosen >= 0
    return batch
