"""Times a training run from its start to its first step, cold and warm.

    python benchmarks/startup.py --gin_file=gin/st5_small_mean.gin \
        --train_file=pairs.tsv --vocabulary=spiece.model [--rounds=3]

The first start of a round finds no token ids and no compiled programs; the second finds
what the first kept. Each has a model_dir of its own. Other flags are ``train``'s.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

import measuring

_FIRST_STEP = re.compile(r"step 1/")


def seconds_to_first_step(arguments: list[str], cache: str) -> float:
    """Starts a run and ends it when its first step is reported."""
    with tempfile.TemporaryDirectory() as model_dir:
        command = [
            *[sys.executable, "-m", "sentence_t5.train", *arguments],
            f"--model_dir={model_dir}",
            "--gin.engine.train.stats_period=1",
            f"--gin.engine.train.compilation_cache_dir='{cache}/compiled'",
        ]
        environment = os.environ | {"SENTENCE_T5_CACHE": f"{cache}/tokens"}
        began = time.perf_counter()
        run = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        )
        said = []
        for line in run.stderr:
            said.append(line)
            if _FIRST_STEP.search(line):
                took = time.perf_counter() - began
                run.kill()
                run.wait()
                return took
        raise SystemExit(f"The run ended before its first step:\n{''.join(said)}")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    flags, arguments = parser.parse_known_args()
    cold, warm = [], []
    for _ in range(flags.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_to_first_step(arguments, cache))
            warm.append(seconds_to_first_step(arguments, cache))
    cold, warm = measuring.summary(cold), measuring.summary(warm)
    measuring.report(
        "startup",
        arguments=arguments,
        cold=cold,
        warm=warm,
        warm_over_cold=round(warm["median_s"] / cold["median_s"], 3),
    )


if __name__ == "__main__":
    main()
