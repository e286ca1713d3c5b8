"""Turns tokenized examples into padded batches, by index.

The order is a pure function of the seed and the step. Step s of an epoch of k = n // B
batches belongs to epoch s // k; each epoch is a permutation of the rows, computed for a
position without listing it, so that resuming is a seek. No batch mixes two epochs, and
no epoch holds a row twice. Host h of H builds rows [h B/H : (h+1) B/H] of the global
batch, which does not depend on H.

In a mixture, each task gives every batch the same number of rows, its share of B, and
walks through epochs of its own.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from sentence_t5 import names
from sentence_t5.token_cache import Texts, TokenizedExamples

Batch = dict[str, np.ndarray]

_SIDES = ((names.INPUTS, names.LEFT_TOKENS), (names.TARGETS, names.RIGHT_TOKENS))
_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Part:
    """One task's place in the batches.

    Attributes:
      examples: its rows.
      num_rows: how many rows it gives to each global batch.
      first_id: the id of its row 0; the tasks of a mixture are numbered end to end.
    """

    examples: TokenizedExamples
    num_rows: int
    first_id: int = 0


class TrainBatches:
    """Batches by step number; see the module.

    Attributes:
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
    ):
        """Makes batches of sum(part.num_rows) rows; see `datasets.make_batches`."""
        self._parts = parts
        self._lengths = lengths
        self._seed = seed
        self._shuffle = shuffle
        self._num_negatives = num_negatives
        batch_size = sum(part.num_rows for part in parts)
        share = batch_size // process_count
        self._host = slice(process_index * share, (process_index + 1) * share)
        self.steps_per_epoch = max(len(p.examples) // p.num_rows for p in parts)
        self.num_truncated = count_truncated([p.examples for p in parts], lengths)
        self.num_unused_negatives = sum(
            int(np.maximum(np.diff(p.examples.negative_rows) - num_negatives, 0).sum())
            for p in parts
            if num_negatives
        )
        if self.num_unused_negatives:
            logging.info(
                "%d hard negatives are left out of each epoch: rows with more than "
                "num_negatives=%d draw theirs anew each time.",
                self.num_unused_negatives,
                num_negatives,
            )

    def batch(self, step: int) -> tuple[Batch, np.ndarray]:
        """Builds this host's rows of the batch for `step`.

        Returns:
          The arrays (left and right tokens int32 [b L], with negatives also
          negative_tokens int32 [b N L] and negative_mask bool [b N]), and the rows' ids
          int64 [b].
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}.")
        pieces, ids = [], []
        start = 0
        for index, part in enumerate(self._parts):
            first = min(max(self._host.start - start, 0), part.num_rows)
            last = min(max(self._host.stop - start, 0), part.num_rows)
            start += part.num_rows
            if first < last:
                epoch, rows = self._rows(index, step, first, last)
                pieces.append(self._arrays(index, epoch, rows))
                ids.append(part.first_id + rows)
        keys = pieces[0].keys()
        batch = {key: np.concatenate([piece[key] for piece in pieces]) for key in keys}
        return batch, np.concatenate(ids)

    def _rows(
        self, index: int, step: int, first: int, last: int
    ) -> tuple[int, np.ndarray]:
        """Returns the epoch, and rows `first:last` of a part's share of a batch."""
        part = self._parts[index]
        num = len(part.examples)
        epoch, batch = divmod(step, num // part.num_rows)
        positions = np.arange(first, last, dtype=np.int64) + batch * part.num_rows
        if not self._shuffle:
            return epoch, positions
        return epoch, permute(positions, num, mix(self._seed, index, epoch))

    def _arrays(self, index: int, epoch: int, rows: np.ndarray) -> Batch:
        """Pads the texts of some rows of one part."""
        examples = self._parts[index].examples
        batch = {
            key: pad(examples.texts[feature], rows, self._lengths[feature])
            for feature, key in _SIDES
        }
        if self._num_negatives:
            texts = choose_negatives(
                examples.negative_rows,
                rows,
                self._num_negatives,
                mix(self._seed, index, epoch, 1),
            )
            length = self._lengths[names.NEGATIVE_TARGETS]
            mask = texts >= 0
            tokens = np.zeros((*texts.shape, length), np.int32)
            negatives = examples.texts[names.NEGATIVE_TARGETS]
            tokens[mask] = pad(negatives, texts[mask], length)
            batch[names.NEGATIVE_TOKENS] = tokens
            batch[names.NEGATIVE_MASK] = mask
        return batch


def eval_batches(
    examples: TokenizedExamples,
    lengths: Mapping[str, int],
    *,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> Iterator[Batch]:
    """Yields this host's rows of every batch, in order; see `datasets.eval_batches`."""
    share = batch_size // process_count
    for first in range(0, len(examples), batch_size):
        rows = np.arange(share, dtype=np.int64) + first + process_index * share
        mask = rows < len(examples)
        real = rows[mask]
        batch = {names.ROW_MASK: mask}
        for feature, key in _SIDES:
            tokens = np.zeros((share, lengths[feature]), np.int32)
            tokens[mask] = pad(examples.texts[feature], real, lengths[feature])
            batch[key] = tokens
        if examples.scores is not None:
            scores = np.zeros(share, np.float32)
            scores[mask] = examples.scores[real]
            batch[names.SCORES] = scores
        yield batch


def pad(texts: Texts, rows: np.ndarray, length: int) -> np.ndarray:
    """Returns texts as rows of `length` ids.

    A longer text keeps its first `length - 1` ids, then EOS; a shorter one is filled
    with the padding id.

    Args:
      texts: the texts.
      rows: which of them, int [b].
      length: tokens per row.

    Returns:
      int32 [b, length].
    """
    starts = np.asarray(texts.starts[rows])[:, None]
    sizes = np.asarray(texts.starts[rows + 1])[:, None] - starts
    places = np.arange(length)
    real = places < sizes
    ids = np.asarray(texts.tokens[np.where(real, starts + places, 0)], np.int32)
    ids[~real] = names.PAD_ID
    ids[np.squeeze(sizes > length, axis=1), -1] = names.EOS_ID
    return ids


def choose_negatives(
    negative_rows: np.ndarray, rows: np.ndarray, num: int, key: int
) -> np.ndarray:
    """Chooses `num` negatives for each row, without repeating one.

    A row with at most `num` negatives gives all of them, in order, then -1. From a row
    with more, `num` are drawn: a pure function of `key` and the row.

    Args:
      negative_rows: row i has the texts `negative_rows[i] .. negative_rows[i+1] - 1`.
      rows: int [b].
      num: negatives per row, N.
      key: changes with the seed and the epoch.

    Returns:
      Texts, int64 [b, N], -1 where a row has fewer.
    """
    firsts = np.asarray(negative_rows[rows])[:, None]
    counts = np.asarray(negative_rows[rows + 1])[:, None] - firsts
    chosen = np.arange(num, dtype=np.int64)[None]
    texts = np.where(chosen < counts, firsts + chosen, -1)
    for index in np.flatnonzero(counts > num):
        draw = permute(chosen[0], int(counts[index, 0]), mix(key, int(rows[index])))
        texts[index] = firsts[index] + draw
    return texts


def count_truncated(
    parts: Sequence[TokenizedExamples], lengths: Mapping[str, int]
) -> dict[str, int]:
    """Counts the texts of each feature that are longer than its length, and says so."""
    counts = {}
    for feature, length in lengths.items():
        texts = [p.texts[feature] for p in parts if feature in p.texts]
        if not texts:
            continue
        counts[feature] = sum(part.num_longer(length) for part in texts)
        if counts[feature]:
            logging.warning(
                "%d of %d texts of %r are longer than %d tokens and will be trimmed.",
                counts[feature],
                sum(map(len, texts)),
                feature,
                length,
            )
    return counts


def mix(*numbers: int) -> int:
    """Hashes integers to one of 64 bits (splitmix64, one number after the other)."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


def permute(positions: np.ndarray, num: int, key: int) -> np.ndarray:
    """Returns where a random permutation of range(num) sends some positions.

    A Feistel network over the next power of four above `num`; a result beyond `num` is
    sent through it again until it falls inside. Nothing of size `num` is ever made.

    Args:
      positions: int [b], each in range(num).
      num: how many there are.
      key: chooses the permutation, 64 bits.

    Returns:
      int64 [b], in range(num).
    """
    half = np.uint64(max(1, ((num - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, i)) for i in range(_ROUNDS)]
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        value = result[outside]
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (_scramble(right ^ round_key) & low)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(num)
    return result.astype(np.int64)


def _scramble(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Prefetcher:
    """Builds batches and puts them on the devices ahead of time, in a thread.

    Iterating gives (step, batch, row ids) for start_step, start_step + 1, ... What goes
    wrong in the thread is raised where the batch is asked for. Close it, or use `with`.
    """

    def __init__(
        self,
        batches: TrainBatches,
        start_step: int,
        put: Callable[[Batch], Any],
        depth: int = 2,
    ):
        """Starts the thread; see `datasets.prefetch`."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}.")
        self._queue: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(batches, start_step, put), daemon=True
        )
        self._thread.start()

    def _run(self, batches: TrainBatches, step: int, put: Callable[[Batch], Any]):
        try:
            while not self._stop.is_set():
                batch, ids = batches.batch(step)
                self._offer((step, put(batch), ids))
                step += 1
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[int, Any, np.ndarray]:
        while not self._stop.is_set():
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self.close()
                raise item
            return item
        raise StopIteration

    def close(self) -> None:
        """Stops the thread and drops what it has built."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
