"""Texts as rows of one length: which texts, how long, and how many are trimmed.

    texts of any length, end to end ─► rows [b L], trimmed or padded
    a pair ─► its negatives [N], drawn where it has more

Which pairs a batch has is up to `batching`.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from sentence_t5 import instructions, names, permutation
from sentence_t5.tokenized import Texts, TokenizedExamples

_logger = logging.getLogger(__name__)


def pad(texts: Texts, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts as rows of `length` ids, and how many are an instruction's.

    A longer text keeps its first `length - 1` ids, then EOS; a shorter one is filled
    with the padding id. An instruction that takes more than half of a row that is too
    long is cut, so far that the text fits or has the other half.

    Args:
      texts: the texts.
      rows: which of them, int [b].
      length: tokens per row.

    Returns:
      int32 [b, length] and int32 [b].
    """
    starts = np.asarray(texts.starts[rows])[:, None]
    sizes = np.asarray(texts.starts[rows + 1])[:, None] - starts
    places = np.arange(length)
    kept = cut = np.zeros((len(rows), 1), np.int64)
    if texts.instruction_lengths is not None:
        whole = np.asarray(texts.instruction_lengths[rows], np.int64)[:, None]
        kept = instructions.kept_lengths(whole, sizes, length)
        cut = whole - kept
    sizes = sizes - cut
    real = places < sizes
    sources = starts + places
    if cut.any():  # The text follows what is kept of its instruction.
        sources += np.where(places < kept, 0, cut)
    ids = np.asarray(texts.tokens[np.where(real, sources, 0)], np.int32)
    ids[~real] = names.PAD_ID
    ids[np.squeeze(sizes > length, axis=1), -1] = names.EOS_ID
    return ids, kept[:, 0].astype(np.int32)


def trimmed_lengths(texts: Texts, rows: np.ndarray, length: int) -> np.ndarray:
    """Counts the tokens that `pad` leaves of some texts, without reading them.

    Args:
      texts: the texts.
      rows: which of them, int [...]; -1 is no text.
      length: tokens per row.

    Returns:
      int64 [...], 0 where there is no text.
    """
    wanted = np.maximum(rows, 0)
    if not len(texts):
        return np.zeros(rows.shape, np.int64)
    sizes = np.asarray(texts.starts[wanted + 1] - texts.starts[wanted])
    # An instruction is cut only so far that the row is still full.
    return np.where(rows >= 0, np.minimum(sizes, length), 0)


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
    places = np.arange(num, dtype=np.int64)[None]
    texts = np.where(places < counts, firsts + places, -1)
    many = np.flatnonzero(counts > num)
    if many.size and num:
        keys = permutation.mix(key, rows[many, None])
        texts[many] = firsts[many] + permutation.permute(places, counts[many], keys)
    return texts


def count_truncated(
    parts: Sequence[TokenizedExamples], lengths: Mapping[str, int]
) -> dict[str, int]:
    """Counts the texts of each feature that are longer than its length, and says so.

    Args:
      parts: the examples of each task.
      lengths: tokens per row of each feature.

    Returns:
      The count for each feature that a part has; if it isn't 0, it is a warning too.
    """
    counts = {}
    for feature, length in lengths.items():
        texts = [p.texts[feature] for p in parts if feature in p.texts]
        if not texts:
            continue
        counts[feature] = sum(part.num_longer(length) for part in texts)
        if counts[feature]:
            _logger.warning(
                "%d of %d texts of %r are longer than %d tokens and will be trimmed.",
                counts[feature],
                sum(map(len, texts)),
                feature,
                length,
            )
    return counts


def count_crowded(texts: Texts, length: int) -> int:
    """Counts the texts whose instruction must be cut for them; see `pad`."""
    if texts.instruction_lengths is None:
        return 0
    lengths = np.asarray(texts.instruction_lengths)
    kept = instructions.kept_lengths(lengths, np.diff(texts.starts), length)
    return int(np.count_nonzero(kept < lengths))
