"""Times SentenceT5.encode on the lines of a file.

    python benchmarks/encode_throughput.py --model_dir=runs/mean --input=texts.txt \
        [--times=5] [--compare='python benchmarks/st_encode.py FOLDER texts.txt']

The first pass, which compiles, isn't timed but reported.
"""

import argparse
import pathlib
import time

import measuring

import sentence_t5


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--input", required=True, type=pathlib.Path)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--times", type=int, default=5)
    measuring.add_flags(parser)
    args = parser.parse_args()
    if args.compare:
        measuring.compare(args.compare, args.rounds)
        return
    texts = args.input.read_text(encoding="utf-8").splitlines()
    model = sentence_t5.SentenceT5.load(args.model_dir)

    def run():
        model.encode(texts, batch_size=args.batch_size, show_progress=False)

    began = time.perf_counter()
    run()
    first = time.perf_counter() - began
    took = measuring.summary(measuring.seconds_of(run, warmup=0, times=args.times))
    measuring.report(
        "encode_throughput",
        **took,
        model_dir=args.model_dir,
        texts=len(texts),
        texts_per_s=round(len(texts) / took["median_s"], 1),
        first_pass_s=round(first, 2),
        compilations=model.num_compilations,
    )


if __name__ == "__main__":
    main()
