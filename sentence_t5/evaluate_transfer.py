"""The transfer part of ``sentence-t5 evaluate``: SentEval's classification tasks.

    files ─► frozen vectors ─► logistic regression ─► accuracy (and F1 for MRPC)

Each task's entry in the report records what its scores depend on: files, classifier,
chosen strengths, and how many texts were cut.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sentence_t5 import embedding_cache, fit_cache, inference, progress, truncation
from sentence_t5.evals import aligned, transfer, transfer_sets

_PROTOCOLS = {
    1: f"{transfer.NUM_FOLDS}-fold nested cross-validation",
    2: f"train and test, C by {transfer.NUM_FOLDS} folds of train",
    3: "train, dev and test",
}
# Number of splits -> what scores a task that has so many.
SCORERS = {
    1: transfer.nested_cross_validation,
    2: transfer.cross_validated,
    3: transfer.held_out,
}
# What a reader who compares with published scores must know.
DIFFERENCE = (
    "The classifier is scikit-learn's logistic regression, as SentEval's option has "
    "it; papers mostly used SentEval's default, the same model trained by Adam with "
    "early stopping and weight decay."
)


def make_entry(
    model: inference.SentenceT5,
    transfer_set: transfer_sets.TransferSet,
    encoding: Mapping[str, Any],
) -> dict[str, Any]:
    """Scores a model on one task and records how.

    Args:
        model: the model; its vectors are taken as ``encode`` returns them.
        transfer_set: the task.
        encoding: ``prompt``, ``max_length``, ``batch_size`` and ``cache_dir`` of
            ``embedding_cache.encode``.

    Returns:
        A JSON-able entry; scores × 100.
    """
    name, splits = transfer_set.name, transfer_set.splits
    columns = [column for split in splits.values() for column in split.texts]
    # Texts recur, in pairs above all: each is encoded once.
    texts = list(dict.fromkeys(text for column in columns for text in column))
    vectors = embedding_cache.encode(model, texts, label=name, **encoding)
    row = {text: i for i, text in enumerate(texts)}
    data = [_features(split, vectors, row) for split in splits.values()]
    result = _fit(name, data, encoding["cache_dir"])
    max_length = encoding["max_length"]
    num_truncated = truncation.count(model, texts, max_length, encoding["prompt"])
    labels = data[-1][1]
    positive = transfer_set.task.positive
    problem = transfer_set.size_problem()
    return {
        "name": name,
        "files": {
            split: {
                "file": os.path.abspath(rows.file),
                "sha256": rows.sha256,
                "rows": len(rows.labels),
            }
            for split, rows in splits.items()
        },
        "protocol": _PROTOCOLS[len(data)],
        "classifier": transfer.describe() | {"difference": DIFFERENCE},
        "embedding_dim": int(vectors.shape[1]),
        "num_labels": len(np.unique(labels)),
        "texts_truncated": num_truncated,
        "comparable": problem is None,
        "accuracy": result.accuracy,
        "f1": None
        if positive is None
        else transfer.f1(result.predictions, labels, positive),
        "dev_accuracy": result.dev_accuracy,
        "majority": 100.0 * float(np.unique_counts(labels).counts.max() / len(labels)),
        "chosen_c": list(result.chosen),
        "notes": ([problem] if problem else [])
        + truncation.notes(num_truncated, len(texts), max_length)
        + _notes(result, len(data)),
    }


def _fit(
    name: str, data: Sequence[transfer.Data], cache_dir: str | None
) -> transfer.TransferResult:
    """Fits a task's classifiers, those that an earlier run has kept aside."""
    kept = fit_cache.kept_fits(cache_dir, data, transfer.describe())
    total = transfer.num_fits(len(data))
    with progress.bar(name, total, "fit", shown=True) as bar:
        try:
            return SCORERS[len(data)](*data, progress=bar.update, kept=kept)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _features(
    split: transfer_sets.Split, vectors: np.ndarray, row: Mapping[str, int]
) -> transfer.Data:
    """Returns a split's features, of one text or of two, and its labels."""
    sides = [vectors[[row[text] for text in column]] for column in split.texts]
    sides = [np.asarray(side, np.float64) for side in sides]
    features = sides[0] if len(sides) == 1 else transfer.pair_features(*sides)
    return features, split.labels


def _notes(result: transfer.TransferResult, num_splits: int) -> list[str]:
    """Returns what a reader of the scores must know of the fits."""
    if not result.num_unconverged:
        return []
    return [
        f"{result.num_unconverged} of {transfer.num_fits(num_splits)} fits ended "
        "before they converged."
    ]


def format_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the entries as a table for people, scores × 100."""
    rows = [("task", "rows", "accuracy", "F1", "majority", "C", "protocol")]
    for entry in entries:
        rows.append(
            (
                entry["name"],
                " / ".join(str(file["rows"]) for file in entry["files"].values()),
                f"{entry['accuracy']:.2f}",
                "" if entry["f1"] is None else f"{entry['f1']:.2f}",
                f"{entry['majority']:.2f}",
                _range(entry["chosen_c"]),
                entry["protocol"],
            )
        )
    if len(entries) > 1:
        mean = np.mean([entry["accuracy"] for entry in entries])
        rows.append((f"mean of {len(entries)} tasks", "", f"{mean:.2f}", *[""] * 4))
    lines = ["transfer by logistic regression on frozen vectors"]
    lines += aligned.lines(rows, to_left=(0, len(rows[0]) - 1))
    lines += [f"NOTE {e['name']}: {note}" for e in entries for note in e["notes"]]
    return "\n".join([*lines, f"NOTE {DIFFERENCE}"])


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"
