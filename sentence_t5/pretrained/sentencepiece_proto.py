"""SentencePiece's model file, read and written without a generated protobuf module.

Two packages in one process may bring incompatible versions of such a module; the few
fields needed here are walked by hand.

Source: ``sentencepiece_model.proto`` of sentencepiece 0.2.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import Any

# ModelProto.SentencePiece.Type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# TrainerSpec.ModelType
UNIGRAM, BPE = 1, 2
# NormalizerSpec: the white-space rules that are on in T5's vocabulary.
_WHITE_SPACE_RULES = {
    3: "add_dummy_prefix",
    4: "remove_extra_whitespaces",
    5: "escape_whitespaces",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """What matters of a model file.

    Attributes:
        model_type: ``UNIGRAM``, ``BPE`` or another of the trainer's numbers.
        pieces: (text, score, kind), by id.
        charsmap: the compiled normalisation rules; empty for none.
        white_space_rules_off: those of T5's white-space rules that this model lacks.
    """

    model_type: int
    pieces: Sequence[tuple[str, float, int]]
    charsmap: bytes = b""
    white_space_rules_off: tuple[str, ...] = ()


def parse(model_bytes: bytes) -> Model:
    """Reads a model file's content."""
    pieces, trainer, normalizer = [], {}, {}
    for field, value in _fields(model_bytes):
        if field == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append((entry[1].decode(), score, entry.get(3, NORMAL)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    return Model(
        trainer.get(3, UNIGRAM),
        pieces,
        normalizer.get(2, b""),
        tuple(n for f, n in _WHITE_SPACE_RULES.items() if not normalizer.get(f, 1)),
    )


def serialize(model: Model) -> bytes:
    """Writes a model file's content, with T5's ids and white-space rules."""
    out = bytearray()
    for text, score, kind in model.pieces:
        piece = _bytes_field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        out += _bytes_field(1, piece + b"\x18" + bytes([kind]))
    unknown = next(i for i, piece in enumerate(model.pieces) if piece[2] == UNKNOWN)
    # unk_id, bos_id (none), eos_id, pad_id
    ids = ((40, unknown), (41, -1), (42, 1), (43, 0))
    trainer = _varint_field(3, model.model_type)
    trainer += b"".join(_varint_field(*field) for field in ids)
    if any(piece[2] == BYTE for piece in model.pieces):
        trainer += _varint_field(35, 1)  # byte_fallback
    out += _bytes_field(2, trainer)
    normalizer = _bytes_field(1, b"from_tokenizer_json")
    if model.charsmap:
        normalizer += _bytes_field(2, model.charsmap)
    out += _bytes_field(3, normalizer)
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Walks over a protocol buffer: (field number, int or bytes)."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or varint()
        yield key >> 3, message[position : position + size]
        position += size


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers take ten bytes
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
