"""The benchmarks run, and what they measure of memory holds. All slow."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parent.parent


def run(name, *flags):
    result = subprocess.run(
        [sys.executable, _ROOT / "benchmarks" / name, *flags],
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1200,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_memory_of_a_chunked_step_hardly_grows_with_the_batch():
    report = run(
        "memory.py", "--gin_file=gin/st5_small_mean.gin", "--max_length=32",
        "--num_negatives=0", "--batch_sizes", "1024", "4096",
        "--gin.engine.trainer.microbatch_size=128",
    )  # fmt: skip
    assert report["ratio"]["1024"] == 1
    assert report["ratio"]["4096"] < 1.1


def test_32768_pairs_make_a_step_under_three_gigabytes():
    report = run(
        "step_time.py", "--gin_file=gin/st5_tiny_mean.gin", "--max_length=32",
        "--num_negatives=0", "--batch_size=32768", "--steps=1", "--warmup=0",
        "--gin.engine.trainer.microbatch_size=256",
        "--gin.losses.LossConfig.block_rows=256",
    )  # fmt: skip
    assert report["pairs"] == 32768
    # The logits alone would be 4.3 GB.
    assert report["peak_mb"] < 3000


def test_a_comparison_takes_turns():
    flags = (
        "--gin_file=gin/st5_tiny_mean.gin", "--num_negatives=0", "--batch_size=8",
        "--steps=2",
    )  # fmt: skip
    other = f"{sys.executable} {_ROOT}/benchmarks/step_time.py {' '.join(flags)}"
    report = run("step_time.py", *flags, f"--compare={other}", "--rounds=2")
    assert len(report["ours_s"]) == len(report["other_s"]) == 2
    assert 0.2 < report["times_as_fast"] < 5
