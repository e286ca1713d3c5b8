"""Does training with instructions beat training without, on held-out rows?

    python benchmarks/instructions.py --medi_file=medi.jsonl.gz
        --vocabulary=spiece.model --work_dir=/tmp/instructions [flags of train]

Splits a file of MEDI's form by the query's text: a tenth is held out, and rows that
share a query or a positive with it are left out of training. Trains two models that
differ in `medi.mixture.with_instructions` alone, and scores both on each task's
held-out rows:

    pairs      share of rows whose positive is closer to the query than the negative is
    retrieval  mean reciprocal rank of the positive among the task's held-out texts, for
               tasks with one right answer (`--labelled` names the others)

Prints JSON. Interrupted, it goes on where it was.
"""

import argparse
import collections
import hashlib
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from sentence_t5 import inference, names
from sentence_t5.tasks import medi, records

# INSTRUCTOR's data, loss and pooling, from random weights. Flags given later win.
RUN = (
    "--gin_file=gin/st5_tiny_mean.gin",
    "--gin_file=gin/recipes/instructor.gin",
    "--gin.INITIAL_CHECKPOINT_PATH=None",
    "--gin.WARMUP_STEPS=60",
    "--train_steps=600",
    "--batch_size=64",
    "--max_length=48",
    "--learning_rate=2e-3",
)
VARIANTS = {"with": True, "without": False}
HELD_OUT_PARTS = 10


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medi_file", required=True)
    parser.add_argument("--vocabulary", required=True)
    parser.add_argument("--work_dir", required=True, type=pathlib.Path)
    parser.add_argument("--max_held_out", type=int, default=300, help="rows of a task")
    parser.add_argument(
        "--labelled",
        default="banking77,clinc150,stackoverflow,trec",
        help="tasks whose rows share labels: not scored by retrieval",
    )
    args, flags = parser.parse_known_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train_file = args.work_dir / "train.jsonl"
    held_out = split(args.medi_file, train_file, args.max_held_out)
    report = {
        "machine": f"{platform.machine()}, {platform.processor() or platform.system()}",
        "flags": flags,
        "held_out_rows": {task: len(rows) for task, rows in held_out.items()},
    }
    for name, with_instructions in VARIANTS.items():
        folder = args.work_dir / name
        command = [
            *(sys.executable, "-m", "sentence_t5.train", *RUN),
            *(f"--medi_file={train_file}", f"--vocabulary={args.vocabulary}"),
            *(f"--model_dir={folder}", *flags),
            f"--gin.medi.mixture.with_instructions={with_instructions}",
        ]
        subprocess.run(command, check=True)
        model = inference.SentenceT5.load(folder)
        report[name] = {
            task: score(model, rows, with_instructions)
            for task, rows in held_out.items()
        }
    labelled = args.labelled.split(",")
    for name in VARIANTS:
        report[f"{name}: mean over rows"] = {
            "pairs": mean(report[name], held_out, "pairs", ()),
            "retrieval": mean(report[name], held_out, "retrieval", labelled),
        }
    print(json.dumps(report, indent=2))


def mean(scores: dict, held_out: dict, metric: str, without: Sequence[str]) -> float:
    """Averages over rows: a task of twenty rows is mostly chance."""
    tasks = [task for task in scores if task not in without]
    weights = [len(held_out[task]) for task in tasks]
    return float(np.average([scores[task][metric] for task in tasks], weights=weights))


def split(path: str, train_file: pathlib.Path, max_held_out: int) -> dict[str, list]:
    """Writes the training rows and returns the held-out ones by task."""
    held_out, kept = collections.defaultdict(list), []
    for number, _, record in records.Reader(path).places():
        row = medi.parse(f"{path}, line {number}", record)
        if part_of(row[names.INPUTS]) == 0:
            held_out[str(record["task_id"])].append(row)
        else:
            kept.append((row, record))
    texts = {
        text
        for rows in held_out.values()
        for row in rows
        for text in (row[names.INPUTS], row[names.TARGETS])
    }
    with train_file.open("w") as file:
        for row, record in kept:
            if row[names.INPUTS] not in texts and row[names.TARGETS] not in texts:
                file.write(json.dumps(record) + "\n")
    return {task: rows[:max_held_out] for task, rows in held_out.items()}


def part_of(text: str) -> int:
    """Returns the part that a query belongs to, the same on every machine."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT_PARTS


def score(model: inference.SentenceT5, rows: list, with_instructions: bool) -> dict:
    """Scores a model on the held-out rows of one task."""

    def embed(texts, befores):
        instruction = befores if with_instructions else ""
        return model.encode(
            texts,
            instruction=instruction,
            on_truncate="ignore",
            on_crowding="keep_text",
            show_progress=False,
        )

    def column(key):
        return [row[key] for row in rows], [row[f"{key}_instruction"] for row in rows]

    left = embed(*column(names.INPUTS))
    right = embed(*column(names.TARGETS))
    firsts = [row[names.NEGATIVE_TARGETS][0] for row in rows]
    befores = [row[f"{names.NEGATIVE_TARGETS}_instruction"][0] for row in rows]
    negative = embed(firsts, befores)
    own = np.einsum("ne,ne->n", left, right)
    # A text that is right for one row may stand in another: it counts once.
    corpus, where = np.unique([row[names.TARGETS] for row in rows], return_index=True)
    others = np.concatenate([right[where], negative])
    is_own = np.concatenate(
        [
            np.array([[row[names.TARGETS] == text for text in corpus] for row in rows]),
            np.zeros((len(rows), len(rows)), bool),
        ],
        axis=1,
    )
    ahead = ((left @ others.T >= own[:, None]) & ~is_own).sum(axis=1)
    return {
        "pairs": float((own > np.einsum("ne,ne->n", left, negative)).mean()),
        "retrieval": float((1.0 / (1 + ahead)).mean()),
    }


if __name__ == "__main__":
    main()
