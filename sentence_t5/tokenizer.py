"""Tokenizer: text → T5 token ids, with sentencepiece alone.

SeqIO tokenizes training data; this module gives the same ids at inference without
TensorFlow. The vocabulary's bytes travel with a checkpoint, so a tokenizer is built
from bytes or from a path.

Source: SeqIO's ``SentencePieceVocabulary`` for the sentinels (``extra_ids``).
"""

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence

import sentencepiece
from etils import epath

from sentence_t5 import buckets, names, options

_USER_DEFINED = 4  # sentencepiece's ModelProto.SentencePiece.Type


class Tokenizer:
    """A SentencePiece vocabulary with T5's sentinels, closed by EOS.

    Attributes:
        model_bytes: the SentencePiece model file as it was read, without sentinels.
        sha256: hex digest of ``model_bytes``; two vocabularies are the same if it and
            ``extra_ids`` are.
        extra_ids: number of sentinels added behind the pieces.
        vocab_size: pieces and sentinels: one more than the largest id.
    """

    def __init__(self, model: bytes | str | os.PathLike, extra_ids: int = 100):
        """Reads a vocabulary.

        Args:
            model: a SentencePiece model, as bytes or as the path of its file.
            extra_ids: number of sentinels ``<extra_id_0>``, ``<extra_id_1>``, …,
                numbered from the end of the vocabulary downwards; 100 for T5.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a SentencePiece model, or one whose pad and EOS are not
                ids 0 and 1.
        """
        self.model_bytes = model if isinstance(model, bytes) else _read_model(model)
        source = "the given bytes" if isinstance(model, bytes) else str(model)
        if extra_ids < 0:
            raise ValueError(f"extra_ids: got {extra_ids}, expected 0 or more.")
        self.extra_ids = extra_ids
        self.sha256 = hashlib.sha256(self.model_bytes).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(
                self.model_bytes + _sentinel_pieces(extra_ids)
            )
        except Exception as error:
            raise ValueError(
                f"{source} is not a SentencePiece model ({len(self.model_bytes)} "
                f"bytes; {error}). Expected a file such as T5's spiece.model."
            ) from error
        pad_id, eos_id = self._processor.pad_id(), self._processor.eos_id()
        if (pad_id, eos_id) != (names.PAD_ID, names.EOS_ID):
            raise ValueError(
                f"The vocabulary in {source} has pad id {pad_id} and EOS id {eos_id}; "
                f"T5 needs {names.PAD_ID} and {names.EOS_ID}. Train it with "
                "pad_id=0, eos_id=1, unk_id=2, bos_id=-1."
            )
        self.vocab_size = self._processor.GetPieceSize()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes texts, each closed by EOS and as long as it is.

        Args:
            texts: any number of strings.

        Returns:
            One list of ids per text; the empty string gives EOS alone.

        Raises:
            ValueError: a string that is not valid Unicode (a lone surrogate).
        """
        try:
            ids = self._processor.EncodeAsIds(list(texts))
        except (UnicodeEncodeError, TypeError):
            _raise_for_surrogate(texts)
            raise
        return [[*row, names.EOS_ID] for row in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids back into text, up to the first EOS."""
        ids = list(ids)
        if names.EOS_ID in ids:
            ids = ids[: ids.index(names.EOS_ID)]
        return self._processor.DecodeIds(ids)

    def first_difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """Finds the first id that another vocabulary has another piece for.

        Sentinels don't count: texts have none, and models differ in their number.

        Args:
            other: the other vocabulary.

        Returns:
            The id and both pieces ("" where a vocabulary has ended), or None.
        """
        ours, theirs = self._pieces(), other._pieces()
        both = itertools.zip_longest(ours, theirs, fillvalue="")
        return next(((i, a, b) for i, (a, b) in enumerate(both) if a != b), None)

    def _pieces(self) -> list[str]:
        return self._processor.IdToPiece(list(range(self.vocab_size - self.extra_ids)))

    def describe(self) -> dict[str, str | int]:
        """Returns what identifies this vocabulary, as JSON-able values."""
        return {
            "sha256": self.sha256,
            "extra_ids": self.extra_ids,
            "vocab_size": self.vocab_size,
            "pad_id": names.PAD_ID,
            "eos_id": names.EOS_ID,
        }


def trim(row: list[int], max_length: int) -> list[int]:
    """Cuts a row to ``max_length`` ids whose last one is EOS."""
    options.check_positive("max_length", max_length)
    if len(row) <= max_length:
        return row
    return [*row[: max_length - 1], names.EOS_ID]


def _sentinel_pieces(extra_ids: int) -> bytes:
    """Serializes sentinels as SeqIO adds them, to be appended to a model's bytes.

    Protocol buffers merge by concatenation: bytes of the repeated field ``pieces`` at
    the end add pieces at the end. So no generated protobuf module is needed, whose
    versions clash between packages.
    """
    pieces = []
    for i in reversed(range(extra_ids)):
        text = f"▁<extra_id_{i}>".encode()
        piece = b"\x0a" + bytes([len(text)]) + text  # 1: string piece
        piece += b"\x15" + struct.pack("<f", 0.0)  # 2: float score
        piece += b"\x18" + bytes([_USER_DEFINED])  # 3: enum type
        pieces.append(b"\x0a" + bytes([len(piece)]) + piece)  # 1: repeated pieces
    return b"".join(pieces)


def _read_model(path: str | os.PathLike) -> bytes:
    """Reads a vocabulary file from a local path or from a bucket."""
    if str(path).startswith(buckets.SCHEME):
        buckets.check_reachable(str(path))
    file = epath.Path(path)
    if file.is_dir():
        raise FileNotFoundError(
            f"The vocabulary {path} is a folder; name the SentencePiece model in it."
        )
    if not file.exists():
        raise FileNotFoundError(
            f"No vocabulary at {path} (looked from {os.getcwd()}). Set the vocabulary "
            "to the path of a SentencePiece model such as T5's spiece.model."
        )
    return file.read_bytes()


def _raise_for_surrogate(texts: Sequence[str]) -> None:
    """Names the first string that has no UTF-8 form."""
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"texts[{i}] is not valid Unicode: lone surrogate "
                f"{text[error.start]!r} at position {error.start}. Decode the source "
                "as UTF-8, or use errors='replace'."
            ) from error
