"""Writes trec_eval.json: random rankings and what trec_eval makes of them.

    pip install -e .[trec]
    python tests/golden/make_trec_eval.py

The rankings hold what implementations differ in: ties, grades of 0 and below, queries
without a result, without a relevant passage, and with more relevant passages than cuts.
"""

import json
import pathlib
import random

import pytrec_eval


def make_case(seed: int) -> tuple[dict, dict]:
    """Draws judgements and results of a few queries."""
    rng = random.Random(seed)
    judgements, results = {}, {}
    passages = [f"d{i}" for i in range(150)]
    for number in range(8):
        query = f"q{number}"
        judged = rng.sample(passages, rng.choice([1, 3, 12, 120]))
        grades = rng.choice([(0, 1), (0, 1, 2, 3), (0,), (-1, 0, 1)])
        judgements[query] = {passage: rng.choice(grades) for passage in judged}
        if number == 3:
            continue  # No result at all.
        found = rng.sample(passages, rng.choice([1, 5, 40, 130]))
        # Few different scores, so that many tie.
        steps = rng.choice([3, 1000])
        results[query] = {p: rng.randrange(steps) / steps for p in found}
    return judgements, results


def score(judgements: dict, results: dict) -> dict:
    """Asks trec_eval; the reciprocal rank of the first ten needs a run of its own."""
    evaluator = pytrec_eval.RelevanceEvaluator(
        judgements, {"ndcg_cut.1,10,100", "recall.10,100", "map"}
    )
    scores = evaluator.evaluate(results)
    first_ten = {
        query: dict(
            sorted(sorted(found.items(), reverse=True), key=lambda item: -item[1])[:10]
        )
        for query, found in results.items()
    }
    ranks = pytrec_eval.RelevanceEvaluator(judgements, {"recip_rank"})
    for query, values in ranks.evaluate(first_ten).items():
        scores[query]["mrr_10"] = values["recip_rank"]
    rename = {"ndcg_cut_": "ndcg@", "recall_": "recall@", "mrr_": "mrr@"}
    named = {}
    for query, values in scores.items():
        named[query] = {}
        for name, value in values.items():
            for old, new in rename.items():
                name = name.replace(old, new)
            named[query][name] = value
    return named


def main() -> None:
    """Writes the file."""
    cases = []
    for seed in range(6):
        judgements, results = make_case(seed)
        cases.append(
            {
                "judgements": judgements,
                "results": results,
                "scores": score(judgements, results),
            }
        )
    target = pathlib.Path(__file__).with_name("trec_eval.json")
    target.write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
