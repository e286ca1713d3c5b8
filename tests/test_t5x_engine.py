"""The same gin files under T5X's own train.py: same batches, losses, scores.

Runs where ``t5x`` is installed (docs/t5x.md says how). The slow part starts T5X's
script in processes of its own.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import gin
import jax
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "t5x.train",
        reason="t5x is not installed; docs/t5x.md says how to get it",
        exc_type=ImportError,
    )
    import t5x.train
    from t5x import utils as t5x_utils

    from sentence_t5.t5x_engine import data, launch, state, trainer

from sentence_t5 import SentenceT5, engine, gin_reader, names, partitioning

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN_FILES = sorted(path.name for path in (ROOT / "gin").glob("st5_*.gin"))

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def under_t5x(monkeypatch):
    """Makes this process look like T5X's train.py to gin and to the engine."""
    gin.clear_config()
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "train", t5x.train.train, raising=False)
    monkeypatch.setattr(engine, "running_t5x", lambda: True)
    monkeypatch.setattr(launch, "_prepared", True)
    registry, inverse = gin.config._REGISTRY, gin.config._INVERSE_REGISTRY
    monkeypatch.setattr(gin.config, "_REGISTRY", registry.copy())
    monkeypatch.setattr(gin.config, "_INVERSE_REGISTRY", dict(inverse))
    gin.external_configurable(t5x.train.train, name="train", module="__main__")
    yield
    gin.clear_config()


def prepare(*arguments, model_dir="/nowhere"):
    return launch.prepare([f"--gin.MODEL_DIR='{model_dir}'", *arguments])


def check_shapes(name):
    """Builds a run file's model under T5X: every array's shape and place."""
    config = launch.load([f"--gin_file=gin/{name}", "--gin.MODEL_DIR='/nowhere'"])
    assert config.root == "__main__.train"
    assert not config.usage.required
    model = gin.get_configurable(engine.model)()
    partitioner = gin.get_configurable(engine.partitioner)()
    assert isinstance(model, t5x.train.models.BaseModel)
    made = t5x_utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={},
        input_types={},
        partitioner=partitioner,
    )
    shapes = made.global_train_state_shape
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    assert count == model.encoder.num_params()
    # The places are those of this package's own trainer.
    ours = partitioning.Partitioner(partitioner.ours._config)
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes.params),
        jax.tree.leaves(made.train_state_axes.params),
        strict=True,
    ):
        sharding = jax.sharding.NamedSharding(ours.mesh, spec)
        assert sharding.shard_shape(leaf.shape), path
    table = made.train_state_axes.params["token_embedder"]["embedding"]
    assert tuple(table) == ("model", "fsdp")


@pytest.mark.parametrize("name", ["st5_xl_mean.gin", "st5_tiny_encdec.gin"])
def test_a_run_file_builds_under_t5x(name, under_t5x):
    check_shapes(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_FILES)
def test_every_run_file_builds_under_t5x(name, under_t5x):
    check_shapes(name)


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--gin.T5Config.d_modle=3", ["T5Config has no parameter d_modle", "d_model?"]),
        ("--gin.TRAIN_STPES=3", ["nothing uses the macro TRAIN_STPES", "TRAIN_STEPS?"]),
        ("--gin.BATCH_SIZE=9", ["batch of 9 pairs can't be split over 8", "8 or 16"]),
        ("--gin.engine.trainer.num_microbatches=2", ["2 times fewer", "microbatch_si"]),
        (
            "--gin.engine.trainer.microbatch_size=8",
            ["sentence_t5.train", "remat='full'"],
        ),
        ("--gin.engine.checkpoints.keep_best=1", ["keep_best", "best_metric"]),
        ("--gin.MODEL_DIR=%gin.REQUIRED", ["Pass --gin.MODEL_DIR=\"'...'\" (fo"]),
        ("--gin_file=gin/data/t5_vocabulary.gin", ["No vocabulary at /none/spiece"]),
        ("--gin.MeshConfig.model=3", ["can't be laid on 8 devices"]),
        ("--gin.LossConfig.guide='/g'", ["guide is /g", "`sentence-t5 train` alone"]),
        ("--gin.LossConfig.prefix_widths=(768,)", ["expected widths below 768"]),
    ],
)
def test_mistakes_end_with_our_messages(flag, parts, under_t5x):
    more = (
        ["--gin.VOCABULARY_PATH='/none/spiece.model'"] if "vocabulary" in flag else []
    )
    with pytest.raises(gin_reader.ConfigError) as error:
        prepare("--gin_file=gin/st5_tiny_mean.gin", flag, *more)
    assert [part for part in parts if part not in str(error.value)] == []


def test_checkpoints_by_score_are_refused_and_periods_reach_orbax():
    with pytest.raises(ValueError, match=r"keep_best is 1: T5X evaluates after"):
        state.CheckpointConfig(keep_best=1, best_metric="sts/stsb/spearman")
    config = state.CheckpointConfig(save_period=7, keep=2, keep_period=14)
    assert (config.save.period, config.save.keep) == (7, 2)
    assert config.save.checkpointer_cls.keywords["force_keep_period"] == 14


def test_what_t5x_does_not_carry_is_refused():
    batch = {names.LEFT_TOKENS: 1, names.RIGHT_TOKENS: 2, names.ROW_MASK: 3}
    assert len(data.to_features(batch)) == 2
    batch[names.LEFT_INSTRUCTION_LENGTHS] = 4
    with pytest.raises(
        ValueError, match=r"left_instruction_lengths.*sentence-t5 train"
    ):
        data.to_features(batch)


def test_one_microbatch_is_none():
    trainer.check_microbatches(None, 1)
    trainer.check_microbatches(None, None)


# --- T5X's script, and this package's trainer beside it -----------------------------

STEPS = 20
SHORT = (
    # As wide as Adafactor needs to factor: else it scales rounding up (test_hosts.py).
    "--gin.config.T5Config.d_model=128",
    f"--gin.TRAIN_STEPS={STEPS}",
    "--gin.STATS_PERIOD=1",
    "--gin.SAVE_PERIOD=10",
    "--gin.EVAL_PERIOD=10",
)
TEXTS = ["a dog runs", "the cats sleep", "the cat sleeps near the dog"]
HELD_OUT = """
from __gin__ import dynamic_registration
from sentence_t5 import engine
engine.train.train_eval_dataset_cfg = @infer_eval/engine.dataset()
EVAL_BATCH_SIZE = 384
"""


# Rounding grows from step to step. On one device both engines run the same program, on
# several its sums are ordered differently.
DEVICES = {"mean": 2, "first": 1, "encdec": 1}


def start(script, pooling, *arguments):
    """Trains in a process of its own."""
    done = command(script, pooling, *arguments)
    assert done.returncode == 0, done.stderr[-5000:]


def command(script, pooling, *arguments):
    """Runs an engine's script and returns how it ended."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="
    return subprocess.run(
        [sys.executable, *script, f"--gin_file=gin/st5_tiny_{pooling}.gin", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": f"{flags}{DEVICES[pooling]}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.entry
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gin.T5Config.d_modle=3"], "Did you mean d_model?"),
        (["--gin.BATCH_SIZE=9"], "batch of 9 pairs can't be split over 2"),
        (
            [
                "--gin_file=gin/data/t5_vocabulary.gin",
                "--gin.VOCABULARY_PATH='/none/spiece.model'",
            ],
            "No vocabulary at /none/spiece.model",
        ),
    ],
)
def test_t5x_ends_with_our_message_and_no_other(tmp_path, flags, message):
    place = f"--gin.MODEL_DIR='{tmp_path / 'run'}'"
    done = command([t5x.train.__file__], "mean", place, *flags)
    assert done.returncode == 2
    *_, last = done.stderr.split("t5x/train.py: error: ")
    assert message in last and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def run_t5x(model_dir, pooling, *arguments):
    place = f"--gin.MODEL_DIR='{model_dir}'"
    start([t5x.train.__file__], pooling, *SHORT, place, *arguments)


def run_ours(model_dir, pooling, *arguments):
    place = f"--model_dir={model_dir}"
    start(["-m", "sentence_t5.train"], pooling, *SHORT, place, *arguments)


def read(model_dir) -> dict[int, dict[str, float]]:
    """Returns step -> name -> value of a run's metrics.jsonl."""
    found = {}
    for line in (pathlib.Path(model_dir) / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values.pop("step"), {}).update(values)
    return found


@pytest.fixture(scope="module", params=["mean", "first", "encdec"])
def both(request, tmp_path_factory):
    """Runs both engines, each pooling in a way of its own, with hard negatives.

    Mean with held-out pairs; first from the weights of a checkpoint, with scanned
    layers, dropout and AdamW; encdec as its file says.
    """
    pooling = request.param
    folder = tmp_path_factory.mktemp(pooling)
    if pooling == "mean":
        (folder / "held_out.gin").write_text(HELD_OUT)
        arguments = [f"--gin_file={folder}/held_out.gin"]
    elif pooling == "first":
        run_ours(folder / "start", pooling, "--seed=5", "--gin.TRAIN_STEPS=1")
        arguments = ["--gin_file=gin/optim/adamw.gin"]
        arguments += ["--gin.T5Config.dropout_rate=0.1"]
        arguments += ["--gin.T5Config.scan_layers=True"]
        arguments += [f"--gin.INITIAL_CHECKPOINT_PATH='{folder}/start'"]
    else:
        arguments = []
    run_t5x(folder / "t5x", pooling, *arguments)
    run_ours(folder / "ours", pooling, *arguments)
    return pooling, folder, arguments


@pytest.mark.slow
@pytest.mark.entry
def test_losses_and_scores_are_those_of_our_trainer(both):
    pooling, folder, _ = both
    ours, theirs = read(folder / "ours"), read(folder / "t5x")
    assert sorted(ours) == sorted(theirs) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        one, other = ours[step], theirs[step]
        for key in ("loss", "positive_cosine", "learning_rate"):
            key = f"train/{key}"
            assert one[key] == pytest.approx(other[key], abs=1e-4), (step, key)
        for key in ("train/accuracy", "train/mrr"):  # They jump where ranks change.
            assert one[key] == pytest.approx(other[key], abs=0.02), (step, key)
        assert other["train/negatives_per_query"] == 127
        assert other["train/pairs_per_second"] > 0
    for step in (0, 10, STEPS):
        for key in ("sts/synthetic_sts/spearman", "sts/synthetic_sts/pearson"):
            assert ours[step][key] == pytest.approx(theirs[step][key], abs=0.02)
    if pooling == "mean":  # 1,000 pairs in batches of 384: the last one is padded.
        for step in (0, 10, STEPS):
            for key in ("loss", "negatives_per_query"):
                key = f"eval/synthetic_sts/{key}"
                assert ours[step][key] == pytest.approx(theirs[step][key], rel=1e-4)


@pytest.mark.slow
@pytest.mark.entry
def test_the_saved_model_is_ours(both):
    _, folder, _ = both
    vectors = [SentenceT5.load(folder / name).encode(TEXTS) for name in ("ours", "t5x")]
    np.testing.assert_allclose((vectors[0] * vectors[1]).sum(axis=1), 1, atol=1e-4)
    first = [
        SentenceT5.load(folder / name, 0).encode(TEXTS) for name in ("ours", "t5x")
    ]
    np.testing.assert_allclose(*first, atol=1e-6)
    assert np.abs(vectors[1] - first[1]).max() > 1e-3  # It has learnt since.


@pytest.mark.slow
@pytest.mark.entry
def test_the_written_config_is_the_same(both):
    _, folder, _ = both
    texts = [(folder / name / "config.gin").read_text() for name in ("ours", "t5x")]
    ours, theirs = (
        sorted(line for line in text.splitlines() if line[:1] not in ("#", ""))
        for text in texts
    )
    ours.remove(f"MODEL_DIR = '{folder}/ours'")
    theirs.remove(f"MODEL_DIR = '{folder}/t5x'")
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.entry
def test_t5x_goes_on_where_it_was(both):
    """Step 20 is taken away: steps 11 to 20 come again, on the same rows."""
    pooling, folder, arguments = both
    before = read(folder / "t5x")
    shutil.rmtree(folder / "t5x" / f"checkpoint_{STEPS}")
    run_t5x(folder / "t5x", pooling, *arguments)
    after = read(folder / "t5x")
    for step in range(1, STEPS + 1):
        assert after[step]["train/loss"] == before[step]["train/loss"], step
    assert SentenceT5.load(folder / "t5x").step == STEPS


@pytest.mark.slow
@pytest.mark.entry
def test_other_data_on_resuming_is_an_error(both):
    pooling, folder, arguments = both
    shutil.rmtree(folder / "t5x" / f"checkpoint_{STEPS}")
    with pytest.raises(
        AssertionError, match=r"on other data: batch_size was 64, now 32"
    ):
        run_t5x(folder / "t5x", pooling, *arguments, "--gin.BATCH_SIZE=32")
