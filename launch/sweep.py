r"""Trains one model per combination of gin axes, and puts their scores into one table.

    python launch/sweep.py --out=/tmp/sweep --sizes=tiny,small --poolings=mean,first \
        --gin_file=gin/runs/synthetic.gin --axis=learning_rate=0.001,0.01 \
        --train_steps=200

Each run is `python -m sentence_t5.train` in a process and a folder of its own. Given
again, the same command goes on where it was: what has all its steps on disk is skipped.
`--dry_run` prints the commands instead, for both engines; `--table` only reads what is
there.
"""

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent import futures

import sweep_plan
import sweep_table
from etils import epath

TRAIN = (sys.executable, "-m", "sentence_t5.train")

_USAGE_ERROR = 2
_SIGNALLED = 128
_TABLE = "table"
_ENGINES = ("sentence_t5", "t5x")


class SweepError(Exception):
    """A mistake that ends the sweep; the message says what to do."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; what is not the sweep's own is kept for training."""
    parser = argparse.ArgumentParser(
        prog="launch/sweep.py",
        description="Trains one model per combination of axes; ends in one table.",
        epilog="All other flags go to every run: see `sentence-t5 train --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", required=True, help="folder of the sweep")
    parser.add_argument(
        "--sizes", default="", help="files of gin/sizes, between commas"
    )
    parser.add_argument(
        "--poolings", default="", help="files of gin/pooling, between commas"
    )
    parser.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE",
        help="for every run: one that says what to run is what sizes and poolings are "
        "put on; else it is read after gin/st5_<size>_<pooling>.gin",
    )  # fmt: skip
    parser.add_argument(
        "--axis", action="append", default=[], metavar="NAME=V1,V2",
        help="a further axis: a flag of train, gin_file, or a gin macro or parameter "
        "(values in gin's syntax)",
    )  # fmt: skip
    parser.add_argument(
        "--dry_run", action="store_true", help="print each run's command, run nothing"
    )
    parser.add_argument(
        "--engine", choices=_ENGINES, help="print this engine's commands only"
    )
    parser.add_argument(
        "--table", action="store_true", help="read what is on disk, run nothing"
    )
    flags, flags.more = parser.parse_known_args(argv)
    if flags.engine and not flags.dry_run:
        parser.error("--engine chooses what --dry_run prints; here runs sentence_t5.")
    return flags


def make_plan(flags: argparse.Namespace) -> list[sweep_plan.Run]:
    """Plans in a process of its own, so that this one keeps no devices and no threads.

    Raises:
        SweepError: a name or value is wrong.
    """
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(plan, flags).result()
        except ValueError as error:
            raise SweepError(str(error)) from None


def plan(flags: argparse.Namespace) -> list[sweep_plan.Run]:
    """Returns the sweep's runs; see ``sweep_plan.plan``."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return sweep_plan.plan(
        sizes=[word for word in flags.sizes.split(",") if word],
        poolings=[word for word in flags.poolings.split(",") if word],
        axes=[sweep_plan.parse_axis(text) for text in flags.axis],
        gin_file=flags.gin_file,
        more=flags.more,
        out=flags.out,
    )


def print_commands(runs: Sequence[sweep_plan.Run], engines: Sequence[str]) -> None:
    """Prints every run's commands as a shell script."""
    for engine in engines:
        print(f"# {engine}: {len(runs)} runs, from the root of the checkout")
        for run in runs:
            print(
                f"# {run.name}: {run.num_params:,} parameters, {run.total_steps} steps"
            )
            print(run.t5x_command() if engine == "t5x" else run.command())


class Sweep:
    """Runs what is not done yet, one after another, and keeps the table up to date."""

    def __init__(self, runs: Sequence[sweep_plan.Run], out: str):
        """Nothing is read or started yet.

        Args:
            runs: what to run.
            out: folder of the sweep.
        """
        self.runs = runs
        self.failures: dict[str, str] = {}
        self._out = epath.Path(out)
        self._lock = -1
        self._child: subprocess.Popen | None = None
        self._signal: int | None = None

    def read(self) -> list[sweep_table.Progress]:
        """Returns what is on disk of each run."""
        return [sweep_table.read_progress(run.model_dir) for run in self.runs]

    def check_settings(self) -> None:
        """Refuses folders whose checkpoints were made with other settings.

        Raises:
            SweepError: naming the run and what was changed.
        """
        for run, found in zip(self.runs, self.read(), strict=True):
            changed = found.step is not None and _changed(run, found.config)
            if changed:
                raise SweepError(
                    f"{run.model_dir} holds {found.step} steps made with other "
                    f"settings: {'; '.join(changed)}. Use another --out, or remove "
                    "that folder."
                )

    def run(self) -> int:
        """Trains each run that is not done.

        Waits first for other sweeps of this folder, and for a run that a killed one
        left behind.

        Returns:
            0 if all have their steps, 1 if some failed, 128 + N after signal N.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        with open(self._out / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f"Waiting for another sweep in {self._out}.", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._lock = lock.fileno()
            return self._run()

    def _run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self.check_settings()
        for index, run in enumerate(self.runs):
            if self._signal is not None:
                break
            label = f"[{index + 1}/{len(self.runs)}] {run.name}"
            if (step := self._step(run)) == run.total_steps:
                print(f"{label}: done before, skipped", flush=True)
                continue
            more = f" from step {step}" if step else ""
            log = pathlib.Path(f"{run.model_dir}.log")
            print(f"{label}: training{more}, log in {log}", flush=True)
            began = time.monotonic()
            code = self._train(run, log)
            seconds = f"{time.monotonic() - began:.0f} s"
            if self._signal is not None:
                step = self._step(run)
                print(f"{label}: stopped, step {step or 0} is saved", flush=True)
            elif code == 0 and self._step(run) == run.total_steps:
                print(f"{label}: done in {seconds}", flush=True)
            else:
                self.failures[run.name] = f"failed ({code})"
                print(
                    f"{label}: FAILED with exit code {code} after {seconds}; the "
                    f"others go on. The last lines of {log}:\n{tail(log)}",
                    flush=True,
                )
            self.write_table()
        print(self.write_table(), flush=True)
        if self._signal is not None:
            return _SIGNALLED + self._signal
        return 1 if self.failures else 0

    def write_table(self) -> str:
        """Writes table.csv and table.md; returns the latter's text."""
        rows = sweep_table.make_rows(self.runs, self.read(), self.failures)
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / f"{_TABLE}.csv").write_text(sweep_table.to_csv(rows))
        text = sweep_table.to_markdown(rows)
        (self._out / f"{_TABLE}.md").write_text(text)
        return text

    def _step(self, run: sweep_plan.Run) -> int | None:
        return sweep_table.read_progress(run.model_dir).step

    def _train(self, run: sweep_plan.Run, log: pathlib.Path) -> int:
        """Runs one training process to its end."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [*TRAIN, *run.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the sweep, which lets the run save.
                start_new_session=True,
                preexec_fn=end_with_parent,
                # The lock is held until both are gone.
                pass_fds=(self._lock,),
            )
            code = self._child.wait()
        self._child = None
        return code

    def _on_signal(self, number: int, frame) -> None:
        """Lets the run save and stop; a second signal does not let it."""
        again = self._signal is not None
        self._signal = number
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL if again else signal.SIGTERM)


def _changed(run: sweep_plan.Run, config: str | None) -> list[str]:
    """Lists the settings that differ from those of a folder's ``config.gin``."""
    if config is None:
        return []
    before = sweep_plan.read_settings(config)
    # More steps go on from fewer; a setting that only one side has came or went with
    # another version, or with another setting that both have.
    return [
        f"{name} was {before[name]}, now {value}"
        for name, value in run.settings.items()
        if name != "TRAIN_STEPS" and before.get(name, value) != value
    ]


def end_with_parent() -> None:
    """Asks Linux to send this child SIGTERM when the sweep dies, however it dies."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        _LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def tail(log: pathlib.Path, lines: int = 8) -> str:
    """Returns the last lines of a log, indented."""
    text = log.read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in text[-lines:])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints or reads a sweep.

    Args:
        argv: the arguments; the process's by default.

    Returns:
        The exit code: 0, 1 if a run failed, 2 for a mistake in the arguments.
    """
    flags = parse(sys.argv[1:] if argv is None else argv)
    if "://" not in flags.out:
        flags.out = os.path.abspath(os.path.expanduser(flags.out))
    try:
        runs = make_plan(flags)
        if flags.dry_run:
            print_commands(runs, [flags.engine] if flags.engine else _ENGINES)
            return 0
        sweep = Sweep(runs, flags.out)
        if flags.table:
            print(sweep.write_table())
            return 0
        if "://" in flags.out:
            raise SweepError(
                f"--out={flags.out}: runs started here write into a local folder. "
                "--dry_run prints the commands for a pod, --table reads its results."
            )
        return sweep.run()
    except SweepError as error:
        print(f"launch/sweep.py: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
