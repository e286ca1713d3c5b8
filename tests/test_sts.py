"""STS scores against values worked out by hand, and the reader of STS files."""

import math
import re

import numpy as np
import pytest

from sentence_t5.evals import sts, sts_sets

# Spearman without ties is 1 - 6 Σd² / (n(n² - 1)).
SIMILARITY = {"a": [0.1, 0.3, 0.2], "b": [0.5, 0.1, 0.2, 0.4, 0.3]}
GOLD = {"a": [1.0, 2.0, 3.0], "b": [5.0, 1.0, 2.0, 3.0, 4.0]}


def test_spearman_by_hand():
    # Ranks 1 3 2 against 1 2 3: Σd² = 2, 1 - 12 / 24.
    assert sts.spearman(SIMILARITY["a"], GOLD["a"]) == pytest.approx(50.0, abs=1e-9)
    # Ranks 5 1 2 4 3 against 5 1 2 3 4: Σd² = 2, 1 - 12 / 120.
    assert sts.spearman(SIMILARITY["b"], GOLD["b"]) == pytest.approx(90.0, abs=1e-9)


def test_spearman_averages_ties():
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: r = 4.5 / sqrt(4.5 · 5).
    expected = 100 * 4.5 / math.sqrt(4.5 * 5.0)
    got = sts.spearman([0.0, 0.5, 0.5, 0.9], [1.0, 2.0, 3.0, 4.0])
    assert got == pytest.approx(expected, abs=1e-9)
    # The order of tied pairs doesn't matter.
    assert sts.spearman([0.0, 0.5, 0.5, 0.9], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(
        expected, abs=1e-9
    )


def test_pearson_by_hand():
    # x - mean: -1 0 1, y - mean: -2 -1 3: 5 / sqrt(2 · 14).
    got = sts.correlate([1.0, 2.0, 3.0], [0.0, 1.0, 5.0]).pearson
    assert got == pytest.approx(100 * 5 / math.sqrt(28), abs=1e-9)


def test_perfect_and_reversed_order():
    gold = np.arange(10.0)
    assert sts.spearman(gold**3, gold) == pytest.approx(100.0)
    assert sts.spearman(-gold, gold) == pytest.approx(-100.0)


def test_all_mean_and_wmean_are_three_numbers():
    result = sts.evaluate(SIMILARITY, GOLD)
    assert result.subsets["a"].spearman == pytest.approx(50.0, abs=1e-6)
    assert result.subsets["b"].spearman == pytest.approx(90.0, abs=1e-6)
    assert result.mean.spearman == pytest.approx((50 + 90) / 2, abs=1e-6)
    assert result.wmean.spearman == pytest.approx((3 * 50 + 5 * 90) / 8, abs=1e-6)
    # Pooled ranks: similarities 1.5 5.5 3.5 | 8 1.5 3.5 7 5.5, gold
    # 1.5 3.5 5.5 | 8 1.5 3.5 5.5 7, means 4.5.
    x = np.array([1.5, 5.5, 3.5, 8, 1.5, 3.5, 7, 5.5]) - 4.5
    y = np.array([1.5, 3.5, 5.5, 8, 1.5, 3.5, 5.5, 7]) - 4.5
    pooled = 100 * (x @ y) / math.sqrt((x @ x) * (y @ y))
    assert result.all.spearman == pytest.approx(pooled, abs=1e-6)
    assert (result.all.n, result.mean.n) == (8, 8)
    assert not result.collapsed
    assert result.similarity_mean == pytest.approx(2.1 / 8)


@pytest.mark.parametrize(
    ("similarity", "gold", "reason"),
    [
        ([0.5, 0.5, 0.5], [1, 2, 3], "all similarities are 0.5"),
        ([0.5, 0.50000003, 0.5], [1, 2, 3], "all similarities are 0.5"),
        ([0.1, 0.2, 0.3], [2, 2, 2], "all gold scores are 2"),
        ([0.1, float("nan"), 0.3], [1, 2, 3], "1 of 3 similarities are not finite"),
        ([0.1], [1], r"1 pair\(s\), two are needed"),
        ([], [], r"0 pair\(s\), two are needed"),
    ],
)
def test_undefined_is_none_with_a_reason(similarity, gold, reason):
    got = sts.correlate(similarity, gold)
    assert got.spearman is None
    assert got.pearson is None
    assert re.search(reason, got.reason)


def test_an_undefined_subset_makes_the_means_undefined():
    similarity = {**SIMILARITY, "flat": [0.7, 0.7]}
    gold = {**GOLD, "flat": [1.0, 2.0]}
    result = sts.evaluate(similarity, gold)
    assert result.subsets["flat"].spearman is None
    for average in (result.mean, result.wmean):
        assert average.spearman is None
        assert average.reason == "undefined on flat"
    # The pooled value exists: the pairs are not all alike.
    assert result.all.spearman is not None


def test_a_collapsed_model_is_flagged():
    result = sts.evaluate(
        {"a": [0.99] * 4, "b": [0.99] * 3}, {"a": range(4), "b": range(3)}
    )
    assert result.collapsed
    assert result.all.spearman is None
    assert result.similarity_std == pytest.approx(0.0, abs=1e-12)


def test_cosine_of_unnormalised_and_zero_vectors():
    left = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]], np.float32)
    right = np.array([[6.0, 8.0], [-2.0, 2.0], [1.0, 1.0]], np.float32)
    got = sts.cosine(left, right)
    np.testing.assert_allclose(got[:2], [1.0, -math.sqrt(0.5)], atol=1e-12)
    assert np.isnan(got[2])
    assert sts.correlate(got, [1, 2, 3]).reason == "1 of 3 similarities are not finite"


def test_mismatched_sides_are_errors():
    with pytest.raises(
        ValueError, match=r"shape \(2,\) and gold scores of shape \(3,\)"
    ):
        sts.correlate([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match=r"subsets \['a'\].*\['b'\]"):
        sts.evaluate({"a": [1, 2]}, {"b": [1, 2]})
    with pytest.raises(ValueError, match="no subsets"):
        sts.evaluate({}, {})


# Files.


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_columns_by_their_usual_names(tmp_path):
    path = write(
        tmp_path / "STS16.test.tsv",
        "subset\tscore\tsentence1\tsentence2\n"
        'x\t5.0\tA dog.\tA "dog".\n'
        "y\t0\tnext\u0085line\t\n"
        "x\t2.5\tc\td\r\n",
    )
    got = sts_sets.load_tsv(path)
    assert got.name == "STS16.test"
    assert got.sentences1 == ("A dog.", "next\u0085line", "c")
    assert got.sentences2 == ('A "dog".', "", "d")
    assert got.subsets == ("x", "y", "x")
    np.testing.assert_array_equal(got.scores, [5.0, 0.0, 2.5])
    by_subset = got.by_subset(got.scores)
    assert list(by_subset) == ["x", "y"]
    np.testing.assert_array_equal(by_subset["x"], [5.0, 2.5])
    assert len(got.sha256) == 64


def test_reads_other_columns_by_name_or_given(tmp_path):
    sick = write(
        tmp_path / "SICK.tsv",
        "\ufeffsentence_A\tsentence_B\trelatedness_score\nA\tB\t3.5\nC\tD\t1\n",
    )
    got = sts_sets.load_tsv(sick)
    assert (got.sentences1, got.sentences2) == (("A", "C"), ("B", "D"))
    assert got.subsets == ("SICK", "SICK")
    own = write(tmp_path / "own.tsv", "q\tp\tgrade\nA\tB\t3.5\n")
    columns = {"sentence1": "q", "sentence2": "p", "score": "grade", "subset": "q"}
    got = sts_sets.load_tsv(own, columns)
    assert (got.sentences2, got.subsets, got.scores[0]) == (("B",), ("A",), 3.5)
    with pytest.raises(ValueError, match=r"no column for score; the header has q, p"):
        sts_sets.load_tsv(own)
    with pytest.raises(ValueError, match=r"no column 'mark' for score"):
        sts_sets.load_tsv(own, {**columns, "score": "mark"})


HEADER = "score\tsentence1\tsentence2\n1\ta\tb\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2\ta\n", r"bad.tsv, line 3: got 2 fields, the header has 3"),
        ("\n", r"line 3: got 1 fields"),
        ("high\ta\tb\n", r"line 3: the score is 'high'"),
        ("nan\ta\tb\n", r"line 3: the score is 'nan'"),
        ("\ta\tb\n", r"line 3: the score is ''"),
        (b"2\tcaf\xe9\tb\n", r"line 3: byte 5 is not UTF-8 \(0xe9\)"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    content = HEADER.encode() + (line.encode() if isinstance(line, str) else line)
    path = write(tmp_path / "bad.tsv", content + b"3\tc\td\n")
    with pytest.raises(ValueError, match=message):
        sts_sets.load_tsv(path)


def test_a_file_without_pairs_is_an_error(tmp_path):
    for text in ("", "score\tsentence1\tsentence2\n"):
        with pytest.raises(ValueError, match="0 rows"):
            sts_sets.load_tsv(write(tmp_path / "empty.tsv", text))


@pytest.mark.parametrize(
    ("name", "rows", "known"),
    [
        ("STS16.test", 1186, None),
        ("STS16.test", 1185, "STS16 has 1186"),
        ("sts2012-test", 5, "STS12 has 3108"),
        ("STSB.dev", 5, None),
        ("my_pairs", 5, None),
    ],
)
def test_sizes_of_published_sets(name, rows, known):
    got = sts_sets.size_problem(
        sts_sets.StsSet(name, (), (), np.zeros(rows), (), sha256="")
    )
    assert got is None if known is None else known in got
