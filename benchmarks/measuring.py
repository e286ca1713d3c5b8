"""What the benchmarks share: timing, the report, and taking turns with another command.

A benchmark prints one JSON line. With ``--compare=COMMAND`` it and the command run in
turn, several rounds each, in processes of their own; the command, too, prints a JSON
line with ``median_s`` as its last. All these lines are shown as they come, and the
comparison last. Seconds don't travel between machines, ratios do.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_PACKAGES = ("jax", "flax", "optax", "seqio", "orbax-checkpoint", "torch")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every benchmark."""
    parser.add_argument("--compare", metavar="COMMAND", help="run this one in turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each command")


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on beside the code."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def peak_bytes() -> int:
    """Returns the most memory that this process has had, Python and JAX included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_of(run: Callable[[], Any], *, warmup: int, times: int) -> list[float]:
    """Times ``run``, which returns when its work is done."""
    for _ in range(warmup):
        run()
    samples = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Returns median and spread."""
    low = high = samples[0]
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median_s": round(statistics.median(samples), 5),
        "quartiles_s": [round(low, 5), round(high, 5)],
        "runs": len(samples),
    }


def report(benchmark: str, **values: Any) -> None:
    """Prints the one line."""
    print(json.dumps({"benchmark": benchmark, **values, "machine": machine()}))


def compare(other: str, rounds: int) -> None:
    """Runs this benchmark, without ``--compare``, and another command in turn."""
    ours = [sys.executable, *_without_compare(sys.argv)]
    medians = {"ours": [], "other": []}
    for _ in range(rounds):
        for name, command in (("ours", ours), ("other", shlex.split(other))):
            medians[name].append(_last_line(command)["median_s"])
    ratios = [b / a for a, b in zip(*medians.values(), strict=True)]
    report(
        "compare",
        ours=shlex.join(ours[1:]),
        other=other,
        ours_s=medians["ours"],
        other_s=medians["other"],
        times_as_fast=round(statistics.median(ratios), 3),
        each_round=[round(ratio, 3) for ratio in ratios],
    )


def _without_compare(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        if skip or name in ("--compare", "--rounds"):
            skip = not skip and not has_value
            continue
        kept.append(argument)
    return kept


def _last_line(command: Sequence[str]) -> dict[str, Any]:
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)} failed, exit code {result.returncode}")
    print(lines[-1], flush=True)
    return json.loads(lines[-1])
