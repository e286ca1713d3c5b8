"""Times sentence-transformers on the lines of a file, to compare ``encode`` with.

    python benchmarks/st_encode.py FOLDER texts.txt [--times=5]

Default settings: batches of 32, sorted by length, padded to the longest of each. Needs
sentence-transformers.
"""

import argparse
import pathlib

import measuring
import sentence_transformers


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("input", type=pathlib.Path)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    texts = args.input.read_text(encoding="utf-8").splitlines()
    model = sentence_transformers.SentenceTransformer(args.folder, device="cpu")
    took = measuring.summary(
        measuring.seconds_of(lambda: model.encode(texts), warmup=1, times=args.times)
    )
    measuring.report(
        "st_encode",
        **took,
        texts=len(texts),
        texts_per_s=round(len(texts) / took["median_s"], 1),
    )


if __name__ == "__main__":
    main()
