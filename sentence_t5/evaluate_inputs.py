"""What ``sentence-t5 evaluate`` scores a model on: flags, and the files they name."""

import argparse
import dataclasses
from collections.abc import Sequence, Set

from sentence_t5 import evaluate_geometry, evaluate_instructions
from sentence_t5.evals import geometry_plots, sts_sets, transfer, transfer_sets
from sentence_t5.tasks import beir_folder

_ROLES = ("score", "sentence1", "sentence2", "subset")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the files hold that a model is scored on.

    Attributes:
        sts: pairs with scores.
        retrieval: collections in BEIR's layout.
        geometry: texts, with the positive pairs among them.
        positive_score: pairs of ``geometry`` scored above it are positive.
        transfer: SentEval's tasks.
        instructions: rows with instructions.
        labelled: their tasks that are not scored by retrieval.
    """

    sts: Sequence[sts_sets.StsSet]
    retrieval: Sequence[beir_folder.Collection]
    geometry: Sequence[evaluate_geometry.Texts]
    positive_score: float
    transfer: Sequence[transfer_sets.TransferSet]
    instructions: Sequence[evaluate_instructions.Rows]
    labelled: Set[str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what to score, and how the files are read."""
    parser.add_argument(
        "--sts", default=[], nargs="+", metavar="TSV", help="files of scored pairs"
    )
    parser.add_argument(
        "--beir", default=[], nargs="+", metavar="DIR", help="retrieval sets"
    )
    parser.add_argument(
        "--geometry",
        default=[],
        nargs="+",
        metavar="FILE",
        help="files to measure how vectors lie: a TSV of pairs, or one text a line",
    )
    parser.add_argument(
        "--transfer",
        default=[],
        nargs="+",
        metavar="DIR",
        help="folders of SentEval's tasks: MR.tsv, TREC.train.tsv, TREC.test.tsv, ...",
    )
    parser.add_argument(
        "--medi",
        default=[],
        nargs="+",
        metavar="JSONL",
        help="held-out rows with instructions, in MEDI's form",
    )
    parser.add_argument(
        "--labelled",
        default="",
        metavar="TASK,TASK",
        help="task_ids of --medi whose rows share labels: not scored by retrieval",
    )
    for role in _ROLES:
        parser.add_argument(
            f"--{role}_column", metavar="NAME", help="found by its name by default"
        )
    parser.add_argument(
        "--positive_score",
        type=float,
        default=evaluate_geometry.POSITIVE_SCORE,
        help="pairs of --geometry scored above it mean the same; %(default)s",
    )


def read(args: argparse.Namespace) -> Inputs:
    """Reads all files, and checks that what scores them is installed.

    Args:
        args: of ``add_flags``, and ``--split`` and ``--plot``.

    Returns:
        What the files hold.

    Raises:
        OSError: a file can't be read.
        ValueError: a bad line, with its place, or a task that no file has.
        ImportError: what scores or draws is not installed.
    """
    columns = {
        role: getattr(args, f"{role}_column")
        for role in _ROLES
        if getattr(args, f"{role}_column")
    }
    inputs = Inputs(
        sts=[sts_sets.load_tsv(path, columns) for path in args.sts],
        retrieval=[beir_folder.load(folder, args.split) for folder in args.beir],
        geometry=[
            evaluate_geometry.load(path, columns, args.positive_score)
            for path in args.geometry
        ],
        positive_score=args.positive_score,
        transfer=[s for f in args.transfer for s in transfer_sets.load_folder(f)],
        instructions=[evaluate_instructions.load(path) for path in args.medi],
        labelled=frozenset(task for task in args.labelled.split(",") if task),
    )
    evaluate_instructions.check_labelled(inputs.labelled, inputs.instructions)
    if inputs.transfer:
        transfer.check_installed()
    if args.plot:
        geometry_plots.check_installed()
    return inputs
