"""Lays texts out in arrays of a few fixed shapes, by the cheaper of two ways.

    buckets   one text to a row, sorted by length, padded to one of a few lengths
    packed    several texts to a row of 32, 64, 128, … tokens, best fit

Packing wastes less and has fewer shapes, but attention runs over whole rows, and a few
texts fill a small bucket better than a packed row. What decides is the number of
operations, padding included, which is known before anything runs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from sentence_t5 import encoder, flops, names, packing

_SHORTEST_BUCKET = 8
_SHORTEST_PACKED_ROW = 32
# A packed row of P tokens has room for P / 4 texts.
_TOKENS_PER_SLOT = 4
# Rows left after the full batches go in several of so many, unless these would be more
# than this part of one more full batch.
_SMALL_BATCH = 8
_WORTH_SPLITTING = 0.75
# Fewer batches aren't worth shapes of their own.
_WORTH_COMPILING = 4
# Packing must save so much to be chosen: the same work is a little slower in it.
_WORTH_PACKING = 0.95


class Layout(NamedTuple):
    """Some texts in one array.

    Attributes:
        tokens: ids, padded with 0.
        slots: of packed rows, which of its row's texts each token is of; None for one
            text to a row.
        texts: which texts these are.
        places: where each one's vector is among the embeddings [b] or [b * S].
        num_slots: texts that a row may have, S.
    """

    tokens: Int[np.ndarray, "b L"]
    slots: Int[np.ndarray, "b L"] | None
    texts: Int[np.ndarray, " n"]
    places: Int[np.ndarray, " n"]
    num_slots: int = 1

    def spread(self, per_text: Int[np.ndarray, " all"]) -> Int[np.ndarray, "b *S"]:
        """Puts a number of each text where its vector will be; 0 elsewhere."""
        spread = np.zeros(len(self.tokens) * self.num_slots, np.int32)
        spread[self.places] = per_text[self.texts]
        return spread if self.slots is None else spread.reshape(-1, self.num_slots)


class _Shape(NamedTuple):
    """One array to be made: rows, tokens of a row, and the texts in it."""

    rows: int
    length: int
    texts: np.ndarray


def lay_out(
    rows: Sequence[Sequence[int]],
    config: encoder.EncoderConfig,
    *,
    batch_size: int,
    max_length: int,
    num_shards: int,
) -> Iterator[Layout]:
    """Lays out token rows, longest first.

    Args:
        rows: ids of each text, EOS included, none longer than ``max_length``.
        config: what the operations depend on.
        batch_size: rows to compute at once.
        max_length: the longest bucket.
        num_shards: devices that share a batch.

    Yields:
        Arrays of whole batches; rows beyond the texts hold EOS.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    sizes = _Sizes(batch_size, num_shards)
    buckets = _plan_buckets(lengths, sizes, max_length)
    if len(rows) >= _WORTH_COMPILING * batch_size:
        placed = _pack(lengths)
        packed = _plan_packed(placed, sizes)
        if _cost(packed, config) < _WORTH_PACKING * _cost(buckets, config):
            for shape in packed:
                yield _packed_layout(rows, lengths, placed, shape)
            return
    for shape in buckets:
        yield _bucket_layout(rows, shape)


def make_buckets(max_length: int) -> list[int]:
    """Returns the lengths that rows are padded to, ascending.

    Powers of two and the middles between them (8, 16, 24, 32, 48, 64, 96, …) up to
    ``max_length``, which is the last one.
    """
    buckets, power = [], _SHORTEST_BUCKET
    while power < max_length:
        buckets += [power] if power == _SHORTEST_BUCKET else [power, power * 3 // 2]
        power *= 2
    return [bucket for bucket in buckets if bucket < max_length] + [max_length]


class _Sizes:
    """The numbers of rows that a batch may have."""

    def __init__(self, batch_size: int, num_shards: int):
        self._shards = num_shards
        self._full = batch_size
        self._small = min(batch_size, _SMALL_BATCH)

    def full(self, part: int = 1) -> int:
        """Returns the rows of a full batch, or of a part of one."""
        return self._round_up(max(self._full // part, self._small))

    def cut(self, rows: int, full: int) -> Iterator[tuple[int, int]]:
        """Yields where each batch of so many rows starts, and its rows with padding."""
        small = min(self._round_up(self._small), full)
        left = rows % full
        whole = rows - left
        yield from ((start, full) for start in range(0, whole, full))
        size = small if -(-left // small) * small <= _WORTH_SPLITTING * full else full
        yield from ((start, size) for start in range(whole, rows, size))

    def _round_up(self, rows: int) -> int:
        return -(-rows // self._shards) * self._shards


class _Placed(NamedTuple):
    """Where each text lies: its row, the place in it, its slot; and rows' lengths."""

    rows: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    row_lengths: np.ndarray


def _pack(lengths: np.ndarray) -> _Placed:
    powers = np.ceil(np.log2(np.maximum(lengths, _SHORTEST_PACKED_ROW)))
    row_lengths = (2**powers).astype(np.int64)
    return _Placed(*packing.pack(lengths, row_lengths, row_lengths // _TOKENS_PER_SLOT))


def _plan_buckets(lengths: np.ndarray, sizes: _Sizes, max_length: int) -> list[_Shape]:
    buckets = make_buckets(max_length)
    order = np.argsort(-lengths, kind="stable")
    shapes = []
    for start, size in sizes.cut(len(order), sizes.full()):
        texts = order[start : start + size]
        length = next(b for b in buckets if b >= lengths[texts[0]])
        shapes.append(_Shape(size, length, texts))
    return shapes


def _plan_packed(placed: _Placed, sizes: _Sizes) -> list[_Shape]:
    shapes = []
    by_row = np.argsort(placed.rows, kind="stable")
    first_text = np.searchsorted(
        placed.rows[by_row], np.arange(len(placed.row_lengths) + 1)
    )
    for length in np.unique(placed.row_lengths)[::-1]:
        # Rows of 32 hold two texts or more: half of them are as many texts.
        full = sizes.full(2 if length == _SHORTEST_PACKED_ROW else 1)
        (of_length,) = np.nonzero(placed.row_lengths == length)
        for start, size in sizes.cut(len(of_length), full):
            some = of_length[start : start + size]
            # Rows of one length were opened one after the other.
            texts = by_row[first_text[some[0]] : first_text[some[-1] + 1]]
            shapes.append(_Shape(size, int(length), texts))
    return shapes


def _cost(shapes: Sequence[_Shape], config: encoder.EncoderConfig) -> float:
    """Counts the operations of the layers, padding included."""
    total = 0.0
    for shape in shapes:
        weights, between, _ = flops.per_text(config, shape.length)
        total += shape.rows * (weights + between)
    return total


def _bucket_layout(rows: Sequence[Sequence[int]], shape: _Shape) -> Layout:
    tokens = np.full((shape.rows, shape.length), names.PAD_ID, np.int32)
    tokens[len(shape.texts) :, 0] = names.EOS_ID
    for i, text in enumerate(shape.texts):
        tokens[i, : len(rows[text])] = rows[text]
    return Layout(tokens, None, shape.texts, np.arange(len(shape.texts)))


def _packed_layout(
    rows: Sequence[Sequence[int]],
    lengths: np.ndarray,
    placed: _Placed,
    shape: _Shape,
) -> Layout:
    num_slots = shape.length // _TOKENS_PER_SLOT
    tokens = np.full((shape.rows, shape.length), names.PAD_ID, np.int32)
    slots = np.full((shape.rows, shape.length), -1, np.int32)
    first = placed.rows[shape.texts].min()
    own = placed.rows[shape.texts] - first
    tokens[own.max() + 1 :, 0] = names.EOS_ID
    slots[own.max() + 1 :, 0] = 0
    for row, text in zip(own, shape.texts, strict=True):
        place = slice(placed.starts[text], placed.starts[text] + lengths[text])
        tokens[row, place] = rows[text]
        slots[row, place] = placed.slots[text]
    places = own * num_slots + placed.slots[shape.texts]
    return Layout(tokens, slots, shape.texts, places, num_slots)
