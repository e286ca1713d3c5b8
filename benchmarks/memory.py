"""What a train step of growing batches needs of memory, as compiled for this machine.

    python benchmarks/memory.py --gin_file=gin/st5_small_mean.gin \
        --max_length=32 --num_negatives=0 --batch_sizes 1024 4096 \
        --gin.engine.trainer.microbatch_size=128

Nothing runs: the compiler says how many bytes of temporaries the program needs beside
its arguments. ``ratio`` is to the first batch size.
"""

import argparse
import sys

import measuring

from sentence_t5 import compile_setup, gin_files, gin_flags


def temporary_bytes(flags: argparse.Namespace, batch_size: int) -> int:
    """Compiles the step and asks."""
    flags.batch_size = batch_size
    setup = compile_setup.set_up(gin_files.load(flags), None)
    return setup.lower().compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gin_flags.add_flags(parser)
    parser.add_argument("--batch_sizes", type=int, nargs="+", required=True)
    flags = gin_flags.parse_flags(sys.argv[1:], parser)
    needed = {size: temporary_bytes(flags, size) for size in flags.batch_sizes}
    first = needed[flags.batch_sizes[0]]
    measuring.report(
        "memory",
        gin_file=flags.gin_file,
        bindings=flags.gin_bindings,
        temporary_mb={size: round(n / 1e6, 1) for size, n in needed.items()},
        ratio={size: round(n / first, 3) for size, n in needed.items()},
    )


if __name__ == "__main__":
    main()
