"""A SentencePiece model as ``spiece.model`` and as Hugging Face's ``tokenizer.json``.

    spiece.model ◄─► pieces, scores, kinds, character map ◄─► tokenizer.json

Both directions are written out here, because neither file's own library can read the
other one without a generated protobuf module. Only Unigram models with T5's white-space
rules are translated; both then give the same ids, but for the texts that
``docs/weights.md`` lists.

Source: ``sentencepiece_model.proto``; ``tokenizer.json`` as tokenizers 0.23 writes it.
"""

import base64
import dataclasses
import json
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from sentence_t5.pretrained import source as source_lib

SPIECE_FILE = "spiece.model"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_T5_EXTRA_IDS = 100

# ModelProto.SentencePiece.Type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM = 1
_METASPACE = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": "always",
    "split": True,
}


@dataclasses.dataclass(frozen=True)
class _Model:
    """What both files say.

    Attributes:
        pieces: (text, score, kind), by id.
        charsmap: the compiled normalisation rules; empty for none.
    """

    pieces: Sequence[tuple[str, float, int]]
    charsmap: bytes


def read_vocabulary(folder: str | os.PathLike) -> source_lib.Vocabulary | None:
    """Reads the vocabulary of a Hugging Face folder.

    Args:
        folder: with ``spiece.model`` or ``tokenizer.json``, or with neither.

    Returns:
        The vocabulary; None if there is none.
    """
    folder = pathlib.Path(folder)
    config_path = folder / TOKENIZER_CONFIG_FILE
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    if (folder / SPIECE_FILE).exists():
        model_bytes = (folder / SPIECE_FILE).read_bytes()
        extra_ids = config.get("extra_ids")
        if extra_ids is None:
            texts = {piece[0] for piece in _parse_model(model_bytes).pieces}
            has_own = {"<extra_id_0>", "▁<extra_id_0>"} & texts
            extra_ids = 0 if has_own else _T5_EXTRA_IDS
        return source_lib.Vocabulary(model_bytes, extra_ids)
    if (folder / TOKENIZER_FILE).exists():
        content = json.loads((folder / TOKENIZER_FILE).read_text())
        return from_tokenizer_json(content)
    return None


def to_tokenizer_json(vocabulary: source_lib.Vocabulary) -> dict[str, Any]:
    """Translates a SentencePiece model.

    Returns:
        The content of ``tokenizer.json``: closes texts with ``</s>``, sentinels added.

    Raises:
        ValueError: not a Unigram model, or one with other white-space rules than T5's.
    """
    model = _parse_model(vocabulary.model_bytes)
    pieces = list(model.pieces)
    first_sentinel = len(pieces)
    for i in reversed(range(vocabulary.extra_ids)):
        pieces.append((f"<extra_id_{i}>", 0.0, _USER_DEFINED))
    unknown = [i for i, piece in enumerate(pieces) if piece[2] == _UNKNOWN]
    added = [
        _added_token(i, text, in_text=i >= first_sentinel)
        for i, (text, _, kind) in enumerate(pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    eos = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    sequence = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    close = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _normalizer(model.charsmap),
        "pre_tokenizer": _METASPACE,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequence[0], close],
            "pair": [sequence[0], close, sequence[1], close],
            "special_tokens": {"</s>": eos},
        },
        "decoder": _METASPACE,
        "model": {
            "type": "Unigram",
            "unk_id": unknown[0] if unknown else None,
            "vocab": [[text, score] for text, score, _ in pieces],
            "byte_fallback": any(piece[2] == _BYTE for piece in pieces),
        },
    }


def _added_token(i: int, text: str, in_text: bool) -> dict[str, Any]:
    return {
        "id": i,
        "content": text,
        "single_word": False,
        "lstrip": in_text,
        "rstrip": in_text,
        "normalized": False,
        "special": True,
    }


def _normalizer(charsmap: bytes) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if charsmap:
        encoded = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    steps += [
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
    ]
    return {"type": "Sequence", "normalizers": steps}


def from_tokenizer_json(content: dict[str, Any]) -> source_lib.Vocabulary:
    """Translates ``tokenizer.json`` back into a SentencePiece model.

    Args:
        content: of the file.

    Returns:
        A model that gives the same ids, its sentinels taken off and counted.

    Raises:
        ValueError: not a Unigram tokenizer.
    """
    model = content["model"]
    kind = model.get("type", "Unigram" if "unk_id" in model else None)
    if kind != "Unigram":
        raise ValueError(
            f"{TOKENIZER_FILE} holds a {kind} model, expected a Unigram one as T5's. "
            f"Put the SentencePiece model beside it as {SPIECE_FILE}."
        )
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    pieces = [
        (text, score, _piece_kind(i, text, special, model))
        for i, (text, score) in enumerate(model["vocab"])
    ]
    sentinels = 0
    while pieces and pieces[-1][0] == f"<extra_id_{sentinels}>":
        pieces.pop()
        sentinels += 1
    charsmap = b""
    normalizer = content.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]):
        if step.get("type") == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
    return source_lib.Vocabulary(_write_model(_Model(pieces, charsmap)), sentinels)


def _piece_kind(i: int, text: str, special: set[int], model: dict[str, Any]) -> int:
    if i == model["unk_id"]:
        return _UNKNOWN
    if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
        return _BYTE
    return _CONTROL if i in special else _NORMAL


def _parse_model(model_bytes: bytes) -> _Model:
    """Reads a SentencePiece model and checks that it is of T5's kind."""
    pieces, trainer, normalizer = [], {}, {}
    for field, value in _fields(model_bytes):
        if field == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append((entry[1].decode(), score, entry.get(3, _NORMAL)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        raise ValueError(
            "The vocabulary is no Unigram model (its TrainerSpec.model_type is "
            f"{trainer[3]}); only these can be written as {TOKENIZER_FILE}."
        )
    if not all(normalizer.get(field, 1) for field in (3, 4, 5)):
        raise ValueError(
            "The vocabulary was trained without add_dummy_prefix, "
            "remove_extra_whitespaces or escape_whitespaces; only models with all "
            f"three, as T5's, can be written as {TOKENIZER_FILE}."
        )
    return _Model(pieces, normalizer.get(2, b""))


def _write_model(model: _Model) -> bytes:
    """Writes a SentencePiece model with T5's ids and white-space rules."""
    out = bytearray()
    for text, score, kind in model.pieces:
        piece = _bytes_field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        out += _bytes_field(1, piece + b"\x18" + bytes([kind]))
    unknown = next(i for i, piece in enumerate(model.pieces) if piece[2] == _UNKNOWN)
    # unk_id, bos_id (none), eos_id, pad_id
    ids = ((40, unknown), (41, -1), (42, 1), (43, 0))
    trainer = _varint_field(3, _UNIGRAM) + b"".join(_varint_field(*x) for x in ids)
    # The default of byte_fallback is false.
    if any(piece[2] == _BYTE for piece in model.pieces):
        trainer += _varint_field(35, 1)
    out += _bytes_field(2, trainer)
    normalizer = _bytes_field(2, model.charsmap) if model.charsmap else b""
    out += _bytes_field(3, _bytes_field(1, b"from_tokenizer_json") + normalizer)
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
