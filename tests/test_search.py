"""Exact search: equal to a brute force in numpy whatever the blocks and devices."""

import jax
import numpy as np
import pytest

from sentence_t5 import partitioning, search


def brute_force(queries, passages, k):
    """All scores in float64, rounded, sorted by score and then by row."""
    scores = queries.astype(np.float64) @ passages.astype(np.float64).T
    scores = scores.astype(np.float32)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def make_vectors(num_queries, num_passages, width=24, seed=0):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num_queries + num_passages, width))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors.astype(np.float32)
    return vectors[:num_queries], vectors[num_queries:]


QUERIES, PASSAGES = make_vectors(37, 1003)
BLOCKS = {"one": (64, 1024), "several": (16, 128), "uneven": (24, 300)}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_equals_brute_force_for_any_blocks(blocks):
    query_block, passage_block = BLOCKS[blocks]
    done = []
    found = search.top_k(
        QUERIES,
        PASSAGES,
        20,
        query_block=query_block,
        passage_block=passage_block,
        progress=done.append,
    )
    scores, rows = brute_force(QUERIES, PASSAGES, 20)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)
    assert sum(done) == len(QUERIES)


def test_one_device_equals_eight():
    one = partitioning.Partitioner(partitioning.MeshConfig(), jax.devices()[:1])
    ours = search.top_k(QUERIES, PASSAGES, 7, partitioner=one, passage_block=256)
    all_devices = search.top_k(QUERIES, PASSAGES, 7, passage_block=256)
    np.testing.assert_array_equal(ours.rows, all_devices.rows)
    np.testing.assert_array_equal(ours.scores, all_devices.scores)


def test_ties_go_to_the_smaller_row_across_blocks():
    base = PASSAGES[:50]
    passages = np.concatenate([base, base, base])  # Rows i, i + 50 and i + 100 tie.
    found = search.top_k(QUERIES, passages, 9, passage_block=32)
    _, rows = brute_force(QUERIES, passages, 9)
    np.testing.assert_array_equal(found.rows, rows)
    for row in found.rows:
        np.testing.assert_array_equal(row[1::3], row[0::3] + 50)
        np.testing.assert_array_equal(row[2::3], row[0::3] + 100)


def test_scores_that_are_equal_in_float32_tie():
    # As float64 the second is larger than the first, and the fourth than the third.
    passages = np.array(
        [[1.0, 0.0], [1.0, 2**-30], [2.0, 2**-30], [2.0, 2**-29], [1.0, 2**-23]],
        np.float32,
    )
    query = np.ones((1, 2), np.float32)
    exact = passages.astype(np.float64).sum(1)
    assert exact[0] < exact[1] < exact[4] and exact[2] < exact[3]
    found = search.top_k(query, passages, 5)
    np.testing.assert_array_equal(found.rows, [[2, 3, 4, 0, 1]])
    scores = np.array([[2, 2, 1 + 2**-23, 1, 1]], np.float32)
    np.testing.assert_array_equal(found.scores, scores)
    # A passage's score is the same alone.
    alone = search.inner_products(query[0], passages[4:])
    np.testing.assert_array_equal(alone, scores[0, 2:3])


def test_a_collapsed_model_gives_the_first_rows():
    same = np.broadcast_to(PASSAGES[:1], (300, PASSAGES.shape[1]))
    found = search.top_k(QUERIES, same, 5, passage_block=64)
    np.testing.assert_array_equal(found.rows, np.tile(np.arange(5), (len(QUERIES), 1)))


def test_fewer_passages_than_asked_and_negative_scores():
    found = search.top_k(-np.abs(QUERIES), np.abs(PASSAGES[:3]), 10)
    scores, rows = brute_force(-np.abs(QUERIES), np.abs(PASSAGES[:3]), 10)
    assert found.rows.shape == (37, 3)
    assert (found.scores < 0).all()
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)


def test_no_queries():
    found = search.top_k(QUERIES[:0], PASSAGES, 4)
    assert found.rows.shape == (0, 4)


def test_a_memory_map_is_searched(tmp_path):
    np.save(tmp_path / "passages.npy", PASSAGES)
    mapped = np.load(tmp_path / "passages.npy", mmap_mode="r")
    found = search.top_k(QUERIES, mapped, 20)
    np.testing.assert_array_equal(found.rows, brute_force(QUERIES, PASSAGES, 20)[1])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"of one width, got \[37, 24\] and \[5, 3\]"):
        search.top_k(QUERIES, np.zeros((5, 3), np.float32), 1)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        search.top_k(QUERIES, PASSAGES, 0)
    broken = PASSAGES.copy()
    broken[700, 3] = np.nan
    with pytest.raises(ValueError, match=r"passages\[700\] is not finite"):
        search.top_k(QUERIES, broken, 3, passage_block=256)
