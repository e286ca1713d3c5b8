"""Transfer by logistic regression on frozen embeddings, as SentEval trains it.

Numbers only: features and labels in, accuracies out. The strength C (small is strong)
is chosen by accuracy on rows that are held out, the stronger of equals:

    nested_cross_validation   MR CR SUBJ MPQA   10 folds; C by 10 folds of the other 9
    cross_validated           TREC MRPC         C by 10 folds of train; scored on test
    held_out                  SST               C on dev; scored on test

Folds are stratified and shuffled with SentEval's seed. The classifier is that of
scikit-learn, which SentEval has as an option. Its default is the same model trained
another way: Adam with early stopping on held-out rows, weight decay for C.

Source: Conneau and Kiela 2018 (arXiv 1803.05449); SentEval's ``tools/validation.py``.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

SEED = 1111
NUM_FOLDS = 10
# SentEval's grids of C: where folds of folds or a dev set choose, and where folds do.
GRID = tuple(2.0**power for power in range(-2, 4))
WIDE_GRID = tuple(2.0**power for power in range(-1, 6))
# scikit-learn's 100 are too few for vectors that aren't normalized.
_MAX_ITERATIONS = 1000

Data = tuple[np.ndarray, np.ndarray]  # features [n F] and labels [n]
Progress = Callable[[], Any]
# Name of a value of C on some folds -> accuracy × 100, fits that didn't converge.
Kept = MutableMapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class TransferResult:
    """Scores of one task.

    Attributes:
        accuracy: × 100, on rows that nothing was chosen by.
        dev_accuracy: × 100, of the chosen C on the rows that chose it.
        chosen: each C that was chosen, one or one a fold.
        predictions: of the scored rows, [n].
        num_unconverged: fits that ended before they converged.
    """

    accuracy: float
    dev_accuracy: float
    chosen: tuple[float, ...]
    predictions: np.ndarray
    num_unconverged: int


def pair_features(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns |u - v| beside u * v, [n E] and [n E] → [n 2E]."""
    return np.concatenate([np.abs(left - right), left * right], axis=1)


def f1(predictions: np.ndarray, labels: np.ndarray, positive: Any) -> float:
    """Returns F1 × 100 of one label; 0 where it is neither there nor predicted."""
    predicted, actual = predictions == positive, labels == positive
    total = predicted.sum() + actual.sum()
    return 200.0 * float((predicted & actual).sum()) / total if total else 0.0


def nested_cross_validation(
    data: Data,
    num_folds: int = NUM_FOLDS,
    progress: Progress = lambda: None,
    kept: Kept | None = None,
) -> TransferResult:
    """Scores every row by a classifier that has not seen its fold.

    Args:
        data: features [n F] and labels [n].
        num_folds: of the outer and of the inner folds.
        progress: called after each fit.
        kept: what an interrupted call with the same data has found; added to.

    Returns:
        The mean over folds of the accuracies.

    Raises:
        ValueError: a label with too few rows for the folds, or one label only.
    """
    x, y = data
    _check(data, num_folds + 2)  # so that the inner folds have enough of them too
    predictions, chosen, dev, test = np.empty_like(y), [], [], []
    with _Trainer(progress, kept) as trainer:
        for fold, (train, held) in enumerate(_folds(y, num_folds)):
            inner = x[train], y[train]

            def by_folds(c: float, inner=inner, name=f"fold {fold}") -> float:
                return trainer.by_folds(inner, num_folds, c, name)

            strength, accuracy = _choose(GRID, by_folds)
            predictions[held] = trainer.fit(inner, strength).predict(x[held])
            chosen.append(strength)
            dev.append(accuracy)
            test.append(_accuracy(predictions[held], y[held]))
    return TransferResult(
        float(np.mean(test)),
        float(np.mean(dev)),
        tuple(chosen),
        predictions,
        trainer.num_unconverged,
    )


def cross_validated(
    train: Data,
    test: Data,
    num_folds: int = NUM_FOLDS,
    progress: Progress = lambda: None,
    kept: Kept | None = None,
) -> TransferResult:
    """Chooses C by folds of the training rows, and scores the test rows.

    Args:
        train: features [n F] and labels [n].
        test: features [m F] and labels [m].
        num_folds: of the training rows.
        progress: called after each fit.
        kept: what an interrupted call with the same data has found; added to.

    Raises:
        ValueError: a label with too few rows for the folds, or one label only.
    """
    _check(train, num_folds)
    with _Trainer(progress, kept) as trainer:

        def by_folds(c: float) -> float:
            return trainer.by_folds(train, num_folds, c, "train")

        return _score_test(trainer, WIDE_GRID, by_folds, train, test)


def held_out(
    train: Data,
    dev: Data,
    test: Data,
    progress: Progress = lambda: None,
    kept: Kept | None = None,
) -> TransferResult:
    """Chooses C on the dev rows, and scores the test rows.

    Args:
        train: features [n F] and labels [n].
        dev: the same, of the rows that choose.
        test: the same, of the rows that are scored.
        progress: called after each fit.
        kept: not used: a handful of fits is made anew.

    Raises:
        ValueError: training rows with one label only.
    """
    _check(train, 1)
    with _Trainer(progress) as trainer:

        def on_dev(c: float) -> float:
            return _accuracy(trainer.fit(train, c).predict(dev[0]), dev[1])

        return _score_test(trainer, GRID, on_dev, train, test)


def num_fits(splits: int, num_folds: int = NUM_FOLDS) -> int:
    """Returns how many classifiers a task with so many splits trains."""
    return {
        1: num_folds * (len(GRID) * num_folds + 1),
        2: len(WIDE_GRID) * num_folds + 1,
        3: len(GRID) + 1,
    }[splits]


class _Trainer:
    """Fits classifiers, and counts those that didn't converge.

    BLAS has one thread meanwhile: sums don't depend on the number of cores then, and
    fits this small lose by more threads, twentyfold on a busy machine.
    """

    def __init__(self, progress: Progress, kept: Kept | None = None):
        self._progress = progress
        self._kept = {} if kept is None else kept
        self._make, self._not_converged = _classifier()
        self.num_unconverged = 0

    def __enter__(self) -> "_Trainer":
        import threadpoolctl  # scikit-learn depends on it

        self._limits = threadpoolctl.threadpool_limits(1)
        return self

    def __exit__(self, *_) -> None:
        self._limits.restore_original_limits()

    def fit(self, data: Data, strength: float) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", self._not_converged)
            fitted = self._make(strength).fit(*data)
        self.num_unconverged += any(
            issubclass(w.category, self._not_converged) for w in caught
        )
        self._progress()
        return fitted

    def by_folds(self, data: Data, num_folds: int, strength: float, name: str) -> float:
        """Returns the mean accuracy × 100 over folds, kept under a name of the data."""
        name = f"{name}, C={strength:g}"
        if name in self._kept:
            accuracy, unconverged = self._kept[name]
            self.num_unconverged += int(unconverged)
            for _ in range(num_folds):
                self._progress()
            return accuracy
        before = self.num_unconverged
        accuracy = self._mean_accuracy(data, num_folds, strength)
        self._kept[name] = [accuracy, self.num_unconverged - before]
        return accuracy

    def _mean_accuracy(self, data: Data, num_folds: int, strength: float) -> float:
        x, y = data
        return float(
            np.mean(
                [
                    _accuracy(
                        self.fit((x[train], y[train]), strength).predict(x[held]),
                        y[held],
                    )
                    for train, held in _folds(y, num_folds)
                ]
            )
        )


def check_installed() -> None:
    """Raises an ImportError that says what to install, where scikit-learn is not."""
    _classifier()


def describe() -> dict[str, Any]:
    """Returns what the scores depend on beside the data, JSON-able."""
    import sklearn

    return {
        "name": "sklearn.linear_model.LogisticRegression",
        "version": sklearn.__version__,
        "seed": SEED,
        "max_iterations": _MAX_ITERATIONS,
    }


def _classifier() -> tuple[Callable[[float], Any], type[Warning]]:
    """Returns what makes a classifier of a strength, and its warning."""
    try:
        from sklearn import exceptions, linear_model
    except ImportError as error:
        raise ImportError(
            "Transfer tasks take scikit-learn: pip install 'sentence-t5[senteval]'."
        ) from error

    def make(strength: float) -> Any:
        return linear_model.LogisticRegression(C=strength, max_iter=_MAX_ITERATIONS)

    return make, exceptions.ConvergenceWarning


def _folds(labels: np.ndarray, num_folds: int):
    from sklearn import model_selection

    folds = model_selection.StratifiedKFold(num_folds, shuffle=True, random_state=SEED)
    return folds.split(labels, labels)


def _choose(
    grid: Sequence[float], score: Callable[[float], float]
) -> tuple[float, float]:
    """Returns the strength with the best score, the first of equals, and the score.

    Scores are compared to two decimals, as SentEval does.
    """
    scores = [round(score(strength), 2) for strength in grid]
    best = int(np.argmax(scores))
    return grid[best], scores[best]


def _score_test(trainer, grid, score, train: Data, test: Data) -> TransferResult:
    """Chooses from the grid by the score, and scores the test rows."""
    strength, dev_accuracy = _choose(grid, score)
    predictions = trainer.fit(train, strength).predict(test[0])
    return TransferResult(
        _accuracy(predictions, test[1]),
        dev_accuracy,
        (strength,),
        predictions,
        trainer.num_unconverged,
    )


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 100.0 * float(np.mean(predictions == labels))


def _check(data: Data, smallest: int) -> None:
    """Checks features and the number of rows of each label."""
    x, y = data
    if x.ndim != 2 or len(x) != len(y):
        raise ValueError(
            f"got features of shape {x.shape} and {len(y)} labels, expected one row of "
            "features for each label."
        )
    rows = collections.Counter(y.tolist())
    if len(rows) < 2:
        raise ValueError(f"got the labels {list(rows)}, expected two or more.")
    label, fewest = min(rows.items(), key=lambda item: item[1])
    if fewest < smallest:
        raise ValueError(
            f"label {label!r} has {fewest} row(s), expected {smallest} or more: each "
            "fold needs one."
        )
