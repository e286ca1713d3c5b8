"""The encoder for mteb: prompts as strings, batches, similarity, stale scores."""

import pathlib
import types
from typing import ClassVar

import numpy as np
import pytest

from sentence_t5 import encoder
from sentence_t5.evals import mteb_encoder
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
T5 = T5Config(vocab_size=1408, d_model=4, num_heads=1, head_dim=4, d_ff=4, num_layers=1)


class Recorder:
    """Remembers what it was given; a text's vector counts its letters."""

    tokenizer = Tokenizer(VOCABULARY)
    max_length = 16
    step = 3
    embedding_dim = 26
    default_prompt = None

    def __init__(self, normalize=False, fingerprint="weights", prompts=None):
        self.config = encoder.EncoderConfig(
            t5=T5, projection_dim=None, normalize=normalize
        )
        self.fingerprint = fingerprint
        self.prompts = dict(prompts or {})
        self.encoded, self.options = [], []

    def encode(self, texts, *, instruction, **options):
        self.encoded += [instruction + text for text in texts]
        self.options.append(options)
        letters = "abcdefghijklmnopqrstuvwxyz"
        counts = [[text.lower().count(letter) for letter in letters] for text in texts]
        return np.array(counts, np.float32)


def make_task(name, kind, prompt=None):
    return types.SimpleNamespace(name=name, type=kind, prompt=prompt)


SCIFACT = make_task("SciFact", "Retrieval", {"query": "Find the claim: "})
STS12 = make_task("STS12", "STS", "Retrieve similar text: ")


def test_prompts_are_found_in_mteb_s_order():
    prompts = {
        "query": "5: ",
        "Retrieval": "4: ",
        "Retrieval-query": "3: ",
        "SciFact": "2: ",
        "SciFact-query": "1: ",
    }
    for i in range(5):
        left = dict(list(prompts.items())[: 5 - i])
        wrapped = mteb_encoder.MtebEncoder(Recorder(), "me/model", prompts=left)
        assert wrapped.prompt_for(SCIFACT, "query") == f"{i + 1}: "
    assert wrapped.prompt_for(SCIFACT, "document") == ""
    assert wrapped.prompt_for(STS12, None) == ""
    both = mteb_encoder.MtebEncoder(Recorder(), "me/model", prompts=prompts)
    assert both.prompt_for(SCIFACT, "document") == "2: "
    assert both.prompt_for(None, "query") == "5: "


def test_the_task_s_own_prompt_where_asked_for_then_the_model_s_default():
    model = Recorder(prompts={"any": "text: ", "passage": "passage: "})
    model.default_prompt = "any"
    own = mteb_encoder.MtebEncoder(model, "me/model")
    assert own.prompt_for(SCIFACT, "query") == "text: "
    assert own.prompt_for(SCIFACT, "document") == "passage: "
    assert own.prompt_for(STS12, None) == "text: "
    task = mteb_encoder.MtebEncoder(model, "me/model", use_task_prompts=True)
    assert task.prompt_for(SCIFACT, "query") == "Find the claim: "
    assert task.prompt_for(STS12, None) == "Retrieve similar text: "
    none = mteb_encoder.MtebEncoder(model, "me/model", prompts={"STS": ""})
    assert none.prompt_for(STS12, None) == ""


def test_lists_and_batches_keep_their_order_and_sides_their_length():
    model = Recorder()
    wrapped = mteb_encoder.MtebEncoder(
        model, "me/model", prompts={"query": "q: "}, query_length=8, max_length=12
    )
    want = [[1, 0], [0, 2], [3, 0]]
    texts = ["a", "bb", "aaa"]
    got = wrapped.encode(texts)
    np.testing.assert_array_equal(got[:, :2], want)
    batches = [{"text": texts[:2], "id": ["1", "2"]}, {"text": texts[2:], "id": ["3"]}]
    got = wrapped.encode(
        iter(batches), task_metadata=SCIFACT, prompt_type="query", batch_size=2
    )
    np.testing.assert_array_equal(got[:, :2], want)
    assert model.encoded == ["a", "bb", "aaa", "q: a", "q: bb", "q: aaa"]
    assert [o["max_length"] for o in model.options] == [12, 8]
    assert [o["batch_size"] for o in model.options] == [64, 2]
    assert wrapped.prompts_used == {"texts": "", "SciFact-query": "q: "}


def test_the_similarity_is_the_one_the_model_was_trained_with():
    # The long vector is best by dot product, the near one by cosine.
    query, passages = [[1.0, 0.0]], [[3.0, 3.0], [1.0, 0.1]]
    by_dot = mteb_encoder.MtebEncoder(Recorder(normalize=False), "me/model")
    by_cosine = mteb_encoder.MtebEncoder(Recorder(normalize=True), "me/model")
    assert (by_dot.similarity_name, by_cosine.similarity_name) == ("dot", "cosine")
    np.testing.assert_allclose(by_dot.similarity(query, passages), [[3.0, 1.0]])
    cosines = [0.5**0.5, 1 / 1.01**0.5]
    np.testing.assert_allclose(
        by_cosine.similarity(query, passages), [cosines], rtol=1e-6
    )
    np.testing.assert_allclose(
        by_cosine.similarity_pairwise(query * 2, passages), cosines, rtol=1e-6
    )
    asked = mteb_encoder.MtebEncoder(Recorder(), "me/model", similarity="cosine")
    assert asked.similarity_name == "cosine"


def test_the_revision_follows_weights_and_options():
    def revision(model=None, **options):
        return mteb_encoder.MtebEncoder(
            model or Recorder(), "me/model", **options
        ).revision

    revisions = [
        revision(),
        revision(Recorder(fingerprint="other weights")),
        revision(prompts={"STS": "x: "}),
        revision(query_length=8),
        revision(similarity="cosine"),
        revision(use_task_prompts=True),
    ]
    assert len(set(revisions)) == len(revisions)
    # What only changes the speed is no other model.
    assert revision(batch_size=2, cache_dir="cache") == revision()


def test_what_is_no_text_is_refused():
    with pytest.raises(ValueError, match="expected 'organization/model'"):
        mteb_encoder.MtebEncoder(Recorder(), "model")
    with pytest.raises(ValueError, match="similarity: got 'angle'"):
        mteb_encoder.MtebEncoder(Recorder(), "me/model", similarity="angle")
    wrapped = mteb_encoder.MtebEncoder(Recorder(), "me/model")
    with pytest.raises(TypeError, match=r"batch of \['image'\], expected a str or"):
        wrapped.encode([{"image": [1]}])
    with pytest.raises(TypeError, match="got one str"):
        wrapped.encode("text")


# --- mteb itself --------------------------------------------------------------------


class LocalTasks:
    """Makes small tasks of three kinds that need no network."""

    options: ClassVar = {
        "description": "local",
        "reference": None,
        "dataset": {"path": "local/none", "revision": "1"},
        "category": "t2t",
        "modalities": ["text"],
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
    }

    @classmethod
    def metadata(cls, name, kind, score, **more):
        from mteb.abstasks.task_metadata import TaskMetadata

        return TaskMetadata(
            name=name, type=kind, main_score=score, **cls.options, **more
        )

    @classmethod
    def make(cls):
        import datasets
        from mteb.abstasks import AbsTaskRetrieval
        from mteb.abstasks.classification import AbsTaskClassification
        from mteb.abstasks.sts import AbsTaskSTS

        table = datasets.Dataset.from_dict

        class LocalSts(AbsTaskSTS):
            metadata = cls.metadata("LocalSts", "STS", "cosine_spearman")
            min_score, max_score = 0, 5

            def load_data(self, **options):
                rows = {
                    "sentence1": ["aaa", "aab", "abc"],
                    "sentence2": ["aaa", "abb", "xyz"],
                    "score": [5.0, 3.0, 0.0],
                }
                self.dataset = datasets.DatasetDict(test=table(rows))
                self.data_loaded = True

        class LocalLabels(AbsTaskClassification):
            metadata = cls.metadata("LocalLabels", "Classification", "accuracy")
            n_experiments, samples_per_label = 2, 4

            def load_data(self, **options):
                texts = [a * n for n in range(1, 6) for a in "xy"]
                rows = table({"text": texts, "label": [0, 1] * 5})
                self.dataset = datasets.DatasetDict(train=rows, test=rows)
                self.data_loaded = True

        class LocalSearch(AbsTaskRetrieval):
            metadata = cls.metadata(
                "LocalSearch", "Retrieval", "ndcg_at_10", prompt={"query": "find: "}
            )

            def load_data(self, **options):
                corpus = {
                    "id": ["d1", "d2", "d3"],
                    "title": ["k", "", "l"],
                    "text": ["kkkk", "mmm", "ll"],
                }
                split = {
                    "corpus": table(corpus),
                    "queries": table({"id": ["q1", "q2"], "text": ["k", "m"]}),
                    "relevant_docs": {"q1": {"d1": 1}, "q2": {"d2": 1}},
                    "top_ranked": None,
                }
                self.dataset = {"default": {"test": split}}
                self.data_loaded = True

        return [LocalSts(), LocalLabels(), LocalSearch()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mteb_sees_exactly_the_right_prompts(tmp_path):
    mteb = pytest.importorskip("mteb", reason="pip install sentence-t5[mteb]")
    from mteb.cache import ResultCache
    from mteb.models.models_protocols import EncoderProtocol

    def evaluate(model, **options):
        wrapped = mteb_encoder.MtebEncoder(model, "me/letters", **options)
        assert isinstance(wrapped, EncoderProtocol)
        results = mteb.evaluate(
            wrapped,
            LocalTasks.make(),
            cache=ResultCache(tmp_path),
            co2_tracker=False,
            show_progress_bar=False,
        )
        return {r.task_name: r.get_score() for r in results.task_results}

    prompts = {
        "STS": "same? ",
        "Classification": "label: ",
        "query": "ask: ",
        "document": "doc: ",
    }
    model = Recorder(normalize=True)
    scores = evaluate(model, prompts=prompts)
    assert scores["LocalSearch"] == pytest.approx(1.0)
    assert scores["LocalSts"] == pytest.approx(1.0)
    assert scores["LocalLabels"] == pytest.approx(1.0)
    expected = {f"same? {text}" for text in ("aaa", "aab", "abc", "abb", "xyz")}
    expected |= {f"label: {a * n}" for n in range(1, 6) for a in "xy"}
    expected |= {"ask: k", "ask: m", "doc: k kkkk", "doc: mmm", "doc: l ll"}
    assert set(model.encoded) == expected
    # The same weights and options: mteb keeps the scores. Others: it doesn't.
    again = Recorder(normalize=True)
    assert evaluate(again, prompts=prompts) == scores
    assert again.encoded == []
    retrained = Recorder(normalize=True, fingerprint="others")
    evaluate(retrained, prompts=prompts)
    assert set(retrained.encoded) == expected
    # What the task says itself, where nothing else is said.
    task = Recorder(normalize=True)
    evaluate(task, use_task_prompts=True)
    assert {"find: k", "find: m", "k kkkk", "mmm", "aaa"} <= set(task.encoded)
