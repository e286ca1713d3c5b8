"""Held-out rows with instructions: ranks by hand, the file, evaluate's part."""

import gzip
import json
import math

import numpy as np
import pytest

from sentence_t5 import evaluate_instructions
from sentence_t5.evals import pair_ranks

ASK, ANSWER = "Find the answer:", "Be found:"


class Angles:
    """A model whose texts are angles; an instruction turns by its length in degrees."""

    max_length = 16

    def encode(self, texts, *, instruction, max_length, **options):
        assert options["on_crowding"] == "keep_text"
        angles = [
            float(text) + math.radians(len(before))
            for text, before in zip(texts, instruction, strict=True)
        ]
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def truncated(self, texts, max_length, *, instruction):
        return np.array([len(text) > 4 for text in texts])


def write(path, rows):
    lines = [
        json.dumps({"query": q, "pos": p, "neg": n, "task_id": t})
        for t, q, p, n in rows
    ]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def scored(path, **options):
    rows = evaluate_instructions.load(path)
    return evaluate_instructions.make_entry(
        Angles(), rows, max_length=16, batch_size=4, **options
    )


def test_share_before_by_hand():
    x, y = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    left = np.concatenate([x, x, x])
    right = np.concatenate([x, y, x])
    negative = np.concatenate([y, x, x])  # before, after, a tie: lost
    assert pair_ranks.share_before(left, right, negative) == pytest.approx(1 / 3)


def test_mean_reciprocal_rank_equals_a_loop():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 9, 3))
    negatives = rng.normal(size=(4, 3))
    texts = list("abcdeabca")
    for i, text in enumerate(texts):
        right[i] = right[texts.index(text)]  # one text has one vector
    total = 0.0
    for i, text in enumerate(texts):
        own = left[i] @ right[i]
        rivals = [left[i] @ right[texts.index(t)] for t in set(texts) if t != text]
        rivals += [left[i] @ negative for negative in negatives]
        total += 1 / (1 + sum(rival >= own for rival in rivals))
    got = pair_ranks.mean_reciprocal_rank(left, right, texts, negatives)
    assert got == pytest.approx(total / 9, abs=1e-12)
    same = np.ones((3, 2))
    collapsed = pair_ranks.mean_reciprocal_rank(same, same, list("abc"), same[:0])
    assert collapsed == pytest.approx(1 / 3)


def test_rows_are_scored_within_their_task_with_their_instructions(tmp_path):
    path = write(
        tmp_path / "held_out.jsonl.gz",
        [
            # Turned by 16 and 9 degrees: 0.2 is nearer to its query than 0.5 is.
            ("a", [ASK, "0"], [ANSWER, "0.2"], [ANSWER, "0.5"]),
            ("a", [ASK, "1"], [ANSWER, "2"], [ANSWER, "1.1"]),
            # Another task: its text is no rival of the others'.
            ("b", ["", "0.2"], ["", "0.2"], None),
        ],
    )
    entry = scored(path)
    assert (entry["name"], entry["rows"]) == ("held_out", 3)
    assert len(entry["sha256"]) == 64
    assert entry["tasks"]["a"]["pairs"] == 50.0
    # The second row's query is turned 7 degrees further than the task's other texts.
    away = {t: abs(1 + math.radians(7) - t) for t in (0.2, 0.5, 1.1, 2.0)}
    rank = 1 + sum(away[t] <= away[2.0] for t in (0.2, 0.5, 1.1))
    assert entry["tasks"]["a"]["retrieval"] == pytest.approx(50 * (1 + 1 / rank))
    assert entry["tasks"]["b"]["pairs"] is None
    assert entry["tasks"]["b"]["retrieval"] == 100.0
    # Over rows: two rows have a negative, three are ranked.
    assert entry["pairs"] == 50.0
    want = (2 * entry["tasks"]["a"]["retrieval"] + 100) / 3
    assert entry["retrieval"] == pytest.approx(want)
    assert entry["tasks"]["a"]["instructions"] == {
        "query": [ASK], "pos": [ANSWER], "neg": [ANSWER],
    }  # fmt: skip
    table = evaluate_instructions.format_table([entry])
    assert "held_out  mean over rows     3  50.00" in table


def test_tasks_with_labels_are_not_ranked(tmp_path):
    rows = [("a", ["", "0"], ["", "1"], ["", "2"]), ("b", ["", "0"], ["", "3"], None)]
    path = write(tmp_path / "rows.jsonl", rows)
    entry = scored(path, labelled=frozenset({"a"}))
    assert entry["tasks"]["a"]["retrieval"] is None
    assert (entry["labelled"], entry["retrieval"]) == (["a"], 100.0)
    loaded = evaluate_instructions.load(path)
    with pytest.raises(ValueError, match="no task c; the files have a, b"):
        evaluate_instructions.check_labelled({"c"}, [loaded])
    path.write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        evaluate_instructions.load(path)
    path.write_text('{"query": ["", "a"], "pos": "b", "task_id": "t"}\n')
    with pytest.raises(
        ValueError, match=r"line 1: 'pos' must be \[instruction, text\]"
    ):
        evaluate_instructions.load(path)
