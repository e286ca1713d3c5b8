"""Packs the texts of a batch into rows of one length, so that little of it is padding.

    pairs ─► devices, so that each has about as many tokens
          ─► rows of a device, best fit, longest text first ─► tokens, slots [R P]

A text stays whole, and on the device that has its pair. A batch holds the pairs that it
holds without packing. The number of rows is fixed beforehand, large enough for all but
one batch in tens of thousands; one that needs more gets more, and its step is compiled
anew. All of it is a pure function of the step.

Source: best fit decreasing, Johnson 1973, "Near-optimal bin packing algorithms".
"""

import collections
import logging
import math

import numpy as np

from sentence_t5 import batching, names

_logger = logging.getLogger(__name__)

# Batches looked at for each task, to find the number of rows.
_SAMPLES = 32
# Rows are made for the mean need and so many standard deviations.
_DEVIATIONS = 4.0
# A row may have so many times the texts of a mean row.
_SLOT_FACTOR = 2.0


class PackedBatches:
    """`TrainBatches`, packed; see the module.

    Attributes:
      row_length: tokens of a row, P.
      num_rows: rows of a global batch, R, except where it needs more.
      num_slots: texts that a row may have, S.
      fill: part of the tokens that isn't padding, in the batches looked at.
      steps_per_epoch: as `TrainBatches`.
      num_truncated: as `TrainBatches`.
    """

    def __init__(
        self,
        batches: batching.TrainBatches,
        row_length: int,
        *,
        num_rows: int | None,
        num_shards: int,
        num_chunks: int,
        process_index: int,
        process_count: int,
    ):
        """Finds the number of rows.

        Args:
          batches: the padded batches.
          row_length: tokens of a row.
          num_rows: rows of a global batch; None finds them.
          num_shards: devices that share the batch, W.
          num_chunks: parts in which each device encodes its rows.
          process_index: which host this is.
          process_count: hosts that share the batch.

        Raises:
          ValueError: a text is longer than a row, or the rows can't be shared.
        """
        self._batches = batches
        self.row_length = row_length
        self.steps_per_epoch = batches.steps_per_epoch
        self.num_truncated = batches.num_truncated
        self._shards = num_shards
        share = num_shards // process_count
        self._host_shards = range(process_index * share, (process_index + 1) * share)
        self._unit = num_shards * num_chunks
        self._check_lengths()
        samples = self._samples()
        tokens = np.concatenate([lengths for _, lengths in samples], axis=None)
        num_texts = batches.batch_size * (2 + batches.num_negatives)
        if num_rows is None:
            self.num_slots = num_slots(
                np.count_nonzero(tokens), tokens.sum() / row_length
            )
            num_rows = self._find_rows(samples)
        self.num_rows = num_rows
        self.num_slots = num_slots(num_texts, num_rows)
        check_rows(num_rows, num_shards, num_chunks)
        self.fill = tokens.sum() / (len(samples) * self.num_rows * row_length)
        _logger.info(
            "Packing %d pairs into %d rows of %d tokens, up to %d texts each: %.1f %% "
            "of the tokens are real in %d batches looked at, %.1f %% without packing.",
            batches.batch_size, self.num_rows, row_length, self.num_slots,
            100 * self.fill, len(samples),
            100 * tokens.sum() / (len(samples) * self._num_padded()),
        )  # fmt: skip

    def batch(self, step: int) -> tuple[batching.Batch, np.ndarray]:
        """Builds this host's part of the batch for `step`.

        Returns:
          The arrays named `packed_...` in `names`, with negatives also negative_mask
          bool [b N], and in_batch bool [b] as `TrainBatches`; and the rows' ids int64
          [b]. The pairs are those of `TrainBatches`, in another order.
        """
        lengths = self._batches.text_lengths(step)
        pairs, layouts, needed = self._plan(lengths)
        num_rows = self._enough_rows(needed)
        mine = pairs[list(self._host_shards)]
        padded, ids = self._batches.rows(step, mine.reshape(-1))
        shards = [
            self._lay_out(padded, i, own, layouts[shard], num_rows)
            for i, (shard, own) in enumerate(zip(self._host_shards, mine, strict=True))
        ]
        batch = {
            key: np.concatenate([shard[key] for shard in shards]) for key in shards[0]
        }
        for key in (names.NEGATIVE_MASK, names.IN_BATCH):
            if key in padded:
                batch[key] = padded[key]
        return batch, ids

    def _check_lengths(self) -> None:
        for feature, length in self._batches.lengths.items():
            if length > self.row_length:
                raise ValueError(
                    f"DatasetConfig.packed_length is {self.row_length}, and "
                    f"{feature!r} may have {length} tokens: a row must hold the "
                    f"longest text. Set it to {length} or more, or lower "
                    "task_feature_lengths."
                )

    def _samples(self) -> list[tuple[int, np.ndarray]]:
        """Returns the task and the text lengths of some batches."""
        steps = range(_SAMPLES * self._batches.num_kinds)
        return [(self._batches.kind(i), self._batches.text_lengths(i)) for i in steps]

    def _find_rows(self, samples: list[tuple[int, np.ndarray]]) -> int:
        """Returns rows that are enough for nearly any batch of any task."""
        needs: dict[int, list[int]] = {}
        for kind, lengths in samples:
            needs.setdefault(kind, []).append(self._plan(lengths)[-1])
        enough = max(
            max(np.mean(rows) + _DEVIATIONS * np.std(rows), max(rows))
            for rows in needs.values()
        )
        return self._round_up(math.ceil(enough) * self._shards, self._unit)

    def _enough_rows(self, needed: int) -> int:
        """Returns the rows of a batch whose fullest device needs so many."""
        needed *= self._shards
        if needed <= self.num_rows:
            return self.num_rows
        step = self._round_up(max(self.num_rows // 8, 1), self._unit)
        num_rows = self._round_up(needed, step)
        _logger.warning(
            "A batch needs %d packed rows instead of %d: its step is compiled anew.",
            num_rows,
            self.num_rows,
        )
        return num_rows

    @staticmethod
    def _round_up(number: int, unit: int) -> int:
        return -(-number // unit) * unit

    def _num_padded(self) -> int:
        """Counts the positions of a batch that isn't packed."""
        lengths = self._batches.lengths
        per_pair = lengths[names.INPUTS] + lengths[names.TARGETS]
        per_pair += self._batches.num_negatives * lengths[names.NEGATIVE_TARGETS]
        return self._batches.batch_size * per_pair

    def _plan(
        self, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]], int]:
        """Shares a batch out and packs it.

        Args:
          lengths: tokens of each pair's texts, int [B 2+N].

        Returns:
          The pairs of each device int [W b], each one's layout from `pack`, and the
          rows of the fullest.
        """
        pairs = _share_out(lengths.sum(axis=1), self._shards)
        layouts = [
            pack(lengths[own].reshape(-1), self.row_length, self.num_slots)
            for own in pairs
        ]
        return pairs, layouts, max(len(rows) for *_, rows in layouts)

    def _lay_out(
        self,
        padded: batching.Batch,
        index: int,
        pairs: np.ndarray,
        layout: tuple[np.ndarray, ...],
        num_rows: int,
    ) -> batching.Batch:
        """Copies the texts of one device's pairs to their places.

        Args:
          padded: the padded texts of this host's pairs.
          index: which of this host's devices.
          pairs: the pairs' numbers in the global batch, int [b].
          layout: from `pack`.
          num_rows: rows of the global batch.
        """
        rows, starts, slots, _ = layout
        share = num_rows // self._shards
        tokens, lengths = self._texts(padded, index, len(pairs))
        num_texts = tokens.shape[1]
        tokens, lengths = tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1)
        sizes = np.count_nonzero(tokens, axis=1)
        packed = np.full((share, self.row_length), names.PAD_ID, np.int32)
        slot_of = np.full((share, self.row_length), -1, np.int32)
        real = np.arange(tokens.shape[1]) < sizes[:, None]
        target = (rows * self.row_length + starts)[:, None] + np.arange(tokens.shape[1])
        packed.reshape(-1)[target[real]] = tokens[real]
        slot_of.reshape(-1)[target[real]] = np.repeat(slots, sizes)
        there = sizes > 0
        text_numbers = pairs[:, None] * num_texts + np.arange(num_texts)
        numbers = np.full((share, self.num_slots), -1, np.int32)
        numbers[rows[there], slots[there]] = text_numbers.reshape(-1)[there]
        places = np.where(there, rows * self.num_slots + slots, -1).astype(np.int32)
        batch = {
            names.PACKED_TOKENS: packed,
            names.PACKED_SLOTS: slot_of,
            names.PACKED_NUMBERS: numbers,
            names.PACKED_PLACES: places.reshape(1, len(pairs), num_texts),
        }
        if self._batches.has_instructions:
            instructions = np.zeros((share, self.num_slots), np.int32)
            instructions[rows[there], slots[there]] = lengths[there]
            batch[names.PACKED_INSTRUCTION_LENGTHS] = instructions
        return batch

    def _texts(
        self, padded: batching.Batch, index: int, num_pairs: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns a device's texts [b G L], padded, and their instructions' lengths."""
        own = slice(index * num_pairs, (index + 1) * num_pairs)
        longest = max(self._batches.lengths.values())
        tokens, lengths = [], []
        for tokens_key, lengths_key in batching.KEYS.values():
            if tokens_key not in padded:
                continue
            texts = padded[tokens_key][own]
            texts = texts.reshape(num_pairs, -1, texts.shape[-1])
            tokens.append(
                np.pad(texts, ((0, 0), (0, 0), (0, longest - texts.shape[-1])))
            )
            counts = padded.get(lengths_key)
            if counts is None:
                lengths.append(np.zeros(texts.shape[:2], np.int32))
            else:
                lengths.append(counts[own].reshape(texts.shape[:2]))
        return np.concatenate(tokens, axis=1), np.concatenate(lengths, axis=1)


def check_rows(num_rows: int, num_shards: int, num_chunks: int) -> None:
    """Checks that all devices can have as many rows in each chunk.

    Args:
      num_rows: rows of a global batch.
      num_shards: devices that share the batch.
      num_chunks: parts in which each device encodes its rows.

    Raises:
      ValueError: not so.
    """
    unit = num_shards * num_chunks
    if num_rows % unit:
        raise ValueError(
            f"DatasetConfig.packed_rows is {num_rows}: {num_shards} devices take them "
            f"in {num_chunks} chunks each, so make it a multiple of {unit}."
        )


def num_slots(num_texts: int, num_rows: float) -> int:
    """Returns how many texts a row may have, if so many share so many rows."""
    return math.ceil(_SLOT_FACTOR * num_texts / num_rows)


def pack(
    lengths: np.ndarray, row_lengths: np.ndarray | int, max_texts: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Places texts in rows, best fit, the longest first.

    Args:
      lengths: tokens of each text, int [n]; a text of 0 isn't placed.
      row_lengths: tokens of the row that a text begins if it fits into no other, int or
        int [n].
      max_texts: texts that such a row may have, int or int [n].

    Returns:
      For each text its row, the place where it starts and its number in the row, int
      [n] each; and the tokens of each row, int [num_rows].
    """
    rows = np.zeros(len(lengths), np.int64)
    starts = np.zeros(len(lengths), np.int64)
    slots = np.zeros(len(lengths), np.int64)
    row_lengths = np.broadcast_to(row_lengths, lengths.shape).tolist()
    max_texts = np.broadcast_to(max_texts, lengths.shape).tolist()
    # Rows by the tokens that they have left, and a bit for each number that occurs.
    by_room: dict[int, list[int]] = collections.defaultdict(list)
    occurs = 0
    made: list[int] = []
    num_texts: list[int] = []
    most_texts: list[int] = []
    order = np.argsort(-lengths, kind="stable")
    for text in order[: np.count_nonzero(lengths)].tolist():
        length = int(lengths[text])
        fitting = occurs >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                occurs &= ~(1 << room)
        else:
            room, row = row_lengths[text], len(made)
            made.append(room)
            num_texts.append(0)
            most_texts.append(max_texts[text])
        rows[text], starts[text], slots[text] = row, made[row] - room, num_texts[row]
        num_texts[row] += 1
        left = room - length
        if left and num_texts[row] < most_texts[row]:
            by_room[left].append(row)
            occurs |= 1 << left
    return rows, starts, slots, np.array(made, np.int64)


def _share_out(tokens: np.ndarray, num_shards: int) -> np.ndarray:
    """Gives every device as many pairs, and about as many tokens.

    Args:
      tokens: of each pair, int [B].
      num_shards: devices, W.

    Returns:
      The pairs of each device, ascending, int [W B/W].
    """
    order = np.argsort(-tokens, kind="stable").reshape(-1, num_shards)
    order[1::2] = order[1::2, ::-1].copy()  # back and forth over the devices
    return np.sort(order.T, axis=1)
