"""Saving, keeping and restoring checkpoints; descriptions; SIGTERM."""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from sentence_t5 import checkpoint_files, checkpoints
from sentence_t5.checkpoints import CheckpointConfig, Checkpointer

P = jax.sharding.PartitionSpec

# A read that fails leaves the reader's other requests to end in a closed event loop,
# which Python reports from another thread (orbax-checkpoint 0.12.8, 2026-11).
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


TINY = {"w": jnp.zeros(())}


def make_params(value=0.0):
    return {
        "encoder": {
            "layers": {"wi": {"kernel": value + jnp.arange(48.0).reshape(2, 4, 6)}},
            "final_norm": {"scale": value + jnp.ones(8)},
        },
        "projection": {"kernel": value + jnp.arange(16.0).reshape(8, 2)},
    }


def make_train(params, step=0, seed=3):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3))
    return {
        "opt_state": tx.init(params),
        "rng": jax.random.key(seed),
        "step": jnp.int32(step),
    }


def abstract(tree, sharding=None):
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def save(checkpointer, step, value=None, **kwargs):
    params = make_params(float(step) if value is None else value)
    kwargs = {"meta": {"next_step": step}, **kwargs}
    checkpointer.save(step, params=params, train=make_train(params, step), **kwargs)


def save_steps(model_dir, steps, **config):
    """Saves next to nothing, for tests of which folders there are."""
    with Checkpointer(CheckpointConfig(**config), model_dir) as checkpointer:
        for step in steps:
            checkpointer.save(step, params=TINY, train=TINY, meta={})
    return model_dir / "checkpoints"


def restore(model_dir, **config):
    params = make_params()
    with Checkpointer(CheckpointConfig(**config), model_dir) as checkpointer:
        return checkpointer.restore_latest(
            abstract(params), abstract(make_train(params))
        )


def steps_on_disk(root):
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit())


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_restores_every_item_bit_for_bit(tmp_path):
    params = make_params(0.1)
    train = make_train(params, step=7, seed=11)
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        checkpointer.save(7, params=params, train=train, meta={"row": [1, "a"]})
    got_params, got_train, meta, step = restore(tmp_path)
    assert (step, meta) == (7, {"row": [1, "a"]})
    assert_trees_equal(got_params, params)
    assert_trees_equal(got_train["opt_state"], train["opt_state"])
    assert int(got_train["step"]) == 7
    # A typed random key comes back as one, and draws the same numbers.
    assert got_train["rng"].dtype == train["rng"].dtype
    np.testing.assert_array_equal(
        jax.random.normal(got_train["rng"], (3,)), jax.random.normal(train["rng"], (3,))
    )


def test_nothing_saved_restores_nothing(tmp_path):
    assert restore(tmp_path) is None


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    params = {"w": jnp.arange(1_000_000.0)}
    overwrite = jax.jit(lambda w: w * 0 - 7, donate_argnums=0)
    overwrite(jnp.copy(params["w"]))
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        checkpointer.save(1, params=params, train={"s": jnp.zeros(1)}, meta={})
        w = params.pop("w")
        for _ in range(3):
            w = overwrite(w)
        w.block_until_ready()
    saved, _ = checkpoints.load_params(tmp_path)
    np.testing.assert_array_equal(saved["w"], np.arange(1_000_000.0))


def test_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer(CheckpointConfig(), "run") as checkpointer:
        save(checkpointer, 1)
    monkeypatch.chdir("/")
    assert steps_on_disk(tmp_path / "run" / "checkpoints") == [1]


# Keeping.


def test_keeps_the_newest(tmp_path):
    assert steps_on_disk(save_steps(tmp_path, range(1, 6), keep=2)) == [4, 5]
    # A restart with a lower limit shrinks what an earlier run left.
    assert steps_on_disk(save_steps(tmp_path, [6], keep=1)) == [6]


def test_keep_period_adds_to_keep(tmp_path):
    root = save_steps(tmp_path, range(1, 7), keep=1, keep_period=2)
    assert steps_on_disk(root) == [2, 4, 6]


def test_keep_none_keeps_all(tmp_path):
    root = save_steps(tmp_path, range(1, 6), keep=None)
    assert steps_on_disk(root) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_best_checkpoint_survives_a_restart(tmp_path, mode, best):
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: float("nan"), 5: None, 6: 0.5, 7: 0.4}
    config = CheckpointConfig(
        keep=1, keep_best=1, best_metric="spearman", best_mode=mode
    )
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        with Checkpointer(config, tmp_path) as checkpointer:
            for step in steps:
                score = scores[step]
                metrics = None if score is None else {"spearman": score, "other": 1.0}
                checkpointer.save(
                    step, params=TINY, train=TINY, meta={}, metrics=metrics
                )
    assert steps_on_disk(tmp_path / "checkpoints") == [best, 7]


def test_initial_checkpoint_is_never_deleted(tmp_path):
    root = save_steps(tmp_path, [0, 1, 2, 3], keep=1)
    assert steps_on_disk(root) == [0, 3]
    # Nor is the one that the run started from, named in any of its ways.
    for path in (root / "3", root / "3" / "params"):
        save_steps(tmp_path, [max(steps_on_disk(root)) + 1], keep=1, restore_path=path)
        assert 3 in steps_on_disk(root)


def test_old_checkpoints_stay_until_the_new_one_is_committed(tmp_path, monkeypatch):
    root = save_steps(tmp_path, [1], keep=1)
    finalize = ocp.CompositeCheckpointHandler.finalize
    seen = []

    def slow(self, directory):
        time.sleep(0.3)
        seen.append(steps_on_disk(root))
        finalize(self, directory)

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", slow)
    save_steps(tmp_path, [2], keep=1)
    assert seen == [[1]]
    assert steps_on_disk(root) == [2]


# Saving.


def test_should_save_on_multiples_of_the_period(tmp_path):
    with Checkpointer(CheckpointConfig(save_period=5), tmp_path) as checkpointer:
        assert [s for s in range(12) if checkpointer.should_save(s)] == [0, 5, 10]
        save(checkpointer, 5)
        assert not checkpointer.should_save(5)
        assert checkpointer.latest_step() == 5


def test_saving_a_step_that_exists_is_an_error(tmp_path):
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        save(checkpointer, 10)
        for step in (10, 9):
            with pytest.raises(ValueError, match=f"Step {step} can't be saved.*10"):
                save(checkpointer, step, value=5.5)
    params, step = checkpoints.load_params(tmp_path)
    assert step == 10
    assert_trees_equal(params, make_params(10.0))


def test_a_refused_save_is_an_error(tmp_path, monkeypatch):
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        save(checkpointer, 1)
        monkeypatch.setattr(ocp.CheckpointManager, "save", lambda *a, **k: False)
        with pytest.raises(RuntimeError, match=r"checkpoint 2 .*last good one.*step 1"):
            save(checkpointer, 2)


def test_leaving_waits_for_the_commit(tmp_path, monkeypatch, caplog):
    finalize = ocp.CompositeCheckpointHandler.finalize

    def slow(self, directory):
        time.sleep(0.5)
        finalize(self, directory)

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", slow)
    with caplog.at_level(logging.INFO, "sentence_t5"):
        with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
            save(checkpointer, 3)
            assert not (tmp_path / "checkpoints" / "3").exists()
            assert "Committed" not in caplog.text
        assert (tmp_path / "checkpoints" / "3").exists()
    assert "Committed checkpoint 3" in caplog.text


def test_a_failing_writer_is_heard(tmp_path, monkeypatch):
    save_steps(tmp_path, [1], keep=1)

    def broken(self, directory):
        raise OSError("disk full")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", broken)
    checkpointer = Checkpointer(CheckpointConfig(keep=1), tmp_path)
    save(checkpointer, 2)
    with pytest.raises(RuntimeError, match=r"checkpoint 2 .*step 1\): .*disk full"):
        checkpointer.close()
    monkeypatch.undo()
    # The checkpoint before is whole, and the step can be saved by the next run.
    assert checkpoints.load_params(tmp_path)[1] == 1
    assert steps_on_disk(save_steps(tmp_path, [2], keep=1)) == [2]


def test_a_failing_writer_stops_the_next_save(tmp_path, monkeypatch):
    def broken(self, directory):
        raise OSError("disk full")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", broken)
    message = r"checkpoint 1 .*none is saved.*disk full"
    with (
        pytest.raises(RuntimeError, match=message),
        Checkpointer(CheckpointConfig(), tmp_path) as checkpointer,
    ):
        save(checkpointer, 1)
        save(checkpointer, 2)


def test_an_error_in_the_run_is_not_hidden_by_the_writer(tmp_path, monkeypatch):
    def broken(self, directory):
        raise OSError("disk full")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", broken)
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer(CheckpointConfig(), tmp_path) as checkpointer,
    ):
        save(checkpointer, 1)
        raise ZeroDivisionError


def test_metrics_must_hold_the_metric_of_the_rules(tmp_path):
    config = CheckpointConfig(keep_best=1, best_metric="spearman")
    with (
        Checkpointer(config, tmp_path) as checkpointer,
        pytest.raises(ValueError, match="'spearman', but step 1 has accuracy"),
    ):
        save(checkpointer, 1, metrics={"accuracy": 1.0})


# Damage.


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)


def remove_folder(step_dir):
    shutil.rmtree(step_dir)
    step_dir.mkdir()


def remove_marker(step_dir):
    marker = step_dir / "commit_success.txt"
    if not marker.exists():
        pytest.skip("this release of Orbax writes no marker")
    marker.unlink()


def forget_commit(step_dir):
    path = step_dir / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "commit_timestamp_nsecs": None}))


DAMAGE = {
    "empty folder": remove_folder,
    "no commit marker": remove_marker,
    "no time of commit": forget_commit,
    "no step metadata": lambda d: (d / "_CHECKPOINT_METADATA").unlink(),
    "cut step metadata": lambda d: cut(d / "_CHECKPOINT_METADATA"),
    "no params": lambda d: shutil.rmtree(d / "params"),
    "no train": lambda d: shutil.rmtree(d / "train"),
    "cut meta": lambda d: cut(d / "meta" / "metadata"),
    "cut metrics": lambda d: cut(d / "metrics" / "metrics"),
    "empty sharding": lambda d: (d / "params" / "_sharding").write_text(""),
    "cut tree": lambda d: cut(d / "params" / "_METADATA"),
    "no manifest": lambda d: (d / "params" / "manifest.ocdbt").unlink(),
    "cut manifest": lambda d: cut(d / "train" / "manifest.ocdbt"),
    "cut arrays": lambda d: [cut(f) for f in (d / "params" / "d").iterdir()],
    "no arrays": lambda d: [f.unlink() for f in (d / "train" / "d").iterdir()],
}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run with steps 10 and 20, to be copied and damaged."""
    model_dir = tmp_path_factory.mktemp("saved")
    with Checkpointer(CheckpointConfig(best_metric="a"), model_dir) as checkpointer:
        for step in (10, 20):
            save(checkpointer, step, metrics={"a": 1.0})
    return model_dir


@pytest.fixture
def copied_run(saved_run, tmp_path):
    return shutil.copytree(saved_run, tmp_path / "run")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over(copied_run, kind, caplog):
    root = copied_run / "checkpoints"
    DAMAGE[kind](root / "20")
    params, train, meta, step = restore(copied_run)
    assert (step, meta) == (10, {"next_step": 10})
    assert_trees_equal(params, make_params(10.0))
    assert int(train["step"]) == 10
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("Passing over" in text and str(root / "20") in text for text in warnings)
    # What was passed over is out of the way, not gone.
    assert sorted(os.listdir(root)) == ["10", "20.broken"]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(copied_run):
    root = copied_run / "checkpoints"
    DAMAGE["cut arrays"](root / "20")
    params = make_params(21.0)
    with Checkpointer(CheckpointConfig(), copied_run) as checkpointer:
        checkpointer.restore_latest(abstract(params), abstract(make_train(params)))
        assert checkpointer.latest_step() == 10
        save(checkpointer, 20, value=21.0)
    params, _, _, step = restore(copied_run)
    assert step == 20
    assert_trees_equal(params, make_params(21.0))


def test_an_interrupted_save_is_passed_over_and_removed(copied_run, caplog):
    root = copied_run / "checkpoints"
    for name in ("30.orbax-checkpoint-tmp", "40.orbax-checkpoint-tmp-17"):
        (root / name / "params").mkdir(parents=True)
    assert restore(copied_run)[3] == 20
    assert "30.orbax-checkpoint-tmp" in caplog.text
    assert "40.orbax-checkpoint-tmp-17" in caplog.text
    assert sorted(os.listdir(root)) == ["10", "20"]


@pytest.mark.parametrize("kind", ["cut arrays", "empty folder"])
def test_damage_everywhere_is_an_error_that_changes_nothing(copied_run, kind):
    root = copied_run / "checkpoints"
    for step in (10, 20):
        DAMAGE[kind](root / str(step))
    with pytest.raises(ValueError, match=r"No checkpoint in .*can be read.*20.*10"):
        restore(copied_run)
    assert sorted(os.listdir(root)) == ["10", "20"]


def test_trouble_with_the_machine_condemns_no_checkpoint(copied_run, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(ocp.Checkpointer, "restore", out_of_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        restore(copied_run)
    assert steps_on_disk(copied_run / "checkpoints") == [10, 20]


# Another model.


def change(tree, path, leaf):
    """Returns a copy of a nested dict with one leaf replaced, or removed if None."""
    head, *rest = path.split("/", 1)
    copy = dict(tree)
    if rest:
        copy[head] = change(copy[head], rest[0], leaf)
    elif leaf is None:
        del copy[head]
    else:
        copy[head] = leaf
    return copy


@pytest.mark.parametrize(
    ("path", "leaf", "message"),
    [
        (
            "projection/kernel",
            jnp.zeros((8, 3)),
            r"projection/kernel: it has float32 \[8 2\], wanted float32 \[8 3\]",
        ),
        (
            "projection/kernel",
            jnp.zeros((8, 2), jnp.bfloat16),
            r"projection/kernel: it has float32 \[8 2\], wanted bfloat16 \[8 2\]",
        ),
        (
            "projection/bias",
            jnp.zeros(2),
            r"missing in it: projection/bias float32 \[2\]",
        ),
        ("projection/kernel", None, r"not wanted: projection/kernel float32 \[8 2\]"),
    ],
)
def test_another_model_is_an_error_not_passed_over(copied_run, path, leaf, message):
    params = change(make_params(), path, leaf)
    with (
        Checkpointer(CheckpointConfig(), copied_run) as checkpointer,
        pytest.raises(ValueError, match=message) as error,
    ):
        checkpointer.restore_latest(abstract(params), abstract(make_train(params)))
    assert "20/params" in str(error.value)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_params(copied_run, expected=abstract(params))
    assert steps_on_disk(copied_run / "checkpoints") == [10, 20]


def test_a_leaf_deleted_from_the_checkpoint_is_an_error(copied_run):
    params = change(make_params(20.0), "encoder/final_norm/scale", None)
    with Checkpointer(CheckpointConfig(), copied_run) as checkpointer:
        checkpointer.save(30, params=params, train=make_train(make_params()), meta={})
    message = r"30/params.*\n  missing in it: encoder/final_norm/scale float32 \[8\]"
    with pytest.raises(ValueError, match=message):
        restore(copied_run)


def test_another_optimizer_is_an_error(copied_run):
    train = make_train(make_params())
    train["opt_state"] = optax.sgd(1e-3, momentum=0.9).init(make_params())
    with (
        Checkpointer(CheckpointConfig(), copied_run) as checkpointer,
        pytest.raises(ValueError, match=r"20/train.*\n.*opt_state/0/trace"),
    ):
        checkpointer.restore_latest(abstract(make_params()), abstract(train))


# Reading.


def test_every_way_to_name_a_checkpoint(saved_run):
    root = saved_run / "checkpoints"
    for path in (saved_run, root, root / "20", root / "20" / "params", str(saved_run)):
        params, step = checkpoints.load_params(path)
        assert step == 20
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
        assert_trees_equal(params, make_params(20.0))
    params, step = checkpoints.load_params(saved_run, step=10)
    assert step == 10
    assert_trees_equal(params, make_params(10.0))


def test_wrong_names_of_checkpoints(saved_run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No step 15 in .*10, 20"):
        checkpoints.load_params(saved_run, step=15)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        checkpoints.load_params(tmp_path / "nowhere")
    (tmp_path / "notes").mkdir()
    with pytest.raises(FileNotFoundError, match=r"No checkpoint in .*holds: notes"):
        checkpoints.load_params(tmp_path)
    with pytest.raises(ValueError, match="of step 20, but step 10 was asked for"):
        checkpoints.load_params(saved_run / "checkpoints" / "20", step=10)


def test_reading_passes_over_a_broken_newest_unless_it_was_asked_for(
    copied_run, caplog
):
    root = copied_run / "checkpoints"
    (root / "20" / "_CHECKPOINT_METADATA").unlink()
    params, step = checkpoints.load_params(copied_run)
    assert step == 10
    assert_trees_equal(params, make_params(10.0))
    assert str(root / "20") in caplog.text
    with pytest.raises(ValueError, match="20 is not whole: a file is missing"):
        checkpoints.load_params(copied_run, step=20)
    assert steps_on_disk(root) == [10, 20]  # a reader changes nothing


def test_reading_cut_arrays_names_the_checkpoint(copied_run):
    DAMAGE["cut arrays"](copied_run / "checkpoints" / "20")
    with pytest.raises(ValueError, match=r"20/params can't be read: .*OUT_OF_RANGE"):
        checkpoints.load_params(copied_run)


@pytest.mark.parametrize("shape", [(4, 2), (2, 1), (1, 1)])
def test_restores_onto_any_mesh(tmp_path, shape):
    eight = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"))
    few = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(few, ("fsdp", "model"))
    specs = {"kernel": P("fsdp", "model"), "scale": P("fsdp")}

    def shardings(mesh):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jax.sharding.NamedSharding(
                mesh, P(*([None] * (x.ndim - 2)), *specs[path[-1].key])
            ),
            make_params(),
        )

    params = jax.device_put(make_params(1.5), shardings(eight))
    train = {"step": jnp.int32(3)}
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        checkpointer.save(3, params=params, train=train, meta={})
        wanted = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            make_params(),
            shardings(mesh),
        )
        resumed = checkpointer.restore_latest(wanted, abstract(train))[0]
    loaded, _ = checkpoints.load_params(tmp_path, shardings=shardings(mesh))
    for got in (resumed, loaded):
        assert_trees_equal(got, make_params(1.5))
        kernel = got["projection"]["kernel"]
        assert kernel.sharding == jax.sharding.NamedSharding(mesh, P("fsdp", "model"))
        assert kernel.addressable_shards[0].data.shape == (8 // shape[0], 2 // shape[1])


# Config.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_period": 0}, "save_period: got 0"),
        ({"keep": 0}, "keep: got 0"),
        ({"keep_best": 1}, "best_metric None"),
        ({"best_mode": "best"}, "got 'best', expected 'max' or 'min'"),
    ],
)
def test_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**fields)


# SIGTERM.


def test_sigterm_sets_a_flag_and_the_old_handler_returns():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *args: calls.append(args))
    try:
        with checkpoints.PreemptionGuard() as guard:
            assert not guard.reached(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert guard.requested
            assert guard.reached(2)
        assert calls == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(calls) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


TWO_PROCESSES = """
import sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sentence_t5.checkpoints import CheckpointConfig, Checkpointer, PreemptionGuard

address, process_id, model_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process_id)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
rows = np.arange(len(jax.devices()), dtype=np.float32)

def tree(step):
    return {"w": jax.make_array_from_callback(
        rows.shape, sharding, lambda index: (rows + step)[index])}

abstract = {"w": jax.ShapeDtypeStruct(rows.shape, np.float32, sharding=sharding)}
config = CheckpointConfig(save_period=2)
with Checkpointer(config, model_dir) as checkpointer, PreemptionGuard() as guard:
    restored = checkpointer.restore_latest(abstract, abstract)
    start = 0
    if restored is not None:
        start = restored[3]
        for shard in restored[0]["w"].addressable_shards:
            assert (np.asarray(shard.data) == (rows + start)[shard.index]).all()
        print("resumed", start, flush=True)
    for step in range(start + 1, start + 600):
        time.sleep(0.05)
        stop = guard.reached(step)
        if stop or checkpointer.should_save(step):
            checkpointer.save(step, params=tree(step), train=tree(step), meta={})
        if stop:
            break
        print("step", step, flush=True)
print("stopped", step, flush=True)
"""


def run_two_processes(model_dir):
    """Runs both until step 3, sends SIGTERM to the second, returns their output."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(i), str(model_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    try:
        heads = []
        for process in processes:
            lines = []
            while sum(line.startswith("step") for line in lines) < 3:
                line = process.stdout.readline()
                assert line, f"ended early: {lines}"
                lines.append(line)
            heads.append("".join(lines))
        processes[1].send_signal(signal.SIGTERM)
        return [
            head + process.communicate(timeout=120)[0]
            for head, process in zip(heads, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.entry
def test_two_processes_stop_resume_and_pass_over_together(tmp_path):
    first = run_two_processes(tmp_path)
    stops = {output.splitlines()[-1] for output in first}
    assert len(stops) == 1
    last = int(stops.pop().removeprefix("stopped "))
    saved, step = checkpoints.load_params(tmp_path)
    assert step == last
    np.testing.assert_array_equal(saved["w"], np.arange(saved["w"].size) + last)
    # The second time, the newest checkpoint is damaged where only readers notice.
    DAMAGE["cut arrays"](tmp_path / "checkpoints" / str(last))
    before = [s for s in steps_on_disk(tmp_path / "checkpoints") if s != last]
    second = run_two_processes(tmp_path)
    assert [f"resumed {before[-1]}\n" in output for output in second] == [True, True]
    assert len({output.splitlines()[-1] for output in second}) == 1


def test_find_params_reads_metadata_alone(saved_run):
    path, step, passed_over = checkpoint_files.find_params(saved_run)
    assert (path.name, step, passed_over) == ("params", 20, [])
    assert checkpoint_files.list_steps(path.parent.parent) == [10, 20]
