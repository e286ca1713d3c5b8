"""Step metrics against numpy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import candidate_masks, losses, metrics

B, N, E = 6, 2, 4
NAMES = {
    "accuracy", "mrr", "positive_cosine", "negative_cosine", "alignment", "uniformity",
    "negatives_per_query",
}  # fmt: skip


class Mask(NamedTuple):
    """Any mask, in place of one made from texts."""

    rights: np.ndarray
    negatives: np.ndarray | None
    rows: np.ndarray

    def mask(self, own, index):
        kept = slice(None) if index is None else index
        negatives = None if self.negatives is None else self.negatives[kept]
        rights = self.rights[kept] | own
        return candidate_masks.CandidateMask(rights, negatives, rights)


@functools.partial(jax.jit, static_argnums=4)
def summarize(left, right, negatives, mask, block_rows=None):
    output = losses.contrastive_loss(
        left, right, negatives, mask,
        logit_scale=20.0, bidirectional=True, block_rows=block_rows,
    )  # fmt: skip
    return metrics.contrastive_metrics(output, mask.rows, right, block_rows=block_rows)


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def expected_metrics(left, right, negatives, rights_mask, negatives_mask, rows):
    """Returns every metric, one row at a time."""
    accuracy, mrr, positives, others, counts = [], [], [], [], []
    for i in np.flatnonzero(rows):
        positive = left[i] @ right[i]
        candidates = [
            left[i] @ right[j] for j in range(B) if j != i and rights_mask[i, j]
        ]
        candidates += [
            left[i] @ negatives[j, n]
            for j in range(B)
            for n in range(N)
            if negatives_mask[i, j * N + n]
        ]
        rank = 1 + sum(c >= positive for c in candidates)
        accuracy.append(rank == 1)
        mrr.append(1 / rank)
        positives.append(positive)
        others += candidates
        counts.append(len(candidates))
    kept = right[rows]
    potentials = [
        np.exp(-2 * np.sum((kept[i] - kept[j]) ** 2))
        for i in range(len(kept))
        for j in range(len(kept))
        if i != j
    ]
    distances = np.sum((left[rows] - right[rows]) ** 2, axis=-1)
    return {
        "accuracy": np.mean(accuracy),
        "mrr": np.mean(mrr),
        "positive_cosine": np.mean(positives),
        "negative_cosine": np.mean(others),
        "alignment": np.mean(distances),
        "uniformity": np.log(np.mean(potentials)),
        "negatives_per_query": np.mean(counts),
    }


@pytest.mark.parametrize("block_rows", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_equal_numpy(masked, block_rows):
    rng = np.random.default_rng(3)
    left, right, negatives = unit(rng, B, E), unit(rng, B, E), unit(rng, B, N, E)
    right[:3] = left[:3]  # Three rows that are right, three that depend on luck.
    rights = np.ones((B, B), bool)
    negatives_mask, rows = np.ones((B, B * N), bool), np.ones(B, bool)
    if masked:
        rows[4] = False
        rights = rows[:, None] & rows & (rng.random((B, B)) < 0.7) | np.eye(
            B, dtype=bool
        )
        negatives_mask = rng.random((B, B * N)) < 0.5
    mask = Mask(rights, negatives_mask, rows)
    ours = summarize(left, right, negatives, mask, block_rows)
    theirs = expected_metrics(left, right, negatives, rights, negatives_mask, rows)
    assert ours.keys() == theirs.keys() == NAMES
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    assert 0.4 < theirs["accuracy"] < theirs["mrr"] < 1


def test_without_negatives():
    rng = np.random.default_rng(5)
    left, right = unit(rng, B, E), unit(rng, B, E)
    mask = Mask(np.ones((B, B), bool), None, np.ones(B, bool))
    ours = summarize(left, right, None, mask)
    assert float(ours["negatives_per_query"]) == B - 1
    cosines = left @ right.T
    off_diagonal = cosines[~np.eye(B, dtype=bool)]
    np.testing.assert_allclose(ours["negative_cosine"], off_diagonal.mean(), atol=1e-6)
    rank = (cosines >= np.diagonal(cosines)[:, None]).sum(1)
    np.testing.assert_allclose(ours["mrr"], np.mean(1 / rank), rtol=1e-6)
    assert float(ours["accuracy"]) == pytest.approx(np.mean(rank == 1))


def test_a_tie_counts_against_the_model():
    # All embeddings equal: the positive shares its place with all 17 others.
    same = np.tile(np.eye(E, dtype=np.float32)[0], (B, 1))
    negatives = np.broadcast_to(same[:, None], (B, N, E))
    mask = Mask(np.ones((B, B), bool), np.ones((B, B * N), bool), np.ones(B, bool))
    ours = summarize(same, same, negatives, mask)
    assert float(ours["accuracy"]) == 0
    assert float(ours["mrr"]) == pytest.approx(1 / (B - 1 + B * N + 1))
    assert float(ours["uniformity"]) == 0
    assert float(ours["alignment"]) == 0
    # A duplicate that the loss leaves out costs nothing here either.
    alone = Mask(np.eye(B, dtype=bool), np.zeros((B, B * N), bool), np.ones(B, bool))
    ours = summarize(same, same, negatives, alone)
    assert float(ours["accuracy"]) == float(ours["mrr"]) == 1
    assert float(ours["negatives_per_query"]) == 0
    assert float(ours["negative_cosine"]) == 0


def test_uniformity_by_hand():
    # Opposite vectors are 2 apart, orthogonal ones sqrt(2); pairs of a vector with
    # itself don't count, nor do rows left out.
    square = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [1, 0]], np.float32)
    rows = np.array([1, 1, 1, 1, 0], bool)
    expected = np.log((4 * np.exp(-8) + 8 * np.exp(-4)) / 12)
    ours = jax.jit(metrics.uniformity)(square, rows)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    for count in (0, 1):
        assert float(jax.jit(metrics.uniformity)(square, np.arange(5) < count)) == 0


def test_tree_norms_are_in_the_order_of_leaves():
    tree = {"b": jnp.full((2, 2), 2.0), "a": jnp.array([3.0, 4.0], jnp.bfloat16)}
    norms = metrics.tree_norms(tree)
    assert norms.dtype == jnp.float32
    np.testing.assert_allclose(norms, [5.0, 4.0])
