"""The retrieval part of ``sentence-t5 evaluate``: scores of BEIR-layout folders.

Each set's entry in the report records what its scores depend on: files, prompts,
lengths, similarity and how many texts were cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sentence_t5 import inference, retrieve, truncation
from sentence_t5.evals import aligned, retrieval
from sentence_t5.tasks import beir_folder

# Columns of the table: metric -> heading.
_HEADINGS = {
    "ndcg@1": "nDCG@1",
    "ndcg@10": "nDCG@10",
    "ndcg@100": "nDCG@100",
    "recall@10": "Recall@10",
    "recall@100": "Recall@100",
    "mrr@10": "MRR@10",
    "map": "MAP",
}


def make_entry(
    model: inference.SentenceT5,
    collection: beir_folder.Collection,
    options: retrieve.Options,
) -> dict[str, Any]:
    """Scores a model on one set and records how.

    Args:
        model: the model.
        collection: the set.
        options: prompts, lengths, similarity, depth.

    Returns:
        A JSON-able entry: ``scores`` (fractions), ``queries`` with each one's own, and
        what they depend on.
    """
    run = retrieve.run(model, collection, options)
    result = retrieval.evaluate(collection.judgements, run.results)
    sides = {
        "query": _describe_side(model, collection.queries, options.query),
        "passage": _describe_side(model, collection.passages, options.passage),
    }
    return {
        "name": collection.name,
        "split": collection.split,
        "sha256": dict(collection.sha256),
        "num_passages": len(collection.passages),
        "num_queries": len(collection.judgements),
        "num_judgements": sum(map(len, collection.judgements.values())),
        "similarity": retrieve.similarity_of(model, options.similarity),
        "depth": options.depth,
        "identical_ids": "kept" if options.keep_identical_ids else "left out",
        **sides,
        "notes": _notes(collection, run, result, sides),
        "scores": dict(result.mean),
        "queries": {query: dict(values) for query, values in result.queries.items()},
    }


def format_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the entries as a table for people, metrics × 100."""
    rows = [("set", "queries", "passages", *_HEADINGS.values())]
    for entry in entries:
        sizes = (str(entry["num_queries"]), str(entry["num_passages"]))
        scores = [f"{100 * entry['scores'][metric]:.2f}" for metric in _HEADINGS]
        rows.append((f"{entry['name']} {entry['split']}", *sizes, *scores))
    if len(entries) > 1:
        means = [
            f"{100 * sum(e['scores'][metric] for e in entries) / len(entries):.2f}"
            for metric in _HEADINGS
        ]
        rows.append((f"mean of {len(entries)} sets", "", "", *means))
    lines = [_how(entries[0]), *aligned.lines(rows)]
    lines += [f"NOTE {e['name']}: {note}" for e in entries for note in e["notes"]]
    return "\n".join(lines)


def _how(entry: Mapping[str, Any]) -> str:
    """Says in one line what all sets of a report share."""
    sides = ", ".join(
        f"{side} {entry[side]['max_length']} tokens"
        + (f" after {entry[side]['prompt']!r}" if entry[side]["prompt"] else "")
        for side in ("query", "passage")
    )
    return f"retrieval by {entry['similarity']}, {sides}, first {entry['depth']}"


def _describe_side(
    model: inference.SentenceT5, texts: Sequence[str], side: retrieve.Side
) -> dict[str, Any]:
    truncated = retrieve.num_truncated(model, texts, side)
    return retrieve.describe_side(model, side) | {"texts_truncated": truncated}


def _notes(
    collection: beir_folder.Collection,
    run: retrieve.Run,
    result: retrieval.RetrievalResult,
    sides: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Returns what a reader of the scores must know."""
    notes = []
    for side, texts in (
        ("query", collection.queries),
        ("passage", collection.passages),
    ):
        notes += truncation.notes(
            sides[side]["texts_truncated"],
            len(texts),
            sides[side]["max_length"],
            f"{side} texts",
        )
    if run.num_identical:
        notes.append(
            f"{run.num_identical} retrieved passages with the id of their query were "
            f"left out, as BEIR does; {run.num_identical_relevant} of them are judged "
            "relevant."
        )
    if result.num_without_results:
        notes.append(f"{result.num_without_results} queries without a result count 0.")
    if result.num_without_relevant:
        notes.append(
            f"{result.num_without_relevant} queries have no relevant passage; they "
            "count 0."
        )
    known = set(collection.passage_ids)
    judged = {p for grades in collection.judgements.values() for p in grades}
    if missing := len(judged - known):
        notes.append(f"{missing} judged passages are not in the corpus.")
    return notes
