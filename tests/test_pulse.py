"""Runs of train(): twelve steps in one go, and the same steps interrupted.

Most run here, in this process, on steps compiled once. The slow ones run the command
line and are killed for real.
"""

import copy
import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from sentencepiece import sentencepiece_model_pb2

from sentence_t5 import (
    checkpoints,
    datasets,
    encoder,
    losses,
    metrics_file,
    optim,
    partitioning,
    pretrained,
    reporting,
    steps,
    tokenizer,
)
from sentence_t5 import train as train_lib
from sentence_t5.t5.config import T5Config
from sentence_t5.tasks import synthetic

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 12
BATCH = 8
# Five batches: the checkpoint of step 5 lies on the border of two epochs, and twelve
# steps reach into the third.
ROWS = 40
SAVE_PERIOD = 5
LENGTHS = {"inputs": 12, "targets": 12}

# Closing a checkpoint reader in the middle of a test's error leaves a thread to end.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

MODEL = steps.Model(
    encoder.EncoderConfig(
        T5Config(
            vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=2,
            dropout_rate=0.1,
        ),
        projection_dim=8,
    ),
    losses.LossConfig(logit_scale=20.0),
    optim.adafactor(
        optim.linear_decay(peak=0.05, total_steps=20), min_dim_size_to_factor=8
    ),
)  # fmt: skip


@functools.cache
def base_trainer():
    """Returns a trainer, its compiled step, and its first state on the host."""
    mesh = partitioning.MeshConfig(data=1, fsdp=2, model=1)
    partitioner = partitioning.Partitioner(mesh, jax.devices()[:2])
    trainer = steps.Trainer(model=MODEL, partitioner=partitioner)
    state = trainer.init_state(0)
    key = jax.random.key_data(state.rng)
    host_state = jax.device_get(state.replace(rng=key))
    batch = {
        name: np.zeros((BATCH, *shape), dtype)
        for name, shape, dtype in (
            ("left_tokens", (12,), np.int32),
            ("right_tokens", (12,), np.int32),
            ("negative_tokens", (1, 12), np.int32),
            ("negative_mask", (1,), bool),
        )
    }
    batch = partitioner.put_batch(batch)
    compiled = trainer.train_step.lower(state, batch).compile()
    return trainer, compiled, host_state


class Hooked:
    """A train step that calls ``hook(state, run)``, instead of being compiled again.

    ``hook`` may end the run, or change the state or what the step returns.
    """

    def __init__(self, compiled, hook):
        self._run = compiled
        self._hook = hook
        self.lowered = 0

    def lower(self, *_):
        self.lowered += 1
        return self

    def compile(self):
        return self

    def __call__(self, state, batch):
        if self._hook is None:
            return self._run(state, batch)
        return self._hook(state, lambda state: self._run(state, batch))


def trainer_with(hook=None):
    """Returns a ``trainer_cls`` whose steps are those of ``base_trainer``."""

    def make(model, partitioner):
        assert model is MODEL
        trainer, compiled, first = base_trainer()
        trainer = copy.copy(trainer)
        trainer.train_step = Hooked(compiled, hook)

        def init_state(seed):
            assert seed == 0
            rng = jax.random.wrap_key_data(first.rng)
            return jax.device_put(first.replace(rng=rng), trainer.state_shardings)

        trainer.init_state = init_state
        return trainer

    return make


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The training pairs, with a cache of their own."""
    return datasets.DatasetConfig(
        synthetic.task(num_triples=ROWS),
        LENGTHS,
        batch_size=BATCH,
        num_negatives=1,
        cache_dir=str(tmp_path_factory.mktemp("tokens")),
    )


def run(model_dir, data, hook=None, **kwargs):
    checkpoint = kwargs.pop("checkpoint", {})
    arguments = {
        "model": MODEL,
        "train_dataset_cfg": data,
        "checkpoint_cfg": checkpoints.CheckpointConfig(
            **{"save_period": SAVE_PERIOD, "keep": None, **checkpoint}
        ),
        "partitioner": base_trainer()[0].partitioner,
        "trainer_cls": trainer_with(hook),
        "model_dir": str(model_dir),
        "total_steps": STEPS,
        "stats_period": 1,
    }
    return train_lib.train(**(arguments | kwargs))


def lines_of(model_dir):
    text = (pathlib.Path(model_dir) / metrics_file.NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


def sequence(model_dir):
    """Returns (step, checksum of its row ids, loss) for each line."""
    return [
        (line["step"], line["train/rows_crc32"], line["train/loss"])
        for line in lines_of(model_dir)
        if "train/loss" in line
    ]


def params_of(model_dir, step=None):
    params, found = checkpoints.load_params(str(model_dir), step)
    return jax.tree.map(np.asarray, params), found


def assert_same_bits(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    """The folder of twelve steps in one go."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, data)
    return folder


class KilledError(Exception):
    """What ends a run in these tests."""


def before_step(number, action):
    """Returns a hook that acts when ``number - 1`` updates are done."""

    def hook(state, step):
        if int(state.step) + 1 == number:
            state = action(state) or state
        return step(state)

    return hook


def die(state):
    raise KilledError


# --- in one go ------------------------------------------------------------------------


def test_rows_are_those_of_the_order_by_step(straight, data):
    examples = datasets.load_examples(data)
    batches = datasets.make_batches(data, examples)
    assert batches.steps_per_epoch == 5
    ids = [batches.batch(step)[1] for step in range(STEPS)]
    expected = [(i + 1, zlib.crc32(rows.tobytes())) for i, rows in enumerate(ids)]
    assert [line[:2] for line in sequence(straight)] == expected
    for epoch in (ids[:5], ids[5:10]):
        assert sorted(np.concatenate(epoch)) == list(range(ROWS))
    assert not np.array_equal(ids[0], ids[5])


def test_learning_rate_in_the_log_is_that_of_the_update(straight):
    rates = [line["train/learning_rate"] for line in lines_of(straight)]
    expected = [float(MODEL.optimizer.learning_rate(step)) for step in range(STEPS)]
    assert rates == expected
    assert rates[0] == pytest.approx(0.05) and rates[-1] < 0.03


def test_training_learns(straight):
    losses_by_step = [loss for _, _, loss in sequence(straight)]
    assert np.mean(losses_by_step[-3:]) < np.mean(losses_by_step[:3]) - 0.1


def test_the_folder_has_what_use_and_resuming_need(straight):
    steps_saved = sorted(int(p.name) for p in (straight / "checkpoints").iterdir())
    assert steps_saved == [0, 5, 10, 12]
    description = checkpoints.read_description(str(straight))
    assert description.encoder == MODEL.encoder
    assert description.max_length == 12
    first, _ = params_of(straight, 0)
    assert_same_bits(first, base_trainer()[2].params)


# --- interrupted ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [
        6,
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(9, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_died_goes_on_as_if_it_had_not(tmp_path, data, straight, at):
    # At 4 only the first weights are saved; at 6 step 5, an epoch's end, just was.
    with pytest.raises(KilledError):
        run(tmp_path, data, before_step(at, die))
    assert len(sequence(tmp_path)) == at - 1
    run(tmp_path, data)
    assert sequence(tmp_path) == sequence(straight)
    assert_same_bits(params_of(tmp_path), params_of(straight))


def test_sigterm_saves_and_leaves(tmp_path, data, straight, caplog):
    with pytest.raises(train_lib.Preempted) as left:
        run(tmp_path, data, before_step(8, lambda _: os.kill(os.getpid(), 15)))
    assert left.value.code == 143 and left.value.step == 8
    assert params_of(tmp_path)[1] == 8
    assert "Step 8 is saved" in caplog.text
    resumed = []
    run(
        tmp_path,
        data,
        lambda state, step: resumed.append(int(state.step)) or step(state),
    )
    assert resumed == [8, 9, 10, 11]
    assert sequence(tmp_path) == sequence(straight)
    assert_same_bits(params_of(tmp_path), params_of(straight))


def test_sigterm_handler_is_put_back(tmp_path, data):
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, data, total_steps=0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path, data, straight):
    run(tmp_path, data, total_steps=5)
    run(tmp_path, data, total_steps=STEPS)
    assert sequence(tmp_path) == sequence(straight)
    assert_same_bits(params_of(tmp_path), params_of(straight))


@pytest.mark.slow
def test_a_packed_run_that_died_goes_on_as_if_it_had_not(tmp_path, data):
    packed = dataclasses.replace(data, packed_length=24)

    def dying(model, partitioner):
        trainer = steps.Trainer(model, partitioner)
        step = trainer.train_step
        count = iter(range(STEPS))

        def lower(*arguments):
            compiled = step.lower(*arguments).compile()

            def run_or_die(*arguments):
                if next(count) == 6:
                    raise KilledError
                return compiled(*arguments)

            return types.SimpleNamespace(compile=lambda: run_or_die)

        trainer.train_step = types.SimpleNamespace(lower=lower)
        return trainer

    run(tmp_path / "straight", packed, trainer_cls=steps.Trainer)
    with pytest.raises(KilledError):
        run(tmp_path / "killed", packed, trainer_cls=dying)
    run(tmp_path / "killed", packed, trainer_cls=steps.Trainer)
    assert sequence(tmp_path / "killed") == sequence(tmp_path / "straight")
    assert_same_bits(params_of(tmp_path / "killed"), params_of(tmp_path / "straight"))
    # The rows of each step are those of the padded order.
    examples = datasets.load_examples(data)
    padded = datasets.make_batches(data, examples)
    batches = datasets.make_batches(packed, examples, num_shards=2)
    for step, (_, crc, _) in enumerate(sequence(tmp_path / "straight")):
        rows = batches.batch(step)[1]
        assert crc == zlib.crc32(rows.tobytes())
        np.testing.assert_array_equal(np.sort(rows), np.sort(padded.batch(step)[1]))


# --- what is traced -------------------------------------------------------------------


def test_some_steps_are_traced(tmp_path, data):
    run(tmp_path, data, total_steps=4, profile_steps=(2, 3))
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    text = trace.read_bytes()
    assert b"step_num" in text
    with pytest.raises(ValueError, match=r"profile_steps: got \(3, 2\), expected the"):
        run(tmp_path, data, profile_steps=(3, 2))


def test_compiled_programs_are_kept(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        train_lib.keep_compiled(str(tmp_path / "compiled"))
        big = jax.jit(
            lambda x: functools.reduce(lambda y, _: jnp.sin(y @ y), range(60), x)
        )
        big(jnp.ones((4, 4))).block_until_ready()
        assert list((tmp_path / "compiled").iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


# --- what ends a run ------------------------------------------------------------------


def test_nan_stops_with_its_step_and_keeps_the_last_checkpoint(
    tmp_path, data, straight
):
    def poison(state):
        with jax.transfer_guard("allow"):
            table = state.params["token_embedder"]["embedding"] * jnp.nan
        params = state.params | {"token_embedder": {"embedding": table}}
        return state.replace(params=params)

    # Reported at step 10 only, and step 7 is named.
    with pytest.raises(reporting.NonFiniteError, match=r"^Step 7: loss is nan"):
        run(tmp_path, data, before_step(7, poison), stats_period=20)
    params, step = params_of(tmp_path)
    assert step == 5
    assert_same_bits(params, params_of(straight, 5)[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_fewer_steps_than_there_are_is_an_error(data, straight):
    with pytest.raises(ValueError, match=r"total_steps is 11, but .* has 12 steps"):
        run(straight, data, total_steps=11)
    with pytest.raises(ValueError, match=r"total_steps is -1"):
        run(straight, data, total_steps=-1)


def test_no_steps_left_is_said(data, straight, caplog):
    before = params_of(straight)
    state = run(straight, data)
    assert "has all 12 steps already" in caplog.text
    assert int(state.step) == STEPS
    assert_same_bits(params_of(straight), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "batch_size was 8, now 4"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"num_negatives": 0}, "num_negatives was 1, now 0"),
    ],
)
def test_other_data_on_resuming_is_an_error(data, straight, change, message):
    changed = dataclasses.replace(data, **change)
    with pytest.raises(
        ValueError, match=rf"trained on other data: {message}\..*model_"
    ):
        run(straight, changed, total_steps=20)


def test_a_refused_run_changes_nothing(data, straight):
    def files():
        paths = sorted(path for path in straight.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths}

    before, written = files(), []
    longer = dict.fromkeys(LENGTHS, 2 * max(LENGTHS.values()))
    changed = dataclasses.replace(data, seed=1, task_feature_lengths=longer)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        run(straight, changed, total_steps=20, summarize_config_fn=written.append)
    # Not even the config and the text length; nor is a step compiled for nothing.
    assert files() == before and not written


@pytest.mark.parametrize("name", ["eval_period", "stats_period"])
def test_periods_must_be_positive(tmp_path, data, name):
    with pytest.raises(ValueError, match=rf"train\.{name}: got 0"):
        run(tmp_path, data, **{name: 0})


def test_a_batch_that_does_not_fit_the_mesh_fails_first(tmp_path, data):
    # Before the data is looked at: this task has no rows at all.
    changed = dataclasses.replace(
        data, batch_size=7, mixture_or_task_name="no_such_task"
    )
    with pytest.raises(ValueError, match=r"7 pairs .*2 devices.* use 6 or 8"):
        run(tmp_path, changed)
    assert not list(tmp_path.iterdir())


# --- given weights --------------------------------------------------------------------


def test_given_weights_start_at_step_0_with_a_fresh_optimizer(
    tmp_path, data, straight, caplog
):
    seen = []

    def hook(state, step):
        if not seen:
            seen.append(jax.device_get(state.replace(rng=None)))
        return step(state)

    caplog.set_level(logging.INFO, logger="sentence_t5")
    run(tmp_path, data, hook, total_steps=1, checkpoint={"restore_path": str(straight)})
    assert "step 0, fresh optimizer" in caplog.text
    (state,) = seen
    source, step = params_of(straight)
    assert step == STEPS and int(state.step) == 0
    assert_same_bits(state.params, source)
    assert_same_bits(state.opt_state, base_trainer()[2].opt_state)
    (line,) = lines_of(tmp_path)
    assert line["step"] == 1
    assert line["train/learning_rate"] == pytest.approx(0.05)
    assert_same_bits(params_of(tmp_path, 0)[0], source)


def test_weights_for_another_vocabulary_are_refused(tmp_path, data, straight):
    other = tmp_path / "other"
    shutil.copytree(straight, other)
    (other / "encoder.json").unlink()
    ours = checkpoints.read_description(straight).tokenizer
    proto = sentencepiece_model_pb2.ModelProto.FromString(ours.model_bytes)
    proto.pieces[50].piece = "another"
    renamed = tokenizer.Tokenizer(proto.SerializeToString(), ours.extra_ids)
    checkpoints.write_description(other, MODEL.encoder, renamed, 12)
    refused = r"other are for another vocabulary: id 50 is 'another' there and '.*' in"
    with pytest.raises(ValueError, match=refused):
        run(tmp_path / "run", data, checkpoint={"restore_path": str(other)})
    # Nor is anything tokenized or left behind. Without the table, ids don't matter.
    nowhere = str(tmp_path / "nowhere")
    unread = dataclasses.replace(data, cache_dir=str(tmp_path / "tokens"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(tmp_path / "run", unread, checkpoint={"restore_path": nowhere})
    assert not (tmp_path / "tokens").exists()
    assert not (tmp_path / "run").exists()
    pretrained.check_vocabulary(other, ours, ignore=["token_embedder/.*"])
    with pytest.raises(ValueError, match=r"pattern '\*' is no regular expression"):
        pretrained.check_vocabulary(other, ours, ignore=["*"])


def test_a_resumed_run_does_not_go_back_to_the_given_weights(tmp_path, data, straight):
    given = {"restore_path": str(straight)}
    run(tmp_path, data, total_steps=2, checkpoint=given)
    resumed = []
    run(
        tmp_path,
        data,
        lambda state, step: resumed.append(int(state.step)) or step(state),
        total_steps=3,
        checkpoint=given,
    )
    assert resumed == [2]


# --- evaluation within a run ----------------------------------------------------------


def test_evaluation_comes_at_its_period_before_the_checkpoint(tmp_path, data):
    judged = datasets.DatasetConfig(
        synthetic.sts_task(num_pairs=10), LENGTHS, split="validation", batch_size=4,
        shuffle=False, cache_dir=data.cache_dir,
    )  # fmt: skip
    held_out = dataclasses.replace(
        data, split="validation", batch_size=4, num_negatives=0, shuffle=False
    )
    held_out = dataclasses.replace(
        held_out, mixture_or_task_name=synthetic.task(num_triples=200)
    )
    run(
        tmp_path, data, total_steps=7, stats_period=100, eval_period=4,
        infer_eval_dataset_cfg=judged, train_eval_dataset_cfg=held_out,
        checkpoint={
            "keep": 1, "keep_best": 1, "best_metric": "sts/synthetic_sts/spearman",
        },
    )  # fmt: skip
    lines = lines_of(tmp_path)
    scored = {
        line["step"]: line for line in lines if "sts/synthetic_sts/spearman" in line
    }
    assert list(scored) == [0, 4, 7]
    for line in scored.values():
        assert -100 <= line["sts/synthetic_sts/spearman"] <= 100
        # Ten held-out pairs in batches of 4, 4 and 2, each row counted once.
        negatives = line["eval/synthetic/negatives_per_query"]
        assert negatives == pytest.approx((4 * 3 + 4 * 3 + 2 * 1) / 10)
        assert 0 < line["eval/synthetic/loss"] < 50
    assert scored[0]["eval/synthetic/loss"] != scored[7]["eval/synthetic/loss"]
    reports = [line["step"] for line in lines if "train/loss" in line]
    assert reports == [4, 5, 7]


def test_what_cannot_be_evaluated_is_said_before_training(tmp_path, data):
    with pytest.raises(ValueError, match="'synthetic' has no scores"):
        run(tmp_path, data, infer_eval_dataset_cfg=data)
    tasks = [synthetic.task(num_triples=ROWS, name=name) for name in ("one", "two")]
    mixture = seqio.Mixture("mixed", [(task, 1.0) for task in tasks])
    mixed = dataclasses.replace(data, mixture_or_task_name=mixture)
    for evaluation in ("train_eval_dataset_cfg", "infer_eval_dataset_cfg"):
        with pytest.raises(ValueError, match="A mixture cannot be evaluated"):
            run(tmp_path, data, **{evaluation: mixed})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("batch_size", [4, 8, 12, 16])
def test_correlation_does_not_depend_on_the_batch(data, batch_size):
    from sentence_t5.evals import in_training

    def correlate(batch_size):
        config = datasets.DatasetConfig(
            synthetic.sts_task(num_pairs=10), LENGTHS, split="validation",
            batch_size=batch_size, shuffle=False, cache_dir=data.cache_dir,
        )  # fmt: skip
        trainer, _, first = base_trainer()
        params = jax.device_put(first.params, trainer.state_shardings.params)
        return in_training.StsEvaluator(trainer, config)(params)

    ours, theirs = correlate(batch_size), correlate(4)
    assert ours.keys() == {
        "sts/synthetic_sts/spearman",
        "sts/synthetic_sts/pearson",
    }
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], abs=1e-4)


# --- what the loop moves --------------------------------------------------------------

STATS_PERIOD = 4


class Unread:
    """A metric on the device that may only be read at a log step."""

    def __init__(self, value, loop):
        self._value = value
        self._loop = loop

    def _check(self):
        if self._loop["step"] % STATS_PERIOD:
            raise AssertionError(f"a metric was read after step {self._loop['step']}")
        self._loop["reads"] += 1

    def __array__(self, *args, **kwargs):
        self._check()
        return np.asarray(self._value)

    def __float__(self):
        return float(self.__array__())

    def copy_to_host_async(self):
        self._check()


@pytest.fixture
def guarded():
    """A hook under which, between log steps, nothing may move but batches."""
    loop = {"step": 0, "reads": 0}

    def hook(state, step):
        jax.config.update("jax_transfer_guard_host_to_device", "allow")
        state, values = step(state)
        loop["step"] += 1
        if loop["step"] % STATS_PERIOD:
            jax.config.update("jax_transfer_guard_host_to_device", "disallow")
        return state, {name: Unread(value, loop) for name, value in values.items()}

    hook.loop = loop
    yield hook
    jax.config.update("jax_transfer_guard_host_to_device", "allow")


def run_guarded(tmp_path, data, hook):
    run(
        tmp_path, data, hook, total_steps=8, stats_period=STATS_PERIOD,
        checkpoint={"save_period": 8},
    )  # fmt: skip


def test_nothing_moves_between_log_steps(tmp_path, data, straight, guarded):
    run_guarded(tmp_path, data, guarded)
    assert guarded.loop["step"] == 8
    assert guarded.loop["reads"] >= 8 * len(reporting._MUST_BE_FINITE)
    assert [line["step"] for line in lines_of(tmp_path)] == [4, 8]
    means = [line["train/loss"] for line in lines_of(tmp_path)]
    by_step = [loss for _, _, loss in sequence(straight)]
    np.testing.assert_allclose(
        means, [np.mean(by_step[:4]), np.mean(by_step[4:8])], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("meddle", "error"),
    [
        (lambda values: float(values["loss"]), "was read after step 1"),
        (lambda values: jax.device_get(values), "was read after step 1"),
        (
            lambda values: jnp.add(np.ones(3, np.float32), 1),
            "Disallowed host-to-device",
        ),
    ],
    ids=["float", "device_get", "host_to_device"],
)
def test_a_loop_that_moves_something_is_noticed(
    tmp_path, data, guarded, monkeypatch, meddle, error
):
    collect = reporting.Reporter.collect

    def meddling(self, step, values, rows):
        meddle(values)
        collect(self, step, values, rows)

    monkeypatch.setattr(reporting.Reporter, "collect", meddling)
    with pytest.raises(Exception, match=error):
        run_guarded(tmp_path, data, guarded)
    assert guarded.loop["step"] == 1


def test_batches_left_on_the_host_are_refused(tmp_path, data):
    class Lazy(partitioning.Partitioner):
        def put_batch(self, batch):
            return batch

    lazy = Lazy(partitioning.MeshConfig(1, 2, 1), jax.devices()[:2])
    with pytest.raises(Exception, match="Disallowed host-to-device"):
        run(tmp_path, data, partitioner=lazy)


def test_the_step_is_compiled_once(tmp_path, data):
    made = []

    def trainer_cls(model, partitioner):
        made.append(trainer_with()(model, partitioner))
        return made[-1]

    run(tmp_path, data, trainer_cls=trainer_cls, total_steps=6)
    assert [trainer.train_step.lowered for trainer in made] == [1]


def test_the_step_is_compiled_while_the_state_is_made(tmp_path, data):
    compiling = threading.Event()

    def trainer_cls(model, partitioner):
        trainer = trainer_with()(model, partitioner)
        lower, init_state = trainer.train_step.lower, trainer.init_state

        def noted(*args):
            compiling.set()
            return lower(*args)

        def waiting(seed):
            assert compiling.wait(60), "the step is compiled after the state is made"
            return init_state(seed)

        trainer.train_step.lower = noted
        trainer.init_state = waiting
        return trainer

    run(tmp_path, data, trainer_cls=trainer_cls, total_steps=1)


# --- the command line, killed for real ------------------------------------------------

# Becomes a module that a gin file names: ends the process in front of a step.
_INTERRUPT = """
import os
from sentence_t5 import steps

def trainer(model, partitioner, at=0, signum=0):
    made = steps.Trainer(model, partitioner)
    jitted = made.train_step

    class Step:
        def lower(self, state, batch):
            self.lowered = jitted.lower(state, batch)
            return self

        def compile(self):
            self.compiled = self.lowered.compile()
            return self

        def __call__(self, state, batch):
            if int(state.step) + 1 == at:
                os.kill(os.getpid(), signum)
            return self.compiled(state, batch)

    made.train_step = Step()
    return made
"""
_INTERRUPT_GIN = """
from __gin__ import dynamic_registration
from sentence_t5 import engine
import interrupt

engine.train.trainer_cls = @interrupt.trainer
interrupt.trainer.at = {at}
interrupt.trainer.signum = {signum}
"""
_FLAGS = (
    "--gin_file=gin/st5_tiny_mean.gin",
    f"--train_steps={STEPS}",
    f"--batch_size={BATCH}",
    f"--save_period={SAVE_PERIOD}",
    "--max_length=12",
    "--gin.STATS_PERIOD=1",
    "--gin.EVAL_BATCH_SIZE=8",
    f"--gin.synthetic.task.num_triples={ROWS}",
    "--gin.synthetic.sts_task.num_pairs=16",
    "--gin.config.T5Config.dropout_rate=0.1",
    "--gin.engine.checkpoints.keep=None",
)


def command_line(folder, model_dir, *flags, at=None, signum=0):
    """Runs training in a process of its own, from another folder."""
    argv = [sys.executable, "-m", "sentence_t5.train", *_FLAGS]
    argv += [f"--model_dir={model_dir}", *flags]
    if at is not None:
        (folder / "interrupt.py").write_text(_INTERRUPT)
        gin_file = folder / "interrupt.gin"
        gin_file.write_text(_INTERRUPT_GIN.format(at=at, signum=int(signum)))
        argv.append(f"--gin_file={gin_file}")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "SENTENCE_T5_CACHE": str(folder / "tokens"),
    }
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.entry
def test_killed_runs_end_in_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = command_line(tmp_path, whole)
    assert done.returncode == 0, done.stderr
    # Before the first checkpoint; while step 5, an epoch's end, is being written; at a
    # checkpoint's eve, with a save; then to the end.
    for at, signum, code in (
        (4, signal.SIGKILL, -signal.SIGKILL),
        (6, signal.SIGKILL, -signal.SIGKILL),
        (9, signal.SIGTERM, 143),
    ):
        ended = command_line(tmp_path, killed, at=at, signum=signum)
        assert ended.returncode == code, ended.stderr
    assert "Step 9 is saved; leaving on SIGTERM." in ended.stderr
    done = command_line(tmp_path, killed)
    assert done.returncode == 0, done.stderr
    assert "Resuming all state from step 9." in done.stderr
    assert sequence(killed) == sequence(whole)
    assert [line[0] for line in sequence(whole)] == list(range(1, STEPS + 1))
    assert_same_bits(params_of(killed), params_of(whole))
    assert params_of(whole)[1] == STEPS
    assert (killed / "config.gin").exists()


@pytest.mark.slow
@pytest.mark.entry
def test_a_learning_rate_out_of_bounds_stops_the_command(tmp_path):
    ended = command_line(tmp_path, tmp_path / "run", "--learning_rate=1e30")
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "train: error: Step " in last and "last checkpoint is good" in last
    params, step = params_of(tmp_path / "run")
    assert step == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
