"""Times packed training steps against padded ones, on real texts and in turn.

    python benchmarks/packing.py --gin_file=gin/st5_small_mean.gin --batch_size=128 \
        --train_file=triplets.tsv --negatives=negative --vocabulary=spiece.model \
        --max_length=64 --packed_length=64 [--short_length=32] [--steps=5] \
        [--compare='python benchmarks/torch_train.py ...']

``padded`` gives every text ``max_length`` tokens, ``padded_short`` gives the right
sides and negatives ``short_length``. One step of each and a large product are timed in
turn, ``--steps`` times, so that the ratios are of one run. ``median_s`` is the packed
step's.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable

import gin
import jax
import measuring

from sentence_t5 import (
    compile_setup,
    datasets,
    gin_files,
    gin_flags,
    host_memory,
    names,
)

# A large product, the most that the machine does.
_PRODUCT = "product"


def variants(dataset: datasets.DatasetConfig, short: int):
    """Returns the dataset's config for each way to lay out its texts."""
    padded = dataclasses.replace(dataset, packed_length=None)
    lengths = {**dataset.task_feature_lengths, names.TARGETS: short}
    return {
        "packed": dataset,
        "padded": padded,
        "padded_short": dataclasses.replace(padded, task_feature_lengths=lengths),
    }


def make_step(trainer, dataset, examples) -> tuple[Callable[[], None], float]:
    """Compiles a step on real batches; returns it, and the GFLOP that it does."""
    partitioner = trainer.partitioner
    batches = datasets.make_batches(
        dataset, examples, num_shards=partitioner.num_batch_shards
    )
    numbers = itertools.count()
    state = trainer.init_state(0)
    first = partitioner.put_batch(batches.batch(0)[0])
    compiled = trainer.train_step.lower(state, first).compile()

    def run():
        nonlocal state
        batch = partitioner.put_batch(batches.batch(next(numbers))[0])
        state, values = compiled(state, batch)
        jax.block_until_ready((state, values))

    if dataset.packed_length is not None:
        dataset = dataclasses.replace(dataset, packed_rows=batches.num_rows)
    count = compile_setup.Setup(trainer, dataset, None, "train").flops()
    return run, count.model / 1e9


def make_product(size: int = 4096) -> tuple[Callable[[], None], float]:
    """Compiles a large float32 product; returns it, and the GFLOP that it does."""
    matrix = jax.numpy.ones((size, size))
    product = jax.jit(lambda a: a @ a)
    return lambda: product(matrix).block_until_ready(), 2 * size**3 / 1e9


def main() -> None:
    """Runs the benchmark."""
    host_memory.keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gin_flags.add_flags(parser)
    measuring.add_flags(parser)
    parser.add_argument("--short_length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="of each, to time")
    parser.add_argument("--only", help="the one variant to time")
    flags = gin_flags.parse_flags(sys.argv[1:], parser)
    if flags.compare:
        measuring.compare(flags.compare, flags.rounds)
        return
    config = gin_files.load(flags)
    trainer = compile_setup.set_up(config, None).trainer
    bindings = gin.get_bindings(config.root, resolve_references=False)
    dataset = bindings["train_dataset_cfg"].scoped_configurable_fn()
    examples = datasets.load_examples(dataset)
    runs = {}
    for name, variant in variants(dataset, flags.short_length).items():
        if flags.only in (None, name):
            runs[name] = make_step(trainer, variant, examples)
    # Among the steps, so that a change in the machine's speed meets all alike.
    runs[_PRODUCT] = make_product()
    for run, _ in runs.values():
        run()
    samples = {name: [] for name in runs}
    for _ in range(flags.steps):
        for name, (run, _) in runs.items():
            began = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - began)
    took = {name: measuring.summary(times) for name, times in samples.items()}
    seconds = {name: each["median_s"] for name, each in took.items()}
    gflop_per_s = {name: round(runs[name][1] / t, 1) for name, t in seconds.items()}
    medians = {name: t for name, t in seconds.items() if name != _PRODUCT}
    measuring.report(
        "packing",
        **took.get("packed", {}),
        gin_file=flags.gin_file,
        pairs=dataset.batch_size,
        seconds=medians,
        pairs_per_s={n: round(dataset.batch_size / t, 1) for n, t in medians.items()},
        packed_times_as_fast={
            n: round(t / medians["packed"], 2)
            for n, t in medians.items()
            if "packed" in medians
        },
        gflop_per_s=gflop_per_s,
        peak_mb=round(measuring.peak_bytes() / 1e6),
    )


if __name__ == "__main__":
    main()
