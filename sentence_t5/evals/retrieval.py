"""Retrieval metrics: rankings against judgements, as trec_eval counts them.

Numbers only: no model, no JAX. Metrics are fractions, not percentages:

    ndcg@k    sum of grade / log2(rank + 1) over the first k, over the best possible sum
    recall@k  share of the relevant passages among the first k
    mrr@k     1 / rank of the first relevant passage, 0 if it is not among the first k
    map       mean, over the relevant passages, of the precision at each one's rank

A passage is relevant if its grade is above 0, and its grade is its gain. Equal scores
are ordered by passage id, the larger one (as a string) first, as trec_eval does; scores
are compared as float32. Every judged query counts: with no result, or with nothing
relevant, as 0.

Source: trec_eval (NIST), as BEIR uses it (Thakur et al. 2021, arXiv 2104.08663).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

NDCG_CUTS = (1, 10, 100)
RECALL_CUTS = (10, 100)
MRR_CUTS = (10,)
METRICS = (
    *(f"ndcg@{k}" for k in NDCG_CUTS),
    *(f"recall@{k}" for k in RECALL_CUTS),
    *(f"mrr@{k}" for k in MRR_CUTS),
    "map",
)

Judgements = Mapping[str, Mapping[str, int]]
Results = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class RetrievalResult:
    """Scores of one retrieval set.

    Attributes:
        mean: metric -> mean over all judged queries.
        queries: query id -> metric -> value.
        num_without_results: judged queries that no passage was retrieved for.
        num_without_relevant: judged queries with no relevant passage at all.
    """

    mean: Mapping[str, float]
    queries: Mapping[str, Mapping[str, float]]
    num_without_results: int
    num_without_relevant: int


def evaluate(judgements: Judgements, results: Results) -> RetrievalResult:
    """Scores the results of all judged queries.

    Args:
        judgements: query id -> passage id -> grade.
        results: query id -> passage id -> score; queries without judgements are not
            looked at.

    Returns:
        The metrics.

    Raises:
        ValueError: nothing is judged, or a score is not a finite number.
    """
    if not judgements:
        raise ValueError("No query has judgements: there is nothing to score.")
    queries = {
        query: score_query(grades, rank(results.get(query, {})))
        for query, grades in judgements.items()
    }
    return RetrievalResult(
        mean={
            metric: math.fsum(q[metric] for q in queries.values()) / len(queries)
            for metric in METRICS
        },
        queries=queries,
        num_without_results=sum(not results.get(query) for query in judgements),
        num_without_relevant=sum(
            max(grades.values(), default=0) <= 0 for grades in judgements.values()
        ),
    )


def rank(scores: Mapping[str, float]) -> list[str]:
    """Orders passage ids by score, equal scores by the larger id."""
    by_id = sorted(scores, reverse=True)
    values = np.array([scores[passage] for passage in by_id], np.float32)
    if not np.isfinite(values).all():
        bad = by_id[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise ValueError(f"The score of passage {bad!r} is {scores[bad]}.")
    return [by_id[i] for i in np.argsort(-values, kind="stable")]


def score_query(grades: Mapping[str, int], ranking: Sequence[str]) -> dict[str, float]:
    """Scores one query's ranking, best passage first, against its judgements."""
    gains = np.array([max(grades.get(passage, 0), 0) for passage in ranking], float)
    ideal = np.sort([float(max(grade, 0)) for grade in grades.values()])[::-1]
    relevant = gains > 0
    num_relevant = int((ideal > 0).sum())
    scores = {f"ndcg@{k}": _ratio(_dcg(gains, k), _dcg(ideal, k)) for k in NDCG_CUTS}
    for k in RECALL_CUTS:
        scores[f"recall@{k}"] = _ratio(float(relevant[:k].sum()), num_relevant)
    first = int(relevant.argmax()) + 1 if relevant.any() else math.inf
    for k in MRR_CUTS:
        scores[f"mrr@{k}"] = 1.0 / first if first <= k else 0.0
    ranks = np.flatnonzero(relevant) + 1
    precisions = np.arange(1, len(ranks) + 1) / ranks
    scores["map"] = _ratio(float(precisions.sum()), num_relevant)
    return scores


def _dcg(gains: np.ndarray, k: int) -> float:
    gains = gains[:k]
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


def _ratio(value: float, total: float) -> float:
    return value / total if total else 0.0
