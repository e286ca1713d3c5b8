"""The STS part of ``sentence-t5 evaluate``: cosines against human scores."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sentence_t5 import embedding_cache, inference, truncation
from sentence_t5.evals import aligned, sts, sts_sets


def check_names(sets: Sequence[sts_sets.StsSet]) -> None:
    """Refuses sets of one name: results go by names.

    Raises:
        ValueError: naming it.
    """
    names = [sts_set.name for sts_set in sets]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            raise ValueError(
                f"got {names.count(name)} sets called {name!r}, expected names that "
                "differ: dataclasses.replace(sts_set, name=...) gives another."
            )


def score(
    model: inference.SentenceT5,
    sts_set: sts_sets.StsSet,
    encoding: Mapping[str, Any],
) -> sts.StsResult:
    """Scores a model on one STS set by the cosine of its vectors.

    Args:
        model: the model.
        sts_set: the set.
        encoding: ``prompt``, which goes before both sides, ``max_length``,
            ``batch_size`` and ``cache_dir`` of ``embedding_cache.encode``.
    """
    # Sentences recur within a set: each is encoded once.
    sentences = list(dict.fromkeys(sts_set.sentences1 + sts_set.sentences2))
    row = {sentence: i for i, sentence in enumerate(sentences)}
    vectors = embedding_cache.encode(model, sentences, label=sts_set.name, **encoding)
    left = vectors[[row[sentence] for sentence in sts_set.sentences1]]
    right = vectors[[row[sentence] for sentence in sts_set.sentences2]]
    return sts.evaluate(
        sts_set.by_subset(sts.cosine(left, right)), sts_set.by_subset(sts_set.scores)
    )


def make_entry(
    model: inference.SentenceT5,
    sts_set: sts_sets.StsSet,
    result: sts.StsResult,
    encoding: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a set's part of the report.

    Args:
        model: the model.
        sts_set: the set.
        result: what ``score`` returned.
        encoding: what it was given.
    """
    sentences = sts_set.sentences1 + sts_set.sentences2
    max_length = encoding["max_length"]
    num_truncated = truncation.count(model, sentences, max_length, encoding["prompt"])
    problem = sts_sets.size_problem(sts_set)
    notes = _notes(result, problem)
    notes += truncation.notes(num_truncated, len(sentences), max_length)
    return {
        "name": sts_set.name,
        "sha256": sts_set.sha256,
        "pairs": len(sts_set.scores),
        "texts_truncated": num_truncated,
        "comparable": problem is None,
        "notes": notes,
        **result.to_dict(),
    }


def format_table(report: Mapping[str, Any]) -> str:
    """Returns the table of the STS sets, Spearman and Pearson × 100."""
    rows = [("set", "over", "pairs", "Spearman", "Pearson")]
    for entry in report["sts"]:
        num_subsets = len(entry["subsets"])
        cells = {"all": entry["all"]}
        if num_subsets > 1:
            cells |= entry["subsets"]
            cells[f"mean of {num_subsets}"] = entry["mean"]
            cells[f"wmean of {num_subsets}"] = entry["wmean"]
        for over, value in cells.items():
            rows.append(
                (
                    entry["name"],
                    over,
                    str(value["n"]),
                    _cell(value["spearman"]),
                    _cell(value["pearson"]),
                )
            )
    if len(report["sts"]) > 1:
        average = report["average"]
        over = f"mean of {len(report['sts'])} sets' all"
        rows.append(
            ("", over, "", _cell(average["spearman"]), _cell(average["pearson"]))
        )
    lines = aligned.lines(rows, to_left=(0, 1))
    lines += [f"NOTE {e['name']}: {n}" for e in report["sts"] for n in e["notes"]]
    return "\n".join(lines)


def _notes(result: sts.StsResult, problem: str | None) -> list[str]:
    """Returns what a reader of the scores must know."""
    notes = [problem] if problem else []
    if result.collapsed:
        notes.append(
            "collapsed embeddings: every pair has the cosine "
            f"{result.similarity_mean:.6g}, so that nothing is ranked."
        )
    named = {"all": result.all, **result.subsets}
    if len(result.subsets) > 1:
        named |= {"mean": result.mean, "wmean": result.wmean}
    notes += [f"{k} is undefined: {c.reason}." for k, c in named.items() if c.reason]
    return notes


def average(results: Mapping[str, sts.StsResult]) -> dict[str, Any]:
    """Averages the pooled correlations over sets; undefined if one of them is."""
    pooled = sts.average({name: r.all for name, r in results.items()}, weighted=False)
    return dataclasses.asdict(pooled)


def _cell(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"
