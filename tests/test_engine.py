"""Which engine a gin file's names stand for, and what T5X's train.py leaves on disk."""

import dataclasses
import sys
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sentence_t5 import (
    SentenceT5,
    checkpoint_files,
    checkpoints,
    encoder,
    engine,
    pretrained,
    steps,
    vocabularies,
)
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.t5 import config as t5_config


def script(path: str | None = None, spec: str | None = None) -> types.ModuleType:
    """Returns a ``__main__`` as Python makes it for a file, or for ``-m``."""
    module = types.ModuleType("__main__")
    if path is not None:
        module.__file__ = path
    module.__spec__ = spec and types.SimpleNamespace(name=spec)
    return module


@pytest.mark.parametrize(
    ("main", "is_t5x"),
    [
        (script("/home/me/t5x/t5x/train.py"), True),
        (script("t5x/t5x/main.py"), True),
        (script(spec="t5x.train"), True),
        (script(spec="t5x.main"), True),
        (script("/home/me/t5x/t5x/eval.py"), False),
        (script("/home/me/t5x/mine/train.py"), False),
        (script(spec="sentence_t5.train"), False),
        (script("/usr/bin/sentence-t5"), False),
        (script(), False),  # An interpreter without a script.
    ],
)
def test_the_running_script_says_which_engine(main, is_t5x):
    assert engine.running_t5x(main) == is_t5x


def test_our_objects_are_there_under_t5x_too(monkeypatch):
    monkeypatch.setattr(engine, "running_t5x", lambda: True)
    assert engine.ours("sentence_t5.engine.model") is steps.Model
    assert engine.ours("__main__.train").__module__ == "sentence_t5.train"
    assert engine.ours("sentence_t5.losses.LossConfig") is None
    assert engine.ours("sentence_t5.engine.spelling") is None


def test_both_engines_have_the_same_names():
    assert set(engine._T5X) == set(engine._OURS)
    modules = {module for module, _ in engine._T5X.values()}
    assert all(module.startswith("sentence_t5.t5x_engine.") for module in modules)
    assert not modules & set(sys.modules) or "t5x" in sys.modules


CONFIG = encoder.EncoderConfig(
    t5_config.T5Config(
        vocab_size=1408, d_model=16, num_heads=2, head_dim=4, d_ff=32, num_layers=2
    ),
    projection_dim=8,
)


@pytest.fixture(scope="module")
def t5x_run(tmp_path_factory):
    """A model_dir as T5X leaves it: two steps, the second with other parameters."""
    model_dir = tmp_path_factory.mktemp("t5x") / "run"
    vocabulary = vocabularies.synthetic()
    tokenizer = tokenizer_lib.Tokenizer(
        vocabulary.sentencepiece_model_file, vocabulary.extra_ids
    )
    checkpoints.write_description(model_dir, CONFIG, tokenizer, 32)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        pretrained.abstract_params(CONFIG),
    )
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    with ocp.CheckpointManager(model_dir, options=options) as manager:
        for step, scale in ((5, 2.0), (20, 1.0)):
            target = jax.tree.map(lambda leaf, by=scale: leaf * by, params)
            state = {"step": np.int32(step), "param_states": {"0": {"v": target}}}
            tree = {"target": target, "state": state}
            saved = ocp.args.Composite(state=ocp.args.PyTreeSave(tree))
            manager.save(step, args=saved)
    return model_dir, params, tokenizer


@pytest.mark.parametrize(
    ("where", "step", "scale"),
    [(".", None, 1.0), (".", 5, 2.0), ("checkpoint_5", None, 2.0)],
)
def test_parameters_that_t5x_saved_are_read(t5x_run, where, step, scale):
    model_dir, params, _ = t5x_run
    found, step = checkpoints.load_params(model_dir / where, step)
    assert step == (20 if scale == 1.0 else 5)
    jax.tree.map(np.testing.assert_array_equal, found, _scaled(params, scale))


def _scaled(params, scale):
    return jax.tree.map(lambda leaf: leaf * np.float32(scale), params)


def test_a_model_that_t5x_saved_is_loaded(t5x_run):
    model_dir, params, tokenizer = t5x_run
    model = SentenceT5.load(model_dir)
    assert model.step == 20
    assert model.tokenizer.sha256 == tokenizer.sha256
    assert model.max_length == 32
    jax.tree.map(np.testing.assert_array_equal, model._params, params)


def test_its_weights_go_into_a_model_with_other_layers(t5x_run):
    """Scanned into unrolled, so that names and shapes differ."""
    model_dir, params, _ = t5x_run
    t5 = dataclasses.replace(CONFIG.t5, scan_layers=False)
    unrolled = dataclasses.replace(CONFIG, t5=t5)
    found, _ = pretrained.restore(
        model_dir, pretrained.abstract_params(unrolled), unrolled
    )
    np.testing.assert_array_equal(
        found["encoder"]["layers_1"]["mlp"]["wi"]["kernel"],
        params["encoder"]["layers"]["mlp"]["wi"]["kernel"][1],
    )
    read = pretrained.load_encoder(model_dir / "checkpoint_20")
    assert read.config == CONFIG
    np.testing.assert_array_equal(
        read.read_params()["projection"]["kernel"], params["projection"]["kernel"]
    )


def test_an_interrupted_save_of_t5x_is_no_checkpoint(t5x_run):
    model_dir, _, _ = t5x_run
    half = model_dir / "checkpoint_30"
    (half / "state").mkdir(parents=True)
    try:
        folder = checkpoint_files.absolute(model_dir)
        assert checkpoint_files.list_t5x_steps(folder) == [5, 20, 30]
        assert checkpoint_files.whole_steps(folder) == [5, 20]
        assert SentenceT5.load(model_dir).step == 20
    finally:
        (half / "state").rmdir()
        half.rmdir()


def test_one_engine_does_not_start_anew_beside_the_others_checkpoints(
    t5x_run, tmp_path
):
    model_dir, _, _ = t5x_run
    with pytest.raises(ValueError, match=r"has 20 steps saved by T5X's train\.py"):
        checkpoint_files.check_engine(model_dir, is_t5x=False)
    checkpoint_files.check_engine(model_dir, is_t5x=True)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"7 steps saved by sentence_t5\.train, whi"):
        checkpoint_files.check_engine(tmp_path, is_t5x=True)
    checkpoint_files.check_engine(tmp_path, is_t5x=False)
