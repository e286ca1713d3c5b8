"""SentEval's tasks: folders, protocols, classifier, and the evaluate command's part."""

import importlib.util
import json
import os
import pathlib
from typing import ClassVar

import numpy as np
import pytest

from sentence_t5 import encoder, evaluate, evaluate_transfer, fit_cache, inference
from sentence_t5.evals import transfer, transfer_sets
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer

DATA = pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", ""))
VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
T5 = T5Config(vocab_size=1408, d_model=4, num_heads=1, head_dim=4, d_ff=4, num_layers=1)

# scikit-learn takes a second to import: collecting tests doesn't.
needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn is not installed: pip install sentence-t5[senteval]",
)


# --- folders ------------------------------------------------------------------------


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        path = folder / f"{name.replace('_', '.')}.tsv"
        path.write_text("\n".join(lines) + "\n")
    return folder


MRPC = ["label\tsentence1\tsentence2", "1\ta b\tc", "0\ta b\tc", "1\ta\tb c"]


def test_a_folder_is_read_in_senteval_s_order(tmp_path):
    cr = ["text\tlabel", "one two\t1", "three\t1", "four five\t0", "six\t0"]
    folder = write(tmp_path, CR=cr, MRPC_train=MRPC, MRPC_test=MRPC[:2], notes=["x"])
    cr, mrpc = transfer_sets.load_folder(folder)
    assert (cr.name, mrpc.name) == ("CR", "MRPC")
    # By number of words, then by label.
    assert cr.splits["all"].texts == (("six", "three", "four five", "one two"),)
    assert cr.splits["all"].labels.tolist() == ["0", "1", "0", "1"]
    train = mrpc.splits["train"]
    assert train.texts == (("a", "a b", "a b"), ("b c", "c", "c"))
    assert train.labels.tolist() == ["1", "0", "1"]
    assert len(train.sha256) == 64
    assert cr.size_problem() == (
        "CR has 4 rows, published CR has 3775: its scores are not comparable with "
        "published ones."
    )
    assert "MRPC has 3 / 1 rows, published MRPC has 4076 / 1725" in mrpc.size_problem()


MISTAKES = {
    "empty": ({"MRPC_train": [""], "MRPC_test": MRPC}, ValueError, "MRPC: .*: 0 rows"),
    "header alone": ({"CR": ["label\ttext"]}, ValueError, r"CR: .*CR\.tsv: 0 rows"),
    "a split": ({"SST_train": MRPC}, OSError, r"SST lacks SST\.dev\.tsv, SST\.test"),
    "nothing": ({"other": MRPC}, OSError, r"no transfer task; expected .* MR\.tsv"),
    "column": ({"CR": ["label\tbody", "1\tx"]}, ValueError, "no column for text"),
    "fields": ({"CR": ["label\ttext", "1"]}, ValueError, "line 2: got 1 fields"),
    "labels": (
        {"MRPC_train": [*MRPC[:2], "yes\ta\tb"], "MRPC_test": MRPC},
        ValueError,
        "got the labels 1, yes, expected 0 and 1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_folders_are_named(tmp_path, mistake):
    files, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        transfer_sets.load_folder(write(tmp_path / "tasks", **files))


# --- numbers ------------------------------------------------------------------------


def test_pair_features_and_f1_by_hand():
    features = transfer.pair_features(np.array([[1.0, -2.0]]), np.array([[3.0, 0.5]]))
    np.testing.assert_array_equal(features, [[2.0, 2.5, 3.0, -1.0]])
    predictions, labels = np.array(list("11010")), np.array(list("10110"))
    # Two of three predicted are right, two of three are found.
    assert transfer.f1(predictions, labels, "1") == pytest.approx(200 / 3)
    assert transfer.f1(np.array(["0"]), np.array(["0"]), "1") == 0.0


def test_the_strongest_of_equals_is_chosen():
    scores = {1.0: 80.001, 2.0: 80.004, 4.0: 79.0}
    assert transfer._choose(tuple(scores), scores.get) == (1.0, 80.0)
    assert transfer._choose((1.0, 2.0), {1.0: 5.0, 2.0: 6.0}.get) == (2.0, 6.0)


def make_rows(n, seed, noise=0.8):
    """Makes rows whose label is the sign of their first number, but for noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return x, np.where(x[:, 0] + noise * rng.normal(size=n) > 0, "1", "0")


@needs_sklearn
def test_the_classifier_is_at_the_minimum_of_its_loss():
    x, y = make_rows(60, 0)
    with transfer._Trainer(lambda: None) as trainer:
        fitted = trainer.fit((x, y), 0.5)
    assert trainer.num_unconverged == 0
    weights, bias = fitted.coef_[0], fitted.intercept_[0]
    error = 1 / (1 + np.exp(-(x @ weights + bias))) - (y == "1")
    # Gradients of |w|^2 / 2 + C sum(loss): the bias has no penalty.
    np.testing.assert_allclose(weights + 0.5 * x.T @ error, 0.0, atol=5e-3)
    assert 0.5 * error.sum() == pytest.approx(0.0, abs=5e-3)


@needs_sklearn
def test_protocols_score_rows_that_nothing_was_chosen_by():
    data, test, dev = make_rows(60, 0), make_rows(40, 1), make_rows(30, 2)
    fits = []
    count = lambda: fits.append(1)  # noqa: E731
    nested = transfer.nested_cross_validation(data, num_folds=2, progress=count)
    assert len(fits) == transfer.num_fits(1, 2) == 2 * (6 * 2 + 1)
    assert len(nested.chosen) == 2
    assert set(nested.chosen) <= set(transfer.GRID)
    assert nested.accuracy == pytest.approx(
        100 * np.mean(nested.predictions == data[1]), abs=1e-9
    )
    fits.clear()
    split = transfer.cross_validated(data, test, num_folds=2, progress=count)
    assert len(fits) == transfer.num_fits(2, 2) == 7 * 2 + 1
    assert split.accuracy == 100 * np.mean(split.predictions == test[1])
    fits.clear()
    chosen = transfer.held_out(data, dev, test, progress=count)
    assert len(fits) == transfer.num_fits(3) == 7
    # Neither the labels of the test rows nor their number change what is chosen.
    flipped = test[0][:20], np.where(test[1][:20] == "1", "0", "1")
    again = transfer.held_out(data, dev, flipped)
    assert (again.chosen, again.dev_accuracy) == (chosen.chosen, chosen.dev_accuracy)
    assert again.accuracy == pytest.approx(
        100 - 100 * np.mean(chosen.predictions[:20] == test[1][:20])
    )
    for result in (nested, split, chosen):
        assert 65 < result.accuracy < 95


@needs_sklearn
@pytest.mark.parametrize("protocol", [1, 2])
def test_an_interrupted_task_goes_on_with_the_fit_it_was_at(tmp_path, protocol):
    splits = [make_rows(60, 0), make_rows(40, 1)][:protocol]
    scorer = evaluate_transfer.SCORERS[protocol]
    whole = scorer(*splits, num_folds=2)
    fits = []

    def stop_after_five():
        fits.append(1)
        if len(fits) == 5:
            raise KeyboardInterrupt

    def kept(strength=1):
        return fit_cache.kept_fits(tmp_path, splits, {"strength": strength})

    with pytest.raises(KeyboardInterrupt):
        scorer(*splits, num_folds=2, progress=stop_after_five, kept=kept())
    assert len(kept()) == 2  # Of five fits, two by two.
    calls = []
    again = scorer(*splits, num_folds=2, progress=lambda: calls.append(1), kept=kept())
    assert len(calls) == transfer.num_fits(protocol, 2)
    assert (again.accuracy, again.chosen, again.dev_accuracy) == (
        whole.accuracy, whole.chosen, whole.dev_accuracy,
    )  # fmt: skip
    np.testing.assert_array_equal(again.predictions, whole.predictions)
    # What is kept is believed, so it must be of the same data and classifier.
    assert len(kept()) > 5
    assert kept(strength=2) == {}
    splits[0][0][0, 0] += 1e-3
    assert kept() == {}


@needs_sklearn
def test_labels_that_say_nothing_score_as_chance():
    x, _ = make_rows(200, 3)
    y = np.random.default_rng(4).permutation(np.repeat(["0", "1"], 100))
    result = transfer.nested_cross_validation((x, y), num_folds=2)
    assert result.accuracy == pytest.approx(50.0, abs=12.0)


def test_labels_too_few_for_the_folds_are_refused():
    x, y = np.ones((20, 2)), np.array(["a"] * 15 + ["b"] * 5)
    with pytest.raises(ValueError, match=r"label 'b' has 5 row.* expected 12 or more"):
        transfer.nested_cross_validation((x, y))
    with pytest.raises(ValueError, match=r"got the labels \['a'\], expected two"):
        transfer.held_out((x[:15], y[:15]), (x, y), (x, y))
    with pytest.raises(ValueError, match=r"shape \(20, 2\) and 3 labels"):
        transfer.cross_validated((x, y[:3]), (x, y))


# --- the command --------------------------------------------------------------------


class Signs:
    """Gives a text the vector of its number, and remembers what it was given."""

    config = encoder.EncoderConfig(t5=T5, projection_dim=None)
    tokenizer = Tokenizer(VOCABULARY)
    max_length = 16
    step = 3
    embedding_dim = 2
    fingerprint = "signs"
    default_prompt = "sign"
    prompts: ClassVar = {"sign": "sign: "}

    def __init__(self):
        self.encoded = []

    def encode(self, texts, *, instruction, **options):
        self.encoded += [instruction + text for text in texts]
        return np.array([[float(text), 1.0] for text in texts], np.float32)

    def truncated(self, texts, max_length, *, instruction):
        return np.array([len(instruction + text) > max_length for text in texts])


@needs_sklearn
def test_the_command_scores_tasks(tmp_path, capsys, monkeypatch):
    model = Signs()
    monkeypatch.setattr(inference.SentenceT5, "load", lambda *a, **k: model)
    # MRPC: 1 where the two numbers are near; SST: the sign, with one wrong test label.
    near = [f"1\t{i / 10}\t{i / 10 + 0.1:.1f}" for i in range(30)]
    far = [f"0\t{i / 10}\t{i / 10 + 3:.1f}" for i in range(30)]
    sign = [f"{int(i > 0)}\t{i}" for i in range(-9, 10)]
    head = {"pair": "label\tsentence1\tsentence2", "one": "label\ttext"}
    folder = write(
        tmp_path / "tasks",
        MRPC_train=[head["pair"], *near, *far],
        MRPC_test=[head["pair"], *near[:3], *far[:5]],
        SST_train=[head["one"], *sign],
        SST_dev=[head["one"], *sign],
        SST_test=[head["one"], "0\t-5", "1\t7", "1\t-8", "1\t6"],
    )
    target = tmp_path / "report.json"
    flags = ["--model_dir=m", f"--transfer={folder}", f"--json={target}"]
    flags.append("--max_length=8")  # Of the model's letters "sign: " takes six.
    assert evaluate.main(flags) == 0
    printed = capsys.readouterr().out
    sst, mrpc = json.loads(target.read_text())["transfer"]
    assert (sst["name"], sst["accuracy"], sst["f1"]) == ("SST", 75.0, None)
    assert (mrpc["name"], mrpc["accuracy"], mrpc["f1"]) == ("MRPC", 100.0, 100.0)
    assert mrpc["majority"] == pytest.approx(62.5)
    assert {k: v["rows"] for k, v in mrpc["files"].items()} == {"train": 60, "test": 8}
    assert mrpc["files"]["test"]["file"] == str(folder / "MRPC.test.tsv")
    assert mrpc["protocol"] == "train and test, C by 10 folds of train"
    assert "published SST has 67349 / 872 / 1821" in sst["notes"][0]
    assert sst["texts_truncated"] == 0
    assert mrpc["notes"][1] == "60 of 60 texts truncated (max 8 tokens)."
    assert mrpc["classifier"]["name"] == "sklearn.linear_model.LogisticRegression"
    # Each text once, after the model's own prompt.
    assert len(model.encoded) == len(set(model.encoded)) == 79
    assert all(text.startswith("sign: ") for text in model.encoded)
    assert "prompt: 'sign: '" in printed
    assert "mean of 2 tasks" in printed
    assert "87.50" in printed
    assert "papers mostly used SentEval's default" in printed
    (folder / "SST.dev.tsv").write_text("")
    assert evaluate.main(flags) == 1
    assert "SST.dev.tsv: 0 rows" in capsys.readouterr().err
