"""SentEval's default classifier settings, written out in numpy to compare with.

Logistic regression (its MLP with nhid=0) in batches of 64 by Adam, weight decay from a
grid, scored on held-out rows after every 4 passes; it ends when it was no better 6
times, or after 200 passes, and the best weights count. All strengths of the grid train
side by side, as SentEval seeds each of them alike.

Source: SentEval's README ("default config") and tools/{classifier,validation}.py.
"""

import numpy as np
from sklearn import model_selection

SEED = 1111
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)
NUM_FOLDS, BATCH, TENACITY, PASSES, MAX_PASSES = 10, 64, 5, 4, 200
LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


class Classifiers:
    """Linear classifiers of one width, one for each weight decay."""

    def __init__(self, num_features, num_labels, decays):
        rng = np.random.default_rng(SEED)
        bound = num_features**-0.5
        one = rng.uniform(-bound, bound, (num_features + 1, 1, num_labels))
        # The last row is the bias, which decays like the rest.
        self.weights = np.repeat(one, len(decays), 1)
        self.decays = np.array(decays)[:, None]
        self.moments = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.num_steps = 0
        self.rng = rng

    def logits(self, x):
        """Returns [n G K] for features [n F]."""
        flat = self.weights.reshape(len(self.weights), -1)
        return (x @ flat[:-1] + flat[-1]).reshape(len(x), *self.weights.shape[1:])

    def accuracies(self, x, y):
        """Returns the accuracy of each classifier, × 100, [G]."""
        return 100 * (self.logits(x).argmax(-1) == y[:, None]).mean(0)

    def step(self, x, y):
        logits = self.logits(x)
        error = np.exp(logits - logits.max(-1, keepdims=True))
        error /= error.sum(-1, keepdims=True)
        error[np.arange(len(y)), :, y] -= 1
        error /= len(y)
        flat = error.reshape(len(y), -1)
        gradient = np.concatenate([x.T @ flat, flat.sum(0, keepdims=True)])
        gradient = gradient.reshape(self.weights.shape) + self.decays * self.weights
        self.num_steps += 1
        first, second = self.moments
        first += (1 - BETA1) * (gradient - first)
        second += (1 - BETA2) * (gradient**2 - second)
        scale = np.sqrt(second / (1 - BETA2**self.num_steps)) + EPSILON
        self.weights -= LEARNING_RATE / (1 - BETA1**self.num_steps) * first / scale

    def fit(self, train, dev):
        """Trains until no classifier gets better, and keeps the best of each."""
        (x, y), best = train, np.full(len(self.decays), -1.0)
        kept, worse = self.weights.copy(), np.zeros(len(self.decays), int)
        for _ in range(0, MAX_PASSES + 1, PASSES):
            for _ in range(PASSES):
                order = self.rng.permutation(len(x))
                for start in range(0, len(x), BATCH):
                    rows = order[start : start + BATCH]
                    self.step(x[rows], y[rows])
            accuracies = self.accuracies(*dev)
            running = worse <= TENACITY
            better = running & (accuracies > best)
            kept[:, better] = self.weights[:, better]
            best[better] = accuracies[better]
            worse[running & ~better] += 1
            if (worse > TENACITY).all():
                break
        self.weights = kept
        return self


def _choose(x, y):
    """Returns the weight decay that does best over folds."""
    accuracies = []
    for train, held in _folds(y):
        dev = x[held], y[held]
        fitted = Classifiers(x.shape[1], y.max() + 1, DECAYS).fit(
            (x[train], y[train]), dev
        )
        accuracies.append(fitted.accuracies(*dev))
    return DECAYS[int(np.argmax(np.round(np.mean(accuracies, 0), 2)))]


def _predict(train, decay, x):
    """Trains on 95 % of the rows, stops by the rest, and predicts."""
    rows = np.random.default_rng(SEED).permutation(len(train[0]))
    num_dev = int(0.05 * len(rows))
    dev, rest = (tuple(a[r] for a in train) for r in (rows[:num_dev], rows[num_dev:]))
    fitted = Classifiers(train[0].shape[1], train[1].max() + 1, [decay])
    return fitted.fit(rest, dev).logits(x)[:, 0].argmax(-1)


def _folds(y):
    folds = model_selection.StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=SEED)
    return folds.split(y, y)


def nested(data):
    """Returns predictions for all rows, by nested cross-validation."""
    x, y = data
    predictions = np.empty_like(y)
    for train, held in _folds(y):
        seen = x[train], y[train]
        predictions[held] = _predict(seen, _choose(*seen), x[held])
    return predictions


def train_and_test(train, test):
    """Returns predictions for the test rows."""
    return _predict(train, _choose(*train), test[0])
