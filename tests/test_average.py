"""Averaging checkpoints: exact, and read by all that reads weights."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from test_inference import CONFIG, MAX_LENGTH, VOCABULARY, random_params

from sentence_t5 import average, checkpoints, import_weights, pretrained
from sentence_t5.tokenizer import Tokenizer


def scanned(scan_layers):
    t5 = dataclasses.replace(CONFIG.t5, num_layers=2, scan_layers=scan_layers)
    return dataclasses.replace(CONFIG, t5=t5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that kept four checkpoints, its layers stacked."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints.write_description(
        folder, scanned(True), Tokenizer(VOCABULARY), MAX_LENGTH, prompts={"q": "q:"}
    )
    config = checkpoints.CheckpointConfig(keep=None)
    with checkpoints.Checkpointer(config, folder) as saver:
        for step in (0, 5, 9, 12):
            params = random_params(scanned(True), seed=step)
            saver.save(step, params=params, train={"step": np.int32(step)}, meta={})
    return folder


def mean(*steps):
    trees = [random_params(scanned(True), seed=step) for step in steps]
    return jax.tree.map(
        lambda *x: np.mean(x, axis=0, dtype=np.float64).astype(np.float32), *trees
    )


def assert_equal(path, expected):
    got, _ = checkpoints.load_params(path)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(got))


@pytest.mark.slow
def test_the_mean_is_exact_and_read_by_all(run, tmp_path, capsys):
    out = tmp_path / "mean"
    assert average.main([str(run), f"--model_dir={out}"]) == 0
    assert "the mean of steps 5, 9, 12" in capsys.readouterr().out  # 0 is untrained.
    expected = mean(5, 9, 12)
    assert_equal(out, expected)
    assert checkpoints.read_description(out).prompts == {"q": "q:"}
    (meta,) = out.glob("checkpoints/12/meta/metadata")
    assert json.loads(meta.read_text())["averaged"]["steps"] == [5, 9, 12]
    # As --initial_checkpoint_path reads it, into another layout.
    config = scanned(False)
    restored, _ = pretrained.restore(out, pretrained.abstract_params(config), config)
    stacked = expected["encoder"]["layers"]["attention"]["query"]["kernel"]
    for i, layer in enumerate(stacked):
        found = restored["encoder"][f"layers_{i}"]["attention"]["query"]["kernel"]
        np.testing.assert_array_equal(found, layer)
    import_weights.import_weights(out, tmp_path / "imported")
    assert_equal(tmp_path / "imported", expected)


def test_the_steps_named_and_no_others(run, tmp_path):
    assert average.average(run, tmp_path, [9, 0, 9]) == [0, 9]
    assert_equal(tmp_path, mean(0, 9))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([5], r"steps: got \[5\] of .*two or more.*there are \[0, 5, 9, 12\]"),
        ([5, 7], r"No step 7 in .*0, 5, 9, 12"),
    ],
)
def test_steps_that_cannot_be(run, tmp_path, capsys, steps, message):
    argv = [str(run), f"--model_dir={tmp_path}", "--steps", *map(str, steps)]
    assert average.main(argv) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_none_are_not_averaged(run, tmp_path, capsys):
    bad = shutil.copytree(run, tmp_path / "bad")
    params = random_params(scanned(True), seed=1)
    kernel = params["projection"]["kernel"]
    params["projection"]["kernel"] = np.where(kernel == kernel[0, 0], np.nan, kernel)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), bad) as saver:
        saver.save(15, params=params, train={"step": np.int32(15)}, meta={})
    argv = [str(bad), f"--model_dir={tmp_path / 'mean'}", "--steps", "12", "15"]
    assert average.main(argv) == 1
    assert "projection/kernel has NaN or infinity" in capsys.readouterr().err
    assert not (tmp_path / "mean" / "checkpoints" / "15").exists()


def test_a_folder_with_checkpoints_is_left_alone(run):
    with pytest.raises(FileExistsError, match=r"holds checkpoints\. Name another"):
        average.average(run, run)
