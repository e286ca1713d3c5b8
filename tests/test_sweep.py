"""Sweeps: which runs there are, what is done again, and the table at the end."""

import csv
import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import gin
import pytest

from sentence_t5 import gin_files, gin_flags, gin_reader

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))

import sweep  # noqa: E402
import sweep_plan  # noqa: E402
import sweep_table  # noqa: E402


@pytest.fixture(autouse=True)
def _clear_gin():
    yield
    gin.clear_config()


def make_plan(**changed):
    lists = ("sizes", "poolings", "axes", "gin_file", "more")
    given = {"out": "/o"} | {name: [] for name in lists}
    return sweep_plan.plan(**given | changed)


def settings_of(arguments) -> dict[str, str]:
    """Reads a command line the way training does."""
    flags = gin_flags.parse_flags(arguments, gin_files.make_parser("train"))
    return sweep_plan.read_settings(gin_files.load(flags).text())


# --- which runs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ("('relu',),('gelu','linear')", ["('relu',)", "('gelu','linear')"]),
        ("'a,b', 'c'", ["'a,b'", "'c'"]),
        ('{"k": [1, 2]},None', ['{"k": [1, 2]}', "None"]),
        ("'it (s',1", ["'it (s'", "1"]),
    ],
)
def test_values_are_split_at_the_outermost_commas(text, values):
    assert sweep_plan.split_values(text) == values


@pytest.mark.parametrize("text", ["", "1,,2", "(1", "1)", "'a", "1,"])
def test_values_that_are_none_are_refused(text):
    with pytest.raises(gin_reader.ConfigError, match="no list of values"):
        sweep_plan.split_values(text)


def test_sizes_and_poolings_name_the_run_files():
    runs = make_plan(
        sizes=["tiny", "small"],
        poolings=["mean", "first", "encdec"],
        more=["--train_steps=7"],
        out="gs://b/sweep/",
    )
    assert [run.name for run in runs] == [
        f"{size}_{pooling}"
        for size in ("tiny", "small")
        for pooling in ("mean", "first", "encdec")
    ]
    last = runs[-1]
    assert last.command() == (
        "python -m sentence_t5.train --gin_file=gin/st5_small_encdec.gin "
        "--model_dir=gs://b/sweep/small_encdec --train_steps=7"
    )
    assert last.t5x_command() == (
        "python3 ${T5X_DIR}/t5x/train.py --gin_file=gin/st5_small_encdec.gin "
        "\"--gin.MODEL_DIR='gs://b/sweep/small_encdec'\" --gin.TRAIN_STEPS=7"
    )
    assert (last.total_steps, last.values) == (
        7,
        {"size": "small", "pooling": "encdec"},
    )
    # The sizes that the README lists, in millions.
    assert last.num_params / 1e6 == pytest.approx(60.90, abs=0.005)
    assert runs[3].num_params / 1e6 == pytest.approx(35.72, abs=0.005)


def test_a_run_of_the_users_gets_sizes_and_poolings_on_top():
    runs = make_plan(
        sizes=["small"],
        poolings=["attention"],
        gin_file=["gin/runs/synthetic.gin"],
        axes=[("gin_file", ["gin/optim/adamw.gin"])],
    )
    (run,) = runs
    assert run.name == "small_attention,adamw"
    assert run.arguments[:4] == tuple(
        f"--gin_file=gin/{name}.gin"
        for name in (
            "runs/synthetic",
            "sizes/small",
            "pooling/attention",
            "optim/adamw",
        )
    )
    assert run.settings["encoder.EncoderConfig.pooling"] == "'attention'"
    assert run.settings["config.T5Config.d_model"] == "512"
    assert run.settings["engine.model.optimizer"] == "@optim.adamw()"


def test_a_file_that_only_changes_a_run_comes_after_it():
    (run,) = make_plan(sizes=["tiny"], gin_file=["gin/optim/adamw.gin"])
    assert run.name == "tiny_mean"
    assert run.arguments[:2] == (
        "--gin_file=gin/st5_tiny_mean.gin",
        "--gin_file=gin/optim/adamw.gin",
    )


def test_axes_are_flags_or_gin_names():
    runs = make_plan(
        gin_file=["gin/st5_tiny_mean.gin"],
        axes=[
            sweep_plan.parse_axis("batch_size=8,16"),
            sweep_plan.parse_axis(
                "T5Config.mlp_activations=('relu',),('gelu','linear')"
            ),
        ],
    )
    assert [run.name for run in runs] == [
        f"batch_size={size},T5Config.mlp_activations=-{name}"
        for size in (8, 16)
        for name in ("relu", "gelu-linear")
    ]
    run = runs[1]
    assert run.settings["BATCH_SIZE"] == "8"
    assert run.settings["config.T5Config.mlp_activations"] == "('gelu', 'linear')"
    assert run.values["batch_size"] == "8"


@pytest.mark.parametrize(
    "more",
    [
        ["--train_steps=3", "--learning_rate=0.01", "--gin.T5Config.dtype='bfloat16'"],
        ["--train_file=a.tsv", "--left=q", "--negatives=n,m"],
        ["--train_file=a.tsv", "--vocabulary=v.model", "--eval_file=s.tsv"],
        ["--gin_bindings=LossConfig.mask_duplicates=True", "--distributed"],
    ],
)
def test_both_commands_mean_the_same(more):
    (run,) = make_plan(
        sizes=["tiny"], axes=[("max_length", ["9"])], gin_file=["gin/optim/adamw.gin"],
        more=more,
    )  # fmt: skip
    assert settings_of(run.t5x_arguments) == settings_of(run.arguments) == run.settings
    script = shlex.split(run.t5x_command())[1:]
    assert script == ["${T5X_DIR}/t5x/train.py", *run.t5x_arguments]
    assert shlex.split(run.command())[3:] == list(run.arguments)
    # T5X knows no other words.
    assert all(word.startswith(("--gin_file=", "--gin.")) for word in run.t5x_arguments)


def test_dry_run_prints_a_script_of_both_engines(capsys, monkeypatch):
    monkeypatch.setattr(sweep, "make_plan", sweep.plan)
    argv = ["--dry_run", "--sizes=tiny", "--poolings=mean,first", "--out=gs://b/s"]
    assert sweep.main([*argv, "--seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# sentence_t5: 2 runs, from the root of the checkout"
    assert lines[1] == "# tiny_mean: 238,016 parameters, 120 steps"
    assert lines[2] == (
        "python -m sentence_t5.train --gin_file=gin/st5_tiny_mean.gin "
        "--model_dir=gs://b/s/tiny_mean --seed=3"
    )
    assert lines[5] == "# t5x: 2 runs, from the root of the checkout"
    assert lines[9] == (
        "python3 ${T5X_DIR}/t5x/train.py --gin_file=gin/st5_tiny_first.gin "
        "\"--gin.MODEL_DIR='gs://b/s/tiny_first'\" --gin.RANDOM_SEED=3"
    )
    assert sweep.main([*argv, "--engine=t5x"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("t5x/train.py") == 2
    assert "sentence_t5.train" not in printed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sizes": ["smal"]},
            "no size 'smal'. Did you mean small? There are base, lar",
        ),
        (
            {"sizes": ["tiny"], "poolings": ["cls"]},
            "There is no pooling 'cls'. There are attention, encdec, first, max, mean.",
        ),
        ({"sizes": ["tiny"], "poolings": ["max"]}, "goes on top of a run's file"),
        ({"poolings": ["mean"]}, "Nothing says what to run: pass --sizes"),
        ({"gin_file": ["gin/optim/adamw.gin"]}, "Nothing says what to run"),
        (
            {"sizes": ["tiny"], "more": ["--model_dir=/a"]},
            "pass --out, not --model_dir",
        ),
        (
            {"sizes": ["tiny"], "more": ["--trian_steps=3"]},
            "Did you mean --train_steps?",
        ),
        (
            {"sizes": ["tiny"], "axes": [("TRAIN_STPES", ["1"])]},
            "nothing uses the macro TRAIN_STPES. Did you mean TRAIN_STEPS?",
        ),
        (
            {
                "sizes": ["tiny"],
                "axes": [("batch_size", ["8", "16"])],
                "more": ["--gin.BATCH_SIZE=4"],
            },
            "tiny_mean,batch_size=8 and tiny_mean,batch_size=16 would be the same run",
        ),
        (
            {
                "sizes": ["tiny"],
                "axes": [("T5Config.dtype", ["'float32'", '"float32"'])],
            },
            "would share the folder tiny_mean,T5Config.dtype=-float32",
        ),
        (
            {"sizes": ["tiny"], "axes": [("seed", ["1"]), ("seed", ["2"])]},
            "Axes given twice: seed",
        ),
        ({"sizes": ["tiny"], "axes": [("batch_size", ["many"])]}, "a whole number"),
    ],
)
def test_mistakes_end_the_sweep_before_it_starts(changed, message):
    with pytest.raises(gin_reader.ConfigError) as error:
        make_plan(**changed)
    assert message in str(error.value)


def test_axis_without_values_is_refused():
    with pytest.raises(gin_reader.ConfigError, match="expected NAME=v1,v2"):
        sweep_plan.parse_axis("batch_size")


def test_settings_are_read_back_from_a_config_file():
    text = (
        "# a comment\nfrom x import y\n\nMODEL_DIR = '/o'\n"
        "A = \\\n    {'k': 1,\n     'l': 2}\nT.b = 3\n"
    )
    assert sweep_plan.read_settings(text) == {"A": "{'k': 1, 'l': 2}", "T.b": "3"}


# --- what is on disk ----------------------------------------------------------------


def write_checkpoint(model_dir: pathlib.Path, step: int) -> None:
    """Writes the small files of a checkpoint, as far as they are looked at."""
    folder = model_dir / "checkpoints" / str(step)
    for item in ("params", "train", "meta"):
        (folder / item).mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    (folder / "params" / "_METADATA").write_text("{}")
    (folder / "train" / "_METADATA").write_text("{}")
    (folder / "meta" / "metadata").write_text("{}")


def make_run(out: pathlib.Path, name: str, *arguments: str, settings=None):
    size, pooling = name.split("_")
    return sweep_plan.Run(
        name=name,
        values={"size": size, "pooling": pooling},
        model_dir=str(out / name),
        arguments=(f"--model_dir={out / name}", *arguments),
        t5x_arguments=(),
        total_steps=8,
        num_params=1234,
        settings=settings or {},
    )


def write_metrics(model_dir: pathlib.Path, *lines: dict) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (model_dir / "metrics.jsonl").write_text(text + '{"step": 9, "tra')


def test_table_has_scores_parameters_and_speed(tmp_path):
    runs = [make_run(tmp_path, f"tiny_{name}") for name in ("mean", "first", "max")]
    write_checkpoint(tmp_path / "tiny_mean", 4)
    write_checkpoint(tmp_path / "tiny_mean", 8)
    write_checkpoint(tmp_path / "tiny_first", 4)
    # Of a save that was cut off.
    write_checkpoint(tmp_path / "tiny_first", 8)
    (tmp_path / "tiny_first" / "checkpoints" / "8" / "params" / "_METADATA").unlink()
    write_metrics(
        tmp_path / "tiny_mean",
        {"step": 0, "sts/a/spearman": 1.0},
        {"step": 2, "train/loss": 3.0, "train/pairs_per_second": 90.0},
        {"step": 4, "train/loss": 2.5, "train/pairs_per_second": 110.0},
        {"step": 8, "train/loss": 2.25, "train/pairs_per_second": 100.4},
        {"step": 8, "sts/a/spearman": 71.239, "eval/b/loss": 2.0},
    )
    write_metrics(
        tmp_path / "tiny_first",
        {"step": 4, "sts/a/spearman": None, "train/pairs_per_second": 0.416},
    )
    progress = [sweep_table.read_progress(run.model_dir) for run in runs]
    assert [found.step for found in progress] == [8, 4, None]
    rows = sweep_table.make_rows(runs, progress, {"tiny_max": "failed (1)"})
    assert list(csv.DictReader(io.StringIO(sweep_table.to_csv(rows)))) == rows
    assert rows[0] == {
        "run": "tiny_mean", "size": "tiny", "pooling": "mean", "state": "done",
        "steps": "8", "parameters": "1234", "pairs/s": "100", "train/loss": "2.2500",
        "sts/a/spearman": "71.24", "eval/b/loss": "2.00",
        "model_dir": str(tmp_path / "tiny_mean"),
    }  # fmt: skip
    assert [row["state"] for row in rows] == ["done", "step 4 of 8", "failed (1)"]
    columns = ("run", "state", "pairs/s", "sts/a/spearman")
    narrow = [{column: row[column] for column in columns} for row in rows]
    assert sweep_table.to_markdown(narrow).splitlines() == [
        "| run        | state       | pairs/s | sts/a/spearman |",
        "| ---------- | ----------- | ------: | -------------- |",
        "| tiny_mean  | done        |     100 | 71.24          |",
        "| tiny_first | step 4 of 8 |    0.42 | undefined      |",
        "| tiny_max   | failed (1)  |         |                |",
    ]


# --- one after another --------------------------------------------------------------

# Trains by writing a checkpoint of step 8, or fails, or waits for SIGTERM and then
# saves step 5; notes that it ran.
STAND_IN = """
import pathlib, signal, sys, time
sys.path.insert(0, {tests!r})
from test_sweep import write_checkpoint
model_dir = pathlib.Path(sys.argv[1].split("=", 1)[1])
with open(model_dir.parent / "ran.txt", "a") as file:
    print(model_dir.name, file=file)
if "--fail" in sys.argv:
    sys.exit("no such data")
if "--hang" in sys.argv and not (model_dir / "checkpoints").exists():
    def save(*_):
        write_checkpoint(model_dir, 5)
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    (model_dir.parent / "hangs").write_text("")
    time.sleep(600)
write_checkpoint(model_dir, 8)
"""
PARENT = """
import pickle, sys
sys.path.insert(0, {launch!r})
import sweep
sweep.TRAIN = (sys.executable, "-c", {stand_in!r})
runs = pickle.load(open(sys.argv[1], "rb"))
try:
    code = sweep.Sweep(runs, sys.argv[2]).run()
except sweep.SweepError as error:
    code = f"error: {{error}}"
sys.exit(code)
"""


def start(out: pathlib.Path, runs) -> subprocess.Popen:
    import pickle

    out.mkdir(exist_ok=True)
    (out / "runs.pickle").write_bytes(pickle.dumps(runs))
    # The stand-in needs only one function of this file.
    tests = out / "stand_in"
    tests.mkdir(exist_ok=True)
    source = pathlib.Path(__file__).read_text()
    function = source[
        source.index("def write_checkpoint") : source.index("def make_run")
    ]
    (tests / "test_sweep.py").write_text(f"import pathlib\n\n\n{function}")
    stand_in = STAND_IN.format(tests=str(tests))
    parent = PARENT.format(launch=str(ROOT / "launch"), stand_in=stand_in)
    return subprocess.Popen(
        [sys.executable, "-c", parent, str(out / "runs.pickle"), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Seconds until a process hangs: starting one may take a minute on a busy machine.
PATIENCE = 300


def finish(process: subprocess.Popen) -> tuple[int, str]:
    printed, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, printed + errors


def ran(out: pathlib.Path) -> list[str]:
    names = (out / "ran.txt").read_text().split()
    (out / "ran.txt").unlink()
    return names


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_failed_run_does_not_lose_the_others(tmp_path):
    runs = [
        make_run(tmp_path, "tiny_mean"),
        make_run(tmp_path, "tiny_first", "--fail"),
        make_run(tmp_path, "tiny_max"),
    ]
    code, printed = finish(start(tmp_path, runs))
    assert code == 1, printed
    assert ran(tmp_path) == ["tiny_mean", "tiny_first", "tiny_max"]
    assert "[2/3] tiny_first: FAILED with exit code 1" in printed
    assert "no such data" in printed  # The end of its log.
    table = (tmp_path / "table.csv").read_text().splitlines()
    assert [line.split(",")[3] for line in table] == [
        "state", "done", "failed (1)", "done",
    ]  # fmt: skip
    assert (tmp_path / "table.md").read_text() in printed
    # Given again, only what failed is tried again.
    runs[1] = make_run(tmp_path, "tiny_first")
    code, printed = finish(start(tmp_path, runs))
    assert (code, ran(tmp_path)) == (0, ["tiny_first"])
    assert "[1/3] tiny_mean: done before, skipped" in printed


def test_sigterm_lets_the_run_save_and_ends_the_sweep(tmp_path):
    runs = [make_run(tmp_path, "tiny_mean", "--hang"), make_run(tmp_path, "tiny_max")]
    process = start(tmp_path, runs)
    wait_for(tmp_path / "hangs")
    process.send_signal(signal.SIGTERM)
    code, printed = finish(process)
    assert code == 128 + signal.SIGTERM, printed
    assert "[1/2] tiny_mean: stopped, step 5 is saved" in printed
    assert ran(tmp_path) == ["tiny_mean"]
    code, printed = finish(start(tmp_path, runs))
    assert code == 0
    assert "[1/2] tiny_mean: training from step 5" in printed
    assert ran(tmp_path) == ["tiny_mean", "tiny_max"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_killed_sweep_leaves_no_run_behind(tmp_path):
    runs = [make_run(tmp_path, "tiny_mean", "--hang")]
    process = start(tmp_path, runs)
    wait_for(tmp_path / "hangs")
    process.kill()
    # The next one waits for the run that is saving; two at a time would spoil it.
    code, printed = finish(start(tmp_path, runs))
    assert code == 0, printed
    assert "training from step 5" in printed
    finish(process)


def test_a_folder_made_with_other_settings_is_refused(tmp_path):
    write_checkpoint(tmp_path / "tiny_mean", 4)
    before = "MODEL_DIR = '/moved'\nTRAIN_STEPS = 4\nBATCH_SIZE = 8\nOLD = 1\n"
    (tmp_path / "tiny_mean" / "config.gin").write_text(before)
    settings = {"TRAIN_STEPS": "8", "BATCH_SIZE": "16", "NEW": "2"}
    code, printed = finish(
        start(tmp_path, [make_run(tmp_path, "tiny_mean", settings=settings)])
    )
    assert code == 1
    assert (
        "holds 4 steps made with other settings: BATCH_SIZE was 8, now 16." in printed
    )
    assert not (tmp_path / "ran.txt").exists()
    # More steps, and settings that only one version knows, are no other run.
    settings["BATCH_SIZE"] = "8"
    code, printed = finish(
        start(tmp_path, [make_run(tmp_path, "tiny_mean", settings=settings)])
    )
    assert (code, ran(tmp_path)) == (0, ["tiny_mean"]), printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out=gs://b/s", "--sizes=tiny"], "--dry_run prints the commands for a pod"),
        (["--out=/o", "--sizes=tiney"], "There is no size 'tiney'. Did you mean tiny?"),
    ],
)
def test_mistakes_exit_with_2(capsys, monkeypatch, argv, message):
    def plan(flags):
        try:
            return sweep.plan(flags)
        except ValueError as error:
            raise sweep.SweepError(str(error)) from None

    monkeypatch.setattr(sweep, "make_plan", plan)
    assert sweep.main(argv) == 2
    assert message in capsys.readouterr().err


# Kills the sweep that started it at step 3 of one run, from inside that run, and waits
# for the SIGTERM that Linux then sends it.
KILLER = """
import os, signal, sys, time
from sentence_t5 import reporting, train
collect = reporting.Reporter.collect
def kill(self, step, *more):
    if step == 3 and any(word.endswith("/tiny_first") for word in sys.argv):
        sweep = os.getppid()
        os.kill(sweep, signal.SIGKILL)
        while os.getppid() == sweep:
            time.sleep(0.01)
        time.sleep(0.1)
    collect(self, step, *more)
reporting.Reporter.collect = kill
sys.exit(train.main(sys.argv[1:]))
"""
KILLED = """
import sys
sys.path.insert(0, {launch!r})
import sweep
sweep.TRAIN = (sys.executable, "-c", {killer!r})
sys.exit(sweep.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.entry
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_two_sizes_and_three_poolings_killed_in_the_middle(tmp_path):
    """The real thing: trains six models, killed by SIGKILL in step 3 of the second."""
    out = tmp_path / "sweep"
    arguments = [
        *[f"--out={out}", "--sizes=tiny,small", "--poolings=mean,first,encdec"],
        *["--gin_file=gin/runs/synthetic.gin", "--gin.synthetic.task.num_triples=400"],
        *["--train_steps=4", "--batch_size=8", "--max_length=16", "--save_period=2"],
        *["--eval_period=4", "--gin.STATS_PERIOD=2", "--gin.T5Config.num_layers=1"],
        "--gin.synthetic.sts_task.num_pairs=100",
    ]
    command = [sys.executable, str(ROOT / "launch" / "sweep.py"), *arguments]
    environment = os.environ | {"SENTENCE_T5_CACHE": str(tmp_path / "cache")}
    killed = KILLED.format(launch=str(ROOT / "launch"), killer=KILLER)
    first = subprocess.run(
        [sys.executable, "-c", killed, *arguments],
        cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert first.returncode == -signal.SIGKILL
    marks = {
        path: path.stat().st_mtime_ns
        for path in (out / "tiny_mean").glob("checkpoints/*/_CHECKPOINT_METADATA")
    }
    assert len(marks) == 3
    second = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 0, second.stderr
    assert "[1/6] tiny_mean: done before, skipped" in second.stdout
    assert "[2/6] tiny_first: training from step 3," in second.stdout
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    rows = list(csv.DictReader(io.StringIO((out / "table.csv").read_text())))
    assert [row["run"] for row in rows] == [
        f"{size}_{pooling}"
        for size in ("tiny", "small")
        for pooling in ("mean", "first", "encdec")
    ]
    for row in rows:
        assert (row["state"], row["steps"]) == ("done", "4")
        assert float(row["pairs/s"]) > 0
        assert -100 <= float(row["sts/synthetic_sts/spearman"]) <= 100
        encoder = json.loads((out / row["run"] / "encoder.json").read_text())["encoder"]
        assert encoder["t5"]["num_layers"] == 1
        assert int(row["parameters"]) > 100_000
    assert len({row["parameters"] for row in rows}) == 4  # mean and first are alike
    third = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert third.returncode == 0
    assert third.stdout.count("done before, skipped") == 6
