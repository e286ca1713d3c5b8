"""Times the train step of a gin file on random tokens, on the devices at hand.

    python benchmarks/step_time.py --gin_file=gin/st5_small_mean.gin \
        --batch_size=32 --max_length=32 --num_negatives=0 [--steps=10] \
        [--compare='python benchmarks/torch_step.py']

Without data, so that it is the step alone; see input_pipeline.py for the rest.
"""

import argparse
import sys
import time

import jax
import measuring
import numpy as np

from sentence_t5 import compile_setup, gin_files, gin_flags, host_memory, names


def random_batch(setup: compile_setup.Setup) -> dict[str, np.ndarray]:
    """Fills the batch with full-length texts: no position is padding."""
    rng = np.random.default_rng(0)
    vocab_size = setup.trainer.model.encoder.t5.vocab_size
    batch = {}
    for name, leaf in setup.batch().items():
        if leaf.dtype == bool:
            batch[name] = np.ones(leaf.shape, bool)
        elif name.endswith(names.INSTRUCTION_LENGTH + "s"):
            batch[name] = np.ones(leaf.shape, np.int32)
        elif leaf.dtype == np.float32:
            batch[name] = rng.normal(size=leaf.shape).astype(np.float32)
        else:
            tokens = rng.integers(2, vocab_size, leaf.shape, np.int32)
            tokens[..., -1] = names.EOS_ID
            batch[name] = tokens
    return batch


def main() -> None:
    """Runs the benchmark."""
    host_memory.keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gin_flags.add_flags(parser)
    measuring.add_flags(parser)
    parser.add_argument("--steps", type=int, default=10, help="how many to time")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    flags = gin_flags.parse_flags(sys.argv[1:], parser)
    if flags.compare:
        measuring.compare(flags.compare, flags.rounds)
        return
    setup = compile_setup.set_up(gin_files.load(flags), None)
    trainer = setup.trainer
    batch = trainer.partitioner.put_batch(random_batch(setup))
    state = trainer.init_state(0)
    began = time.perf_counter()
    step = trainer.train_step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - began

    def run():
        nonlocal state
        state, values = step(state, batch)
        jax.block_until_ready((state, values))

    samples = measuring.seconds_of(run, warmup=flags.warmup, times=flags.steps)
    took = measuring.summary(samples)
    measuring.report(
        "step_time",
        **took,
        gin_file=flags.gin_file,
        pairs=setup.dataset.batch_size,
        lengths=setup.lengths(),
        devices=len(jax.devices()),
        platform=jax.devices()[0].platform,
        pairs_per_s=round(setup.dataset.batch_size / took["median_s"], 2),
        gflop_per_s=round(setup.flops().model / took["median_s"] / 1e9, 1),
        compile_s=round(compile_seconds, 1),
        peak_mb=round(measuring.peak_bytes() / 1e6),
    )


if __name__ == "__main__":
    main()
