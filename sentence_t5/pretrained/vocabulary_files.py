"""A SentencePiece model as ``spiece.model`` and as Hugging Face's ``tokenizer.json``.

    spiece.model ◄─► pieces, scores, kinds, character map ◄─► tokenizer.json

Unigram models (T5's) and BPE models with T5's white-space rules are translated, both
ways. Both files then give the same ids, but for the texts that ``docs/weights.md``
lists.

Source: ``tokenizer.json`` as tokenizers 0.23 writes it.
"""

import base64
import json
import os
import pathlib
from typing import Any

from sentence_t5.pretrained import sentencepiece_proto as proto
from sentence_t5.pretrained import source as source_lib

SPIECE_FILE = "spiece.model"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_T5_EXTRA_IDS = 100
_METASPACE = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": "always",
    "split": True,
}


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
            texts = {piece[0] for piece in proto.parse(model_bytes).pieces}
            has_own = {"<extra_id_0>", "▁<extra_id_0>"} & texts
            extra_ids = 0 if has_own else _T5_EXTRA_IDS
        return source_lib.Vocabulary(model_bytes, extra_ids)
    if (folder / TOKENIZER_FILE).exists():
        content = json.loads((folder / TOKENIZER_FILE).read_text())
        return from_tokenizer_json(content)
    return None


def tokenizer_class(vocabulary: source_lib.Vocabulary) -> str:
    """The transformers class that reads the vocabulary's ``tokenizer.json`` right."""
    # T5Tokenizer takes the pieces for a Unigram model's, whatever the file says.
    is_unigram = proto.parse(vocabulary.model_bytes).model_type == proto.UNIGRAM
    return "T5Tokenizer" if is_unigram else "PreTrainedTokenizerFast"


def to_tokenizer_json(vocabulary: source_lib.Vocabulary) -> dict[str, Any]:
    """Translates a SentencePiece model.

    Returns:
        The content of ``tokenizer.json``: closes texts with ``</s>``, sentinels added.

    Raises:
        ValueError: neither Unigram nor BPE, or other white-space rules than T5's.
    """
    model = proto.parse(vocabulary.model_bytes)
    _check(model)
    pieces = list(model.pieces)
    first_sentinel = len(pieces)
    for i in reversed(range(vocabulary.extra_ids)):
        pieces.append((f"<extra_id_{i}>", 0.0, proto.USER_DEFINED))
    added = [
        _added_token(i, text, in_text=i >= first_sentinel)
        for i, (text, _, kind) in enumerate(pieces)
        if kind in (proto.UNKNOWN, proto.CONTROL, proto.USER_DEFINED)
    ]
    eos = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    sequence = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    close = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    is_unigram = model.model_type == proto.UNIGRAM
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _normalizer(model.charsmap, is_unigram),
        "pre_tokenizer": {
            **_METASPACE,
            "prepend_scheme": "always" if is_unigram else "never",
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequence[0], close],
            "pair": [sequence[0], close, sequence[1], close],
            "special_tokens": {"</s>": eos},
        },
        "decoder": _METASPACE,
        "model": _unigram(pieces) if is_unigram else _bpe(pieces),
    }


def _check(model: proto.Model) -> None:
    if model.model_type not in (proto.UNIGRAM, proto.BPE):
        raise ValueError(
            f"The vocabulary's TrainerSpec.model_type is {model.model_type}; only "
            f"Unigram ({proto.UNIGRAM}) and BPE ({proto.BPE}) models can be written as "
            f"{TOKENIZER_FILE}."
        )
    if model.white_space_rules_off:
        raise ValueError(
            "The vocabulary was trained without "
            f"{', '.join(model.white_space_rules_off)}; only models with T5's "
            f"white-space rules can be written as {TOKENIZER_FILE}."
        )


def _unigram(pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _unknown(pieces),
        "vocab": [[text, score] for text, score, _ in pieces],
        "byte_fallback": any(piece[2] == proto.BYTE for piece in pieces),
    }


def _bpe(pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    """A piece is merged from every pair of pieces it can be cut into, best first."""
    normal = {text: score for text, score, kind in pieces if kind == proto.NORMAL}
    merges = [
        (score, text[:cut], text[cut:])
        for text, score in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    merges.sort(key=lambda merge: -merge[0])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[_unknown(pieces)][0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": any(piece[2] == proto.BYTE for piece in pieces),
        "ignore_merges": False,
        "vocab": {piece[0]: i for i, piece in enumerate(pieces)},
        "merges": [[left, right] for _, left, right in merges],
    }


def _unknown(pieces: list[tuple[str, float, int]]) -> int:
    return next(i for i, piece in enumerate(pieces) if piece[2] == proto.UNKNOWN)


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


def _normalizer(charsmap: bytes, as_t5: bool) -> dict[str, Any]:
    """The steps before cutting a text into words.

    Args:
        charsmap: compiled rules, the first step; empty for none.
        as_t5: the steps of T5's own file, which rely on its rules having turned all
            white space into spaces. Otherwise the same spelt out for any rules.
    """
    steps: list[dict[str, Any]] = []
    if charsmap:
        encoded = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if as_t5:
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        steps.append(_replace(" {2,}", "▁"))
    else:
        # Not ^ and $, which match at the ends of lines.
        steps += [_replace(r"\A +", ""), _replace(r" +\z", ""), _replace(" {2,}", " ")]
        steps.append({"type": "Prepend", "prepend": "▁"})
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def from_tokenizer_json(content: dict[str, Any]) -> source_lib.Vocabulary:
    """Translates ``tokenizer.json`` back into a SentencePiece model.

    Args:
        content: of the file.

    Returns:
        A model that gives the same ids, its sentinels taken off and counted.

    Raises:
        ValueError: neither a Unigram nor a BPE tokenizer.
    """
    model = content["model"]
    kind = model.get("type", "Unigram" if "unk_id" in model else None)
    if kind == "Unigram":
        scores = [tuple(entry) for entry in model["vocab"]]
        unknown = scores[model["unk_id"]][0]
    elif kind == "BPE":
        scores, unknown = _bpe_scores(model), model["unk_token"]
    else:
        raise ValueError(
            f"{TOKENIZER_FILE} holds a {kind} model, expected Unigram (T5's) or BPE. "
            f"Put the SentencePiece model beside it as {SPIECE_FILE}."
        )
    special = {t["content"] for t in content["added_tokens"] if t["special"]}
    bytes_too = bool(model.get("byte_fallback"))
    pieces = []
    for text, score in scores:
        if text == unknown:
            piece_kind = proto.UNKNOWN
        elif bytes_too and len(text) == 6 and text.startswith("<0x"):
            piece_kind = proto.BYTE
        else:
            piece_kind = proto.CONTROL if text in special else proto.NORMAL
        pieces.append((text, score, piece_kind))
    sentinels = 0
    while pieces and pieces[-1][0] == f"<extra_id_{sentinels}>":
        pieces.pop()
        sentinels += 1
    charsmap = b""
    normalizer = content.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]):
        if step.get("type") == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
    model_type = proto.UNIGRAM if kind == "Unigram" else proto.BPE
    written = proto.serialize(proto.Model(model_type, pieces, charsmap))
    return source_lib.Vocabulary(written, sentinels)


def _bpe_scores(model: dict[str, Any]) -> list[tuple[str, float]]:
    """Pieces by id; a piece's score falls with the rank of its first merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    by_id = sorted(model["vocab"].items(), key=lambda item: item[1])
    return [(text, -float(ranks.get(text, len(ranks) * 9))) for text, _ in by_id]
