"""Retrieval metrics by hand and by trec_eval; folders; the evaluate command's part."""

import errno
import json
import os
import pathlib
from typing import ClassVar

import numpy as np
import pytest

from sentence_t5 import (
    embedding_cache,
    evaluate,
    evaluate_retrieval,
    inference,
    retrieve,
)
from sentence_t5.encoder import EncoderConfig
from sentence_t5.evals import retrieval
from sentence_t5.t5.config import T5Config
from sentence_t5.tasks import beir_folder
from sentence_t5.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "trec_eval.json"
T5 = T5Config(
    vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1
)


class FakeModel:
    """Gives each text the vector that a table says, and remembers what it was given."""

    tokenizer = Tokenizer(ROOT / "tasks" / "data" / "synthetic.model")
    max_length = 16
    step = 3
    fingerprint = "fake"
    embedding_dim = 2
    prompts: ClassVar = {}
    default_prompt = None

    def __init__(self, table, normalize=True):
        self.table = table
        self.config = EncoderConfig(t5=T5, projection_dim=None, normalize=normalize)
        self.encoded = []

    def encode(self, texts, *, max_length, instruction, **options):
        texts = [instruction + text for text in texts]
        self.encoded += [(text, max_length) for text in texts]
        vectors = np.array([self.table[text] for text in texts], np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / norms if self.config.normalize else vectors

    def truncated(self, texts, max_length, *, instruction):
        return np.array([len(instruction + text) > max_length for text in texts])


# --- metrics ------------------------------------------------------------------------

# One relevant passage at rank 2, another at rank 4, a third not retrieved.
GRADES = {"a": 2, "b": 0, "c": 1, "z": 1}
RANKED = {"b": 0.9, "a": 0.8, "x": 0.5, "c": 0.4}


def test_metrics_by_hand():
    scores = retrieval.evaluate({"q": GRADES}, {"q": RANKED}).mean
    gained = 2 / np.log2(3) + 1 / np.log2(5)
    best = 2 / np.log2(2) + 1 / np.log2(3) + 1 / np.log2(4)
    expected = {
        "ndcg@1": 0.0,
        "ndcg@10": gained / best,
        "ndcg@100": gained / best,
        "recall@10": 2 / 3,
        "recall@100": 2 / 3,
        "mrr@10": 1 / 2,
        "map": (1 / 2 + 2 / 4) / 3,
    }
    assert scores == pytest.approx(expected, abs=1e-12)


def test_cuts_count_what_stands_before_them():
    found = {f"p{i:03}": 1.0 - i / 1000 for i in range(200)}
    grades = {"p000": 1, "p050": 1, "p150": 1}
    scores = retrieval.evaluate({"q": grades}, {"q": found}).mean
    assert scores["recall@10"] == pytest.approx(1 / 3)
    assert scores["recall@100"] == pytest.approx(2 / 3)
    assert scores["ndcg@1"] == 1.0
    assert scores["map"] == pytest.approx((1 + 2 / 51 + 3 / 151) / 3)
    late = retrieval.evaluate({"q": {"p010": 1}}, {"q": found}).mean
    assert late["mrr@10"] == 0.0
    assert late["map"] == pytest.approx(1 / 11)


def test_equal_scores_are_ordered_by_the_larger_id():
    assert retrieval.rank({"d1": 0.5, "d10": 0.5, "d2": 0.5, "d3": 0.6}) == [
        *("d3", "d2", "d10", "d1")
    ]
    # Differences that float32 doesn't have are none.
    assert retrieval.rank({"a": 0.5 + 1e-12, "b": 0.5}) == ["b", "a"]


def test_a_query_without_a_result_counts_as_zero():
    judgements = {"q": {"a": 1}, "lost": {"a": 1}, "nothing": {"a": 0}}
    result = retrieval.evaluate(judgements, {"q": {"a": 1.0}, "nothing": {"a": 1.0}})
    assert result.mean["ndcg@10"] == pytest.approx(1 / 3)
    assert (result.num_without_results, result.num_without_relevant) == (1, 1)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="score of passage 'a' is nan"):
        retrieval.evaluate({"q": {"a": 1}}, {"q": {"a": float("nan"), "b": 1.0}})
    with pytest.raises(ValueError, match="nothing to score"):
        retrieval.evaluate({}, {})


@pytest.mark.golden
def test_equals_trec_eval():
    num_values = 0
    for case in json.loads(GOLDEN.read_text()):
        result = retrieval.evaluate(case["judgements"], case["results"])
        for query, expected in case["scores"].items():
            assert result.queries[query] == pytest.approx(expected, abs=1e-6)
            num_values += len(expected)
        missing = set(case["judgements"]) - set(case["scores"])
        assert all(result.queries[q]["map"] == 0.0 for q in missing)
    assert num_values > 200


@pytest.mark.slow
def test_equals_trec_eval_itself():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    rng = np.random.default_rng(1)
    for _ in range(200):
        passages = [f"d{i}" for i in rng.permutation(400)]
        grades = {p: int(rng.integers(-1, 4)) for p in passages[: rng.integers(1, 200)]}
        found = {
            p: float(np.float32(rng.integers(0, 50)) / np.float32(7))
            for p in rng.permutation(passages)[: rng.integers(1, 300)]
        }
        evaluator = pytrec_eval.RelevanceEvaluator(
            {"q": grades}, {"ndcg_cut.1,10,100", "recall.10,100", "map"}
        )
        theirs = evaluator.evaluate({"q": found})["q"]
        ours = retrieval.evaluate({"q": grades}, {"q": found}).queries["q"]
        for name, value in theirs.items():
            name = name.replace("ndcg_cut_", "ndcg@").replace("recall_", "recall@")
            assert ours[name] == pytest.approx(value, abs=1e-6)


# --- folders ------------------------------------------------------------------------

CORPUS = [
    {"_id": "d1", "title": "One", "text": "up"},
    {"_id": "d2", "title": "", "text": "right"},
    {"_id": "q1", "text": "between"},
    {"_id": 4, "title": None, "text": "left"},
]
QUERIES = [
    {"_id": "q1", "text": "north"},
    {"_id": "q2", "text": "east"},
    {"_id": "q3", "text": "not judged"},
]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\tq1\t1\nq2\td2\t2\nq2\tgone\t1\n"


def write_folder(folder, corpus=CORPUS, queries=QUERIES, qrels=QRELS, split="test"):
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels" / f"{split}.tsv").write_text(qrels)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "compass")


def test_a_folder_is_read_as_beir_reads_it(folder):
    found = beir_folder.load(folder)
    assert (found.name, found.split) == ("compass", "test")
    assert found.passage_ids == ["d1", "d2", "q1", "4"]
    assert found.passages == ["One up", "right", "between", "left"]
    assert (found.query_ids, found.queries) == (["q1", "q2"], ["north", "east"])
    assert found.judgements["q2"] == {"d2": 2, "gone": 1}
    assert set(found.sha256) == {"corpus.jsonl", "queries.jsonl", "qrels/test.tsv"}


MISTAKES = {
    "another header": (
        {"qrels": "qid\tpid\trel\nq1\td1\t1\n"},
        "line 1: expected the header query-id corpus-id score",
    ),
    "grade": (
        {"qrels": QRELS + "q1\td2\thigh\n"},
        "line 6: the score is 'high', expected a whole number",
    ),
    "judged twice": (
        {"qrels": QRELS + "q1\td1\t0\n"},
        "line 6: query 'q1' has passage 'd1' judged twice, 1 and 0",
    ),
    "no judgements": ({"qrels": "query-id\tcorpus-id\tscore\n"}, "0 judgements"),
    "unknown query": (
        {"qrels": QRELS + "q9\td1\t1\n"},
        "1 of 3 judged queries are not in queries.jsonl, first 'q9'",
    ),
    "id twice": ({"corpus": [*CORPUS, CORPUS[0]]}, "line 5: the id 'd1' occurs twice"),
    "no id": ({"queries": [{"id": 1, "text": "x"}]}, "line 1: no '_id'"),
    "no text": ({"corpus": [{"_id": "d1"}]}, "line 1: 'text' must be a text, got None"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_folder_is_named_with_its_line(tmp_path, mistake):
    parts, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        beir_folder.load(write_folder(tmp_path / "bad", **parts))


def test_missing_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"Splits with judgements .*: test\."):
        beir_folder.load(folder, "dev")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"no corpus\.jsonl"):
        beir_folder.load(folder)


# --- encoding and ranking -----------------------------------------------------------

# The long vector is best by dot product for "east", the near one by cosine.
TABLE = {
    "north": (0.0, 1.0),
    "east": (1.0, 0.0),
    "One up": (0.1, 1.0),
    "right": (1.0, 0.1),
    "between": (3.0, 3.0),
    "left": (-1.0, 0.0),
}


def test_dot_and_cosine_rank_differently_and_the_model_decides(folder):
    collection = beir_folder.load(folder)
    model = FakeModel(TABLE, normalize=False)
    by_dot = retrieve.run(model, collection, retrieve.Options())
    assert retrieve.similarity_of(model) == "dot"
    assert list(by_dot.results["q2"])[:2] == ["q1", "d2"]
    cosine = retrieve.Options(similarity="cosine")
    by_cosine = retrieve.run(model, collection, cosine)
    assert list(by_cosine.results["q2"])[:2] == ["d2", "q1"]
    assert by_cosine.results["q2"]["d2"] == pytest.approx(1 / np.sqrt(1.01))
    entry = evaluate_retrieval.make_entry(model, collection, retrieve.Options())
    assert entry["similarity"] == "dot"
    assert "retrieval by dot" in evaluate_retrieval.format_table([entry])
    assert retrieve.similarity_of(FakeModel(TABLE)) == "cosine"


def test_the_passage_with_the_querys_id_is_left_out_as_in_beir(folder):
    collection = beir_folder.load(folder)
    model = FakeModel(TABLE, normalize=False)
    run = retrieve.run(model, collection, retrieve.Options(depth=3))
    assert list(run.results["q1"]) == ["d1", "d2", "4"]
    assert (run.num_identical, run.num_identical_relevant) == (1, 1)
    assert list(run.results["q2"]) == ["q1", "d2", "d1"]
    kept = retrieve.Options(depth=3, keep_identical_ids=True)
    assert list(retrieve.run(model, collection, kept).results["q1"]) == [
        *("q1", "d1", "d2")
    ]


def test_each_side_gets_its_own_prompt_and_length(folder):
    table = {f"ask: {t}": TABLE[t] for t in ("north", "east")}
    table |= {f"doc: {t}": TABLE[t] for t in ("One up", "right", "between", "left")}
    model = FakeModel(table)
    options = retrieve.Options(
        query=retrieve.Side("ask: ", 8), passage=retrieve.Side("doc: ", 12)
    )
    entry = evaluate_retrieval.make_entry(model, beir_folder.load(folder), options)
    lengths = dict(model.encoded)
    assert set(lengths) == set(table)
    assert {lengths["ask: north"], lengths["ask: east"]} == {8}
    assert {lengths[t] for t in table if t.startswith("doc")} == {12}
    assert entry["query"] == {
        "prompt": "ask: ", "max_length": 8, "texts_truncated": 2,
    }  # fmt: skip
    assert "2 of 2 query texts truncated (max 8 tokens)." in entry["notes"]
    assert any("1 judged passages are not in the corpus" in n for n in entry["notes"])


@pytest.mark.parametrize("flag", ["--query_length", "--passage_length", "--max_length"])
@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_is_refused(flag, length, folder, capsys, monkeypatch):
    def load(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(inference.SentenceT5, "load", load)
    flags = ["--model_dir=m", f"--beir={folder}", f"{flag}={length}"]
    assert evaluate.main(flags) == 1
    message = f"evaluate: {flag}: got {length}, expected 1 or more."
    assert capsys.readouterr().err.strip() == message
    with pytest.raises(ValueError, match=f"max_length: got {length}"):
        retrieve.Side(max_length=length)


def test_without_a_prompt_of_its_own_a_side_gets_the_models():
    model = FakeModel({})
    model.prompts, model.default_prompt = {"search": "find: "}, "search"
    assert retrieve.prompt_of(model, retrieve.Side()) == "find: "
    assert retrieve.prompt_of(model, retrieve.Side("")) == ""
    assert retrieve.prompt_of(model, retrieve.Side("ask: ")) == "ask: "


def test_vectors_are_kept_and_an_interrupted_run_goes_on(folder, tmp_path):
    collection = beir_folder.load(folder)
    options = retrieve.Options(cache_dir=str(tmp_path / "cache"))

    unit = dict.fromkeys(TABLE, (1.0, 0.0)) | {"left": (-1.0, 0.0)}

    class Interrupted(FakeModel):
        def encode(self, texts, **rest):
            if "between" in texts:
                raise KeyboardInterrupt
            return super().encode(texts, **rest)

    def encode(model):
        return embedding_cache.encode(
            model, collection.passages, cache_dir=options.cache_dir, part_texts=1
        )

    with pytest.raises(KeyboardInterrupt):
        encode(Interrupted(unit))
    model = FakeModel(unit)
    vectors = encode(model)
    assert [text for text, _ in model.encoded] == ["between", "left"]
    np.testing.assert_array_equal(vectors, [unit[t] for t in collection.passages])
    # Nothing is left to do, unless the weights are others.
    again = FakeModel(unit)
    encode(again)
    assert not again.encoded
    again.fingerprint = "other weights"
    encode(again)
    assert len(again.encoded) == 4


def test_a_cache_on_a_full_disk_is_an_error_and_begins_anew(tmp_path, monkeypatch):
    unit = {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    taken, allocate = [], os.posix_fallocate

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def record(descriptor, start, size):
        taken.append(size)
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left on device: 2 vectors"):
            embedding_cache.encode(FakeModel(unit), ["a", "b"], cache_dir=tmp_path)
        assert not list(tmp_path.glob("*/vectors.npy"))
    # A file left by a run killed in between may lack its room: it is made anew.
    (folder,) = tmp_path.iterdir()
    np.save(folder / "vectors.npy", np.zeros((2, 2), np.float32))
    monkeypatch.setattr(os, "posix_fallocate", record)
    vectors = embedding_cache.encode(FakeModel(unit), ["a", "b"], cache_dir=tmp_path)
    np.testing.assert_array_equal(vectors, list(unit.values()))
    assert taken == [128 + 16]


def test_the_command_scores_folders_beside_sts(folder, tmp_path, capsys, monkeypatch):
    load = lambda *args, **kwargs: FakeModel(TABLE)  # noqa: E731
    monkeypatch.setattr(inference.SentenceT5, "load", load)
    target = tmp_path / "report.json"
    flags = ["--model_dir=m", f"--beir={folder}", f"--json={target}"]
    assert evaluate.main(flags) == 0
    printed = capsys.readouterr().out
    report = json.loads(target.read_text())
    (entry,) = report["retrieval"]
    assert (report["sts"], report["average"]) == ([], None)
    assert entry["folder"] == str(folder)
    assert (entry["num_queries"], entry["num_passages"]) == (2, 4)
    # q1 loses the passage with its own id, q2 has d2 first and lacks the missing one.
    ideal = 2 / np.log2(2) + 1 / np.log2(3)
    found = {"q1": 1 / (1 + 1 / np.log2(3)), "q2": 2 / ideal}
    for query, value in found.items():
        assert entry["queries"][query]["ndcg@10"] == pytest.approx(value)
    assert entry["scores"]["ndcg@10"] == pytest.approx(sum(found.values()) / 2)
    assert f"{100 * entry['scores']['ndcg@10']:.2f}" in printed
    assert "compass test        2         4" in printed
    assert evaluate.main([*flags, "--split=dev"]) == 1
    assert "Splits with judgements" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main(["--model_dir=m"])
    assert "nothing to score" in capsys.readouterr().err
