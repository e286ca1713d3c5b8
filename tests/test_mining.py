"""Mining: equal to a brute force over all texts, resumed to the same bytes."""

import dataclasses
import functools
import gzip
import json
import pathlib
from typing import ClassVar

import numpy as np
import pytest

from sentence_t5 import (
    inference,
    mine,
    mining,
    mining_files,
    retrieve,
    search,
    whole_files,
)
from sentence_t5.encoder import EncoderConfig
from sentence_t5.t5.config import T5Config
from sentence_t5.tasks import files
from sentence_t5.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parent.parent
T5 = T5Config(
    vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1
)
OPTIONS = retrieve.Options()


class FakeModel:
    """Gives each text a unit vector drawn from the hash of its normalised words."""

    tokenizer = Tokenizer(ROOT / "tasks" / "data" / "synthetic.model")
    config = EncoderConfig(t5=T5, projection_dim=None)
    max_length = 16
    step = 3
    fingerprint = "fake"
    embedding_dim = 8
    prompts: ClassVar = {}
    default_prompt = None

    def __init__(self):
        self.num_encoded = 0

    def truncated(self, texts, max_length=None, *, instruction):
        max_length = max_length or self.max_length
        return np.array([len(text) > max_length for text in texts])

    def encode(self, texts, **options):
        self.num_encoded += len(texts)
        return np.stack([vector_of(text) for text in texts])


@functools.cache
def vector_of(text):
    words = mining.normalise(text).split()
    total = np.zeros(8)
    for word in words:
        seed = [ord(c) for c in word]
        total += np.random.default_rng(seed).normal(size=8)
    return (total / np.linalg.norm(total)).astype(np.float32)


def make_source(num_queries=40, num_passages=120, seed=0):
    """Draws texts from few words, so that some are the same but for case and space."""
    rng = np.random.default_rng(seed)
    words = ["red", "blue", "cat", "dog", "tree", "Über", "ﬁne", "house"]

    def draw():
        text = " ".join(rng.choice(words, 2))
        spelling = rng.integers(4)
        return [text, text.upper(), f" {text}  ", text][spelling]

    corpus = [draw() for _ in range(num_passages)]
    pairs = []
    for number in range(num_queries):
        query = draw()
        for row in rng.choice(num_passages, rng.integers(1, 4), replace=False):
            pairs.append(mining.RawPair(query, corpus[row], f"q{number}", f"d{row}"))
    ids = [f"d{i}" for i in range(num_passages)]
    return mining_files.Source(pairs, corpus, ids, {"source": str(seed)})


normalise = functools.cache(mining.normalise)


def brute_force(source, rules):
    """Yields each pair's negatives by looping over every passage of the corpus."""
    known = {}
    for pair in source.pairs:
        same = known.setdefault(mining.normalise(pair.query), set())
        same.add(mining.normalise(pair.positive))
    seen, distinct = set(), []
    for row, text in enumerate(source.corpus):
        if mining.normalise(text) not in seen:
            seen.add(mining.normalise(text))
            distinct.append(row)
    order = {}
    for pair in source.pairs:
        order.setdefault(pair.query, []).append(pair)
    for pair in (pair for group in order.values() for pair in group):
        forbidden = known[mining.normalise(pair.query)] | {mining.normalise(pair.query)}
        query = vector_of(pair.query).astype(float)
        positive = np.float32(query @ vector_of(pair.positive).astype(float))
        scored = [
            (np.float32(query @ vector_of(source.corpus[row]).astype(float)), row)
            for row in distinct
            if normalise(source.corpus[row]) not in forbidden
        ]
        scored.sort(key=lambda item: (-item[0], item[1]))
        window = scored[rules.min_rank - 1 : rules.max_rank]
        limit = float(positive)
        limits = [limit - (rules.margin or 0.0)] if rules.margin is not None else []
        if rules.relative_margin is not None:
            limits.append(limit - abs(limit) * rules.relative_margin)
        if rules.max_score is not None:
            limits.append(rules.max_score)
        kept = [
            (score, row)
            for score, row in window
            if all(float(score) <= limit for limit in limits)
            and (rules.min_score is None or float(score) >= rules.min_score)
        ]
        yield pair, positive, kept[: rules.num_negatives]


RULES = {
    "nearest": mining.Rules(num_negatives=4, max_rank=10),
    "window": mining.Rules(num_negatives=3, min_rank=5, max_rank=9),
    "margin": mining.Rules(num_negatives=6, max_rank=40, margin=0.2),
    "relative": mining.Rules(num_negatives=6, max_rank=40, relative_margin=0.05),
    "scores": mining.Rules(num_negatives=9, max_rank=60, min_score=0.0, max_score=0.7),
    "all": mining.Rules(num_negatives=500, max_rank=500),
}


def read(path):
    data = pathlib.Path(path).read_bytes()
    data = gzip.decompress(data) if path.name.endswith(".gz") else data
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("rules", RULES)
def test_equals_a_brute_force(rules, tmp_path):
    rules, source = RULES[rules], make_source()
    output = tmp_path / "mined.jsonl"
    about = mine.mine(FakeModel(), source, rules, OPTIONS, output)
    rows = read(output)
    expected = list(brute_force(source, rules))
    assert len(rows) == len(expected) == len(source.pairs)
    for row, (pair, positive, negatives) in zip(rows, expected, strict=True):
        assert (row["anchor"], row["positive"]) == (pair.query, pair.positive)
        assert (row["query_id"], row["positive_id"]) == (
            pair.query_id, pair.positive_id
        )  # fmt: skip
        assert row["negative_ids"] == [f"d{number}" for _, number in negatives]
        assert row["negatives"] == [source.corpus[number] for _, number in negatives]
        assert np.float32(row["positive_score"]) == positive
        scores = [score for score, _ in negatives]
        assert np.float32(row["negative_scores"]).tolist() == scores
    counts = about["counts"]
    assert counts["negatives"] == sum(len(row["negatives"]) for row in rows) > 0
    assert counts["short"] == sum(
        len(row["negatives"]) < rules.num_negatives for row in rows
    )
    assert counts["passages"] < counts["passages_with_repeats"] == 120


def test_known_positives_and_identical_texts_are_never_mined(tmp_path):
    # The same query in other letters has another positive; a passage is the query.
    pairs = [
        mining.RawPair("Big Cat", "the lion"),
        mining.RawPair("big  cat", "the tiger"),
        mining.RawPair("dog", "a wolf"),
    ]
    corpus = ["The Lion", "the lion ", "the tiger", "BIG CAT", "a wolf", "a wolf", "x"]
    source = mining_files.Source(pairs, corpus, None, {})
    rules = mining.Rules(num_negatives=50, max_rank=50)
    output = tmp_path / "mined.jsonl"
    mine.mine(FakeModel(), source, rules, OPTIONS, output)
    rows = read(output)
    assert [sorted(row["negatives"]) for row in rows] == [
        ["a wolf", "x"],
        ["a wolf", "x"],
        ["BIG CAT", "The Lion", "the tiger", "x"],
    ]
    # What is written is the pair's own text, whatever stands in the corpus.
    assert [row["positive"] for row in rows] == ["the lion", "the tiger", "a wolf"]


def test_a_positive_that_the_corpus_lacks_has_a_score_and_is_not_mined(tmp_path):
    pairs = [mining.RawPair("cat", "red house"), mining.RawPair("dog", "blue house")]
    source = mining_files.Source(pairs, ["tree", "blue tree"], None, {})
    output = tmp_path / "mined.jsonl"
    mine.mine(FakeModel(), source, mining.Rules(2), OPTIONS, output)
    for row in read(output):
        assert sorted(row["negatives"]) == ["blue tree", "tree"]
        expected = vector_of(row["anchor"]) @ vector_of(row["positive"])
        assert row["positive_score"] == pytest.approx(expected, abs=1e-6)


def test_random_draws_depend_on_the_seed_alone(tmp_path):
    source = make_source()
    mined = {}
    for name, seed, chunk in (("a", 1, 7), ("b", 1, 1000), ("c", 2, 7)):
        rules = mining.Rules(3, max_rank=30, sampling="random", seed=seed)
        output = tmp_path / f"{name}.jsonl"
        mine.mine(FakeModel(), source, rules, OPTIONS, output, chunk_queries=chunk)
        mined[name] = output.read_bytes()
    assert mined["a"] == mined["b"] != mined["c"]
    allowed = brute_force(source, mining.Rules(30, max_rank=30))
    drawn = read(tmp_path / "a.jsonl")
    for row, (_, _, all_30) in zip(drawn, allowed, strict=True):
        assert set(row["negative_ids"]) <= {f"d{number}" for _, number in all_30}
        assert len(row["negative_ids"]) == 3
        assert row["negative_scores"] == sorted(row["negative_scores"], reverse=True)


@pytest.mark.parametrize("name", ["mined.jsonl", "mined.jsonl.gz"])
def test_interrupted_and_continued_gives_the_same_file(name, tmp_path, monkeypatch):
    source, rules = make_source(), RULES["relative"]
    whole = tmp_path / "whole" / name
    whole.parent.mkdir()
    mine.mine(FakeModel(), source, rules, OPTIONS, whole, chunk_queries=8)
    output = tmp_path / name
    calls, original = [], search.top_k

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(search, "top_k", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mine.mine(FakeModel(), source, rules, OPTIONS, output, chunk_queries=8)
    assert not output.exists()
    # Half a line that a killed process left behind is dropped.
    with open(tmp_path / f"{name}.work" / "lines.jsonl", "ab") as file:
        file.write(b'{"anchor": "half a li')
    model = FakeModel()
    about = mine.mine(model, source, rules, OPTIONS, output, chunk_queries=8)
    assert model.num_encoded == 0
    num_chunks = -(-about["counts"]["queries"] // 8)
    assert len(calls) == num_chunks + 1
    assert output.read_bytes() == whole.read_bytes()
    assert not (tmp_path / f"{name}.work").exists()
    recorded = json.loads((tmp_path / f"{name}.about.json").read_text())
    assert recorded == about
    assert recorded["sha256"] == whole_files.sha256(output)


def test_other_settings_are_refused(tmp_path, monkeypatch):
    source, rules = make_source(), RULES["margin"]
    output = tmp_path / "mined.jsonl"
    first = mine.mine(FakeModel(), source, rules, OPTIONS, output)
    assert mine.mine(FakeModel(), source, rules, OPTIONS, output) == first
    other = dataclasses.replace(rules, margin=0.3)
    with pytest.raises(ValueError, match=r"rules\.margin was 0\.2, now 0\.3"):
        mine.mine(FakeModel(), source, other, OPTIONS, output)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "top_k", interrupted)
    begun = tmp_path / "begun.jsonl"
    with pytest.raises(KeyboardInterrupt):
        mine.mine(FakeModel(), source, rules, OPTIONS, begun)
    with pytest.raises(ValueError, match=r"other settings: rules\.margin was 0\.2"):
        mine.mine(FakeModel(), source, other, OPTIONS, begun)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_negatives": 0},
        {"min_rank": 0},
        {"num_negatives": 5, "min_rank": 97},
        {"margin": -0.1},
        {"sampling": "best"},
    ],
)
def test_rules_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        mining.Rules(**wrong)


# --- the command --------------------------------------------------------------------


@pytest.fixture
def fake_model(monkeypatch):
    load = lambda *args, **kwargs: FakeModel()  # noqa: E731
    monkeypatch.setattr(inference.SentenceT5, "load", load)


def test_the_command_mines_pairs_for_the_files_task(fake_model, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("q\ta\nred cat\tblue cat\ntree\thouse\ntree\ttree house\n")
    output = tmp_path / "mined.jsonl.gz"
    flags = ["--model_dir=m", f"--pairs={pairs}", "--left=q", "--right=a"]
    assert mine.main([*flags, f"--output={output}", "--num_negatives=2"]) == 0
    printed = capsys.readouterr().out
    assert "3 pairs of 2 queries with 4 negatives, from 3 distinct" in printed
    assert "2 pairs have fewer than 2, 0 of them none" in printed
    assert "Truncated: 0 queries, 0 passages." in printed
    columns = files.Columns("anchor", "positive", ("negatives",))
    rows = list(files.read([str(output)], columns))
    assert [row["inputs"] for row in rows] == ["red cat", "tree", "tree"]
    assert rows[1]["negative_targets"] == ["blue cat"]
    assert sorted(rows[0]["negative_targets"]) == ["house", "tree house"]


def test_the_command_names_mistakes(fake_model, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("q\ta\nred cat\tblue cat\n")
    base = ["--model_dir=m", f"--pairs={pairs}"]
    assert mine.main([*base, "--output=x.jsonl"]) == 1
    message = capsys.readouterr().err
    assert "pairs.tsv, line 2: no text in column 'anchor'; the columns are q" in message
    named = [*base, "--left=q", "--right=a"]
    assert mine.main([*named, f"--output={tmp_path}/x.tsv"]) == 1
    assert "must end in .jsonl or .jsonl.gz" in capsys.readouterr().err
    assert mine.main([*named, "--output=x.jsonl", "--min_rank=99"]) == 1
    assert "The ranks 99 to 100 can't give 5 negatives" in capsys.readouterr().err
    assert mine.main(["--model_dir=m", f"--beir={tmp_path}", "--output=x.jsonl"]) == 1
    assert "Expected BEIR's layout" in capsys.readouterr().err
    assert mine.main(["--model_dir=m", "--beir=scifact", "--output=x.jsonl"]) == 1
    assert "There is no folder scifact. Expected one in BEI" in capsys.readouterr().err


def test_lines_that_were_moved_away_are_made_again(tmp_path):
    settings = {"rules": {"num_negatives": 1}}
    lines = mining_files.Lines(tmp_path, settings)
    lines.add([{"negatives": ["a"]}, {"negatives": []}], 2)
    again = mining_files.Lines(tmp_path, settings)
    assert again.num_queries == 2 and again.counts["pairs"] == 2
    again.finish(packed=False).rename(tmp_path.parent / "mined.jsonl")
    again = mining_files.Lines(tmp_path, settings)
    assert again.num_queries == 0 and not any(again.counts.values())
    again.add([{"negatives": ["a"]}], 1)
    assert again.finish(packed=False).read_text() == '{"negatives": ["a"]}\n'
