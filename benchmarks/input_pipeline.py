"""Times the making of batches, without a model.

    python benchmarks/input_pipeline.py --gin_file=gin/st5_tiny_mean.gin \
        --train_file=pairs.tsv --vocabulary=spiece.model [--batches=200]

``load_s`` is tokenizing the task, or opening what an earlier run kept. Batches are made
by one thread, as in training.
"""

import argparse
import itertools
import sys
import time

import gin
import measuring

from sentence_t5 import datasets, gin_files, gin_flags


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gin_flags.add_flags(parser)
    measuring.add_flags(parser)
    parser.add_argument("--batches", type=int, default=200)
    flags = gin_flags.parse_flags(sys.argv[1:], parser)
    if flags.compare:
        measuring.compare(flags.compare, flags.rounds)
        return
    config = gin_files.load(flags)
    bindings = gin.get_bindings(config.root, resolve_references=False)
    dataset = bindings["train_dataset_cfg"].scoped_configurable_fn()
    began = time.perf_counter()
    examples = datasets.load_examples(dataset)
    batches = datasets.make_batches(dataset, examples)
    load_seconds = time.perf_counter() - began
    steps = itertools.count()
    samples = measuring.seconds_of(
        lambda: batches.batch(next(steps)), warmup=5, times=flags.batches
    )
    took = measuring.summary(samples)
    measuring.report(
        "input_pipeline",
        **took,
        gin_file=flags.gin_file,
        pairs=dataset.batch_size,
        lengths=dict(dataset.task_feature_lengths),
        negatives=dataset.num_negatives,
        rows=len(examples),
        load_s=round(load_seconds, 2),
        pairs_per_s=round(dataset.batch_size / took["median_s"]),
    )


if __name__ == "__main__":
    main()
