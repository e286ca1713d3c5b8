"""Geometry of embeddings by hand; files; the evaluate command's part."""

import json
import math
import pathlib
import sys
from typing import ClassVar

import numpy as np
import pytest

from sentence_t5 import encoder, evaluate, evaluate_geometry, inference
from sentence_t5.evals import geometry, geometry_plots
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"

# Three unit vectors: squared distances 2 (x, y), 4 (x, -x), 2 (y, -x).
X, Y, MINUS_X = (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)


def test_alignment_by_hand():
    # (x, y) at squared distance 2, (x, -x) at 4, (y, y) at 0.
    got = geometry.alignment([X, X, Y], [Y, MINUS_X, Y])
    assert got == pytest.approx(2.0, abs=1e-12)


def test_uniformity_and_average_cosine_by_hand():
    cloud = [X, Y, MINUS_X]
    expected = math.log((math.exp(-4) + math.exp(-8) + math.exp(-4)) / 3)
    assert geometry.uniformity(cloud) == pytest.approx(expected, abs=1e-12)
    # Cosines 0, -1, 0.
    assert geometry.average_cosine(cloud) == pytest.approx(-1 / 3, abs=1e-12)


def test_lengths_of_vectors_do_not_count():
    cloud, longer = [X, Y, MINUS_X], [(3.0, 0.0), (0.0, 0.5), (-2.0, 0.0)]
    for measure in (geometry.uniformity, geometry.average_cosine):
        assert measure(longer) == pytest.approx(measure(cloud), abs=1e-12)
    np.testing.assert_allclose(
        geometry.spectrum(longer), geometry.spectrum(cloud), atol=1e-12
    )


def test_blocks_equal_a_loop_over_pairs(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(23, 5))
    rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    potentials, cosines = [], []
    for i in range(23):
        for j in range(i):
            potentials.append(math.exp(-2 * np.sum((rows[i] - rows[j]) ** 2)))
            cosines.append(rows[i] @ rows[j])
    monkeypatch.setattr(geometry, "_BLOCK_ROWS", 4)
    want = math.log(np.mean(potentials))
    assert geometry.uniformity(vectors) == pytest.approx(want, abs=1e-12)
    assert geometry.average_cosine(vectors) == pytest.approx(np.mean(cosines))


def test_spectrum_and_effective_rank_by_hand():
    # ±x and ±y: mean 0, variance 1/2 along each axis.
    cross = [X, MINUS_X, Y, (0.0, -1.0)]
    spectrum = geometry.spectrum(cross)
    np.testing.assert_allclose(spectrum, [math.sqrt(0.5)] * 2, atol=1e-12)
    assert geometry.effective_rank(spectrum) == pytest.approx(2.0)
    # All on one line through the mean: one axis.
    assert geometry.effective_rank(geometry.spectrum([X, MINUS_X])) == pytest.approx(1)
    # Shares 3/4 and 1/4.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert geometry.effective_rank([3.0, 1.0, 0.0]) == pytest.approx(math.exp(entropy))


def test_squares_of_the_spectrum_and_the_mean_make_one():
    vectors = np.random.default_rng(1).normal(1.0, 1.0, (50, 7))
    mean = geometry.unit(vectors).mean(0)
    squares = np.sum(geometry.spectrum(vectors) ** 2)
    assert squares + mean @ mean == pytest.approx(1.0, abs=1e-12)


def test_rounding_noise_of_a_collapsed_model_has_no_rank():
    noise = np.random.default_rng(2).normal(0.0, 3e-8, (40, 8))
    collapsed = (np.ones((40, 8)) / math.sqrt(8) + noise).astype(np.float32)
    assert geometry.effective_rank(geometry.spectrum(collapsed)) is None
    assert geometry.uniformity(collapsed) == pytest.approx(0.0, abs=1e-6)


def test_what_has_no_direction_or_no_pair_is_refused():
    with pytest.raises(ValueError, match=r"1 of 2 embeddings .* row 1, of norm 0"):
        geometry.unit([X, (0.0, 0.0)])
    with pytest.raises(ValueError, match="expected two or more"):
        geometry.uniformity([X])
    with pytest.raises(ValueError, match=r"shapes \(1, 2\) and \(2, 2\)"):
        geometry.alignment([X], [X, Y])


# --- files and the command ----------------------------------------------------------

T5 = T5Config(vocab_size=1408, d_model=2, num_heads=1, head_dim=2, d_ff=4, num_layers=1)


class Angles:
    """Turns the text of an angle into its vector, of another length for each text."""

    config = encoder.EncoderConfig(t5=T5, projection_dim=None, normalize=False)
    tokenizer = Tokenizer(VOCABULARY)
    max_length = 16
    step = 3
    embedding_dim = 2
    fingerprint = "angles"
    default_prompt = None
    prompts: ClassVar = {}

    def __init__(self, scale=1.0):
        self.scale = scale
        self.encoded = []

    def encode(self, texts, *, instruction, max_length, **options):
        self.encoded += [(instruction + text, max_length) for text in texts]
        angles = self.scale * np.array([float(text) for text in texts])
        vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
        return vectors * np.arange(1, len(texts) + 1)[:, None]

    def truncated(self, texts, max_length, *, instruction):
        return np.array([len(instruction + text) > max_length for text in texts])


PAIRS = "score\tsentence1\tsentence2\n5\t0\t0.5\n4\t0\t3\n4.5\t0.5\t1.5\n"
ENCODING = {"prompt": "", "max_length": 16, "batch_size": 4, "cache_dir": None}


def distance(a, b):
    return 2 - 2 * math.cos(a - b)


def test_pairs_above_the_threshold_are_positive(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text(PAIRS)
    texts = evaluate_geometry.load(path)
    assert texts.texts == ("0", "0.5", "3", "1.5")
    assert texts.positives.tolist() == [[0, 1], [1, 3]]
    entry = evaluate_geometry.make_entry(Angles(), texts, ENCODING)
    want = (distance(0, 0.5) + distance(0.5, 1.5)) / 2
    assert entry["alignment"] == pytest.approx(want, abs=1e-6)
    assert (entry["pairs"], entry["positive_pairs"]) == (3, 2)
    assert entry["positive_score"] == 4.0
    none = evaluate_geometry.load(path, positive_score=5.0)
    entry = evaluate_geometry.make_entry(Angles(), none, ENCODING)
    assert entry["alignment"] is None
    assert "no pair is scored above the threshold" in entry["notes"][0]


def test_pairs_without_scores_are_all_positive_and_texts_have_none(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("left\tright\n0\t1\n1\t3\n")
    loaded = evaluate_geometry.load(pairs)
    assert loaded.positives.tolist() == [[0, 1], [1, 2]]
    assert not loaded.scored
    lines = tmp_path / "texts.txt"
    lines.write_text("0\n\n1\n3\n1\n")
    alone = evaluate_geometry.load(lines)
    assert alone.texts == ("0", "1", "3")
    first, second = (
        evaluate_geometry.make_entry(Angles(), texts, ENCODING)
        for texts in (loaded, alone)
    )
    want = (distance(0, 1) + distance(1, 3)) / 2
    assert first["alignment"] == pytest.approx(want, abs=1e-6)
    assert second["alignment"] is None
    assert second["notes"] == ["alignment is undefined: no pairs."]
    assert first["uniformity"] == second["uniformity"]
    lines.write_text("0\n0\n")
    with pytest.raises(ValueError, match=r"got 1 distinct text\(s\), expected two"):
        evaluate_geometry.load(lines)


def test_a_collapsed_model_does_not_look_good(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text(PAIRS)
    texts = evaluate_geometry.load(path)
    entry = evaluate_geometry.make_entry(Angles(scale=0.0), texts, ENCODING)
    assert entry["average_cosine"] == pytest.approx(1.0)
    assert entry["effective_rank"] is None
    assert "collapsed embeddings" in entry["notes"][0]
    assert "undefined" in evaluate_geometry.format_table([entry])


def test_a_large_file_is_sampled_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_geometry, "_MAX_TEXTS", 5)
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{i / 10}\n" for i in range(30)))
    texts = evaluate_geometry.load(path)
    first, again = (
        evaluate_geometry.make_entry(Angles(), texts, ENCODING) for _ in range(2)
    )
    assert first == again
    assert any("5 of 30 texts, a sample" in note for note in first["notes"])


def test_the_command_adds_geometry_to_table_and_report(tmp_path, capsys, monkeypatch):
    model = Angles()
    monkeypatch.setattr(inference.SentenceT5, "load", lambda *a, **k: model)
    path, target = tmp_path / "pairs.tsv", tmp_path / "report.json"
    path.write_text(PAIRS)
    flags = ["--model_dir=m", f"--geometry={path}", f"--json={target}"]
    assert evaluate.main([*flags, "--instruction=", "--max_length=3"]) == 0
    printed = capsys.readouterr().out
    (entry,) = json.loads(target.read_text())["geometry"]
    assert entry["file"] == str(path)
    assert len(entry["singular_values"]) == 2
    assert f"{entry['uniformity']:.3f}" in printed
    assert f"{entry['effective_rank']:.3f}" in printed
    assert "max_length 3" in printed.splitlines()[0]
    # Each distinct text once, with the asked length.
    assert sorted(model.encoded) == [(t, 3) for t in ("0", "0.5", "1.5", "3")]
    path.write_text("score\tsentence1\tsentence2\nx\t1\t2\n")
    assert evaluate.main(flags) == 1
    assert "pairs.tsv, line 2: the score is 'x'" in capsys.readouterr().err


def entry_of(alignment, uniformity, singular_values):
    return {
        "alignment": alignment,
        "uniformity": uniformity,
        "singular_values": singular_values,
    }


@pytest.mark.slow
def test_plot_draws_what_is_defined(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *args, **options: (
            drawn.append(self),
            save(self, *args, **options),
        ),
    )
    entries = [
        entry_of(0.5, -2.0, [0.5, 0.25, 0.0]),
        entry_of(None, -1.0, [0.5]),
        entry_of(0.0, 0.0, None),
    ]
    path = tmp_path / "geometry.png"
    geometry_plots.draw(path, entries, ["raw", "nli", "nli"], ["a", "a", "b"])
    assert path.read_bytes()[1:4] == b"PNG"
    points, lines = drawn[0].axes
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in points.lines] == [
        (0.5, -2.0), (0.0, 0.0),
    ]  # fmt: skip
    # What is 0 has no place on a logarithmic axis.
    assert [list(line.get_ydata()) for line in lines.lines] == [[0.5, 0.25], [0.5]]
    raw, nli = (line.get_color() for line in points.lines)
    assert raw != nli
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["raw", "nli", "a", "b"]


def test_plots_without_matplotlib_or_files_are_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'sentence-t5\[study\]'"):
        geometry_plots.check_installed()
    with pytest.raises(SystemExit):
        evaluate.main(["--model_dir=m", "--sts", "a.tsv", "--plot=b.png"])
    assert "--plot draws what --geometry measures" in capsys.readouterr().err
