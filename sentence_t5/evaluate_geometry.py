"""The geometry part of ``sentence-t5 evaluate``: how a model's vectors are spread.

Reads a TSV of sentence pairs, with scores or without, or a text file, one text a line.
Alignment is over the pairs that mean the same: those scored above a threshold, or all
where there are no scores. The rest is over the distinct texts of the file.

Source: the choice of pairs and texts is SimCSE's (Gao et al. 2021): STS-B pairs scored
above 4, all STS-B sentences.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sentence_t5 import embedding_cache, encode, inference, truncation, whole_files
from sentence_t5.evals import aligned, geometry, sts_sets

# Pairs scored above it are positive. 4 of 5 is "equivalent but for details".
POSITIVE_SCORE = 4.0
# Distinct texts compared with each other; of more, a fixed sample is.
_MAX_TEXTS = 20_000
_HEADINGS = {
    "alignment": "alignment",
    "uniformity": "uniformity",
    "average_cosine": "mean cosine",
    "effective_rank": "eff. rank",
}


@dataclasses.dataclass(frozen=True)
class Texts:
    """What one file holds.

    Attributes:
        name: the file's name without folder and ending.
        texts: its distinct texts, in order of appearance.
        positives: positions in ``texts`` of the positive pairs, int [p 2].
        num_pairs: pairs in the file; 0 for a text file.
        scored: whether the pairs have scores.
        sha256: hex digest of the file.
    """

    name: str
    texts: tuple[str, ...]
    positives: np.ndarray
    num_pairs: int
    scored: bool
    sha256: str


def load(
    path: str | os.PathLike,
    columns: Mapping[str, str] | None = None,
    positive_score: float = POSITIVE_SCORE,
) -> Texts:
    """Reads a file: pairs if its name ends in ``.tsv``, else one text a line.

    Args:
        path: the file.
        columns: of a TSV, as ``sts_sets.load_tsv`` takes them.
        positive_score: pairs scored above it are positive.

    Raises:
        ValueError: a bad line, or fewer than two distinct texts.
    """
    name, ending = os.path.splitext(os.path.basename(path))
    if ending == ".tsv":
        pairs = sts_sets.load_tsv(path, columns, optional=("score", "subset"))
        texts, digest = pairs.sentences1 + pairs.sentences2, pairs.sha256
        scored = not np.isnan(pairs.scores).all()
        num_pairs = len(pairs.scores)
        chosen = np.ones(num_pairs, bool)
        if scored:
            chosen = pairs.scores > positive_score
    else:
        texts = [line for line in encode.read_lines(path) if line.strip()]
        digest = whole_files.sha256(path)
        num_pairs, scored = 0, False
    distinct = tuple(dict.fromkeys(texts))
    if len(distinct) < 2:
        raise ValueError(
            f"{path}: got {len(distinct)} distinct text(s), expected two or more."
        )
    positives = np.empty((0, 2), int)
    if num_pairs:
        row = {text: i for i, text in enumerate(distinct)}
        sides = np.array([row[text] for text in texts]).reshape(2, num_pairs)
        positives = sides[:, chosen].T
    return Texts(name, distinct, positives, num_pairs, scored, digest)


def make_entry(
    model: inference.SentenceT5,
    texts: Texts,
    encoding: Mapping[str, Any],
    positive_score: float = POSITIVE_SCORE,
) -> dict[str, Any]:
    """Measures a model's vectors of one file and records how.

    Args:
        model: the model.
        texts: the file.
        encoding: ``prompt``, ``max_length``, ``batch_size`` and ``cache_dir`` of
            ``embedding_cache.encode``.
        positive_score: what ``load`` was given.

    Returns:
        A JSON-able entry; what is undefined is None, with a note.
    """
    vectors = embedding_cache.encode(model, texts.texts, label=texts.name, **encoding)
    max_length = encoding["max_length"]
    num_truncated = truncation.count(model, texts.texts, max_length, encoding["prompt"])
    values, notes = _measure(np.asarray(vectors, np.float64), texts)
    notes += truncation.notes(num_truncated, len(texts.texts), max_length)
    return {
        "name": texts.name,
        "sha256": texts.sha256,
        "pairs": texts.num_pairs,
        "positive_pairs": len(texts.positives),
        "positive_score": positive_score if texts.scored else None,
        "texts": len(texts.texts),
        "texts_truncated": num_truncated,
        "embedding_dim": int(vectors.shape[1]),
        "notes": notes,
        **values,
    }


def _measure(vectors: np.ndarray, texts: Texts) -> tuple[dict[str, Any], list[str]]:
    """Returns the numbers of a file's vectors [n E], and what to know of them."""
    values = {"singular_values": None, **dict.fromkeys(_HEADINGS)}
    zero = int((~vectors.any(axis=1)).sum())
    if zero:
        return values, [f"undefined: {zero} of {len(vectors)} vectors are zero."]
    notes = []
    if len(texts.positives):
        left, right = (vectors[side] for side in texts.positives.T)
        values["alignment"] = geometry.alignment(left, right)
    else:
        notes.append(
            "alignment is undefined: "
            + (
                "no pair is scored above the threshold."
                if texts.scored
                else "no pairs."
            )
        )
    if len(vectors) > _MAX_TEXTS:
        notes.append(
            f"all but alignment is of {_MAX_TEXTS} of {len(vectors)} texts, a sample "
            "that is always the same."
        )
        rows = np.random.default_rng(0).choice(len(vectors), _MAX_TEXTS, replace=False)
        vectors = vectors[np.sort(rows)]
    spectrum = geometry.spectrum(vectors)
    values["uniformity"] = geometry.uniformity(vectors)
    values["average_cosine"] = geometry.average_cosine(vectors)
    values["effective_rank"] = geometry.effective_rank(spectrum)
    values["singular_values"] = spectrum.tolist()
    if values["effective_rank"] is None:
        notes.append("collapsed embeddings: all texts have the same vector.")
    return values, notes


def format_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the entries as a table for people, numbers as they are."""
    rows = [("set", "texts", "positive pairs", *_HEADINGS.values(), "of")]
    for entry in entries:
        cells = [entry[key] for key in _HEADINGS]
        rows.append(
            (
                entry["name"],
                str(entry["texts"]),
                str(entry["positive_pairs"]),
                *("undefined" if cell is None else f"{cell:.3f}" for cell in cells),
                str(entry["embedding_dim"]),
            )
        )
    lines = ["geometry", *aligned.lines(rows)]
    lines += [f"NOTE {e['name']}: {note}" for e in entries for note in e["notes"]]
    return "\n".join(lines)
