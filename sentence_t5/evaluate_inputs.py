"""What ``sentence-t5 evaluate`` scores a model on: flags, and the files they name."""

import argparse
import collections
import dataclasses
import os
import pathlib
from collections.abc import Sequence, Set
from typing import Any

from sentence_t5 import command_paths, evaluate_geometry, evaluate_instructions
from sentence_t5.evals import geometry_plots, sts_sets, transfer, transfer_sets
from sentence_t5.tasks import beir_folder

# Flags of files and of folders -> what these should be.
_FILES = {
    "sts": "a TSV of scored pairs",
    "geometry": "a TSV of pairs or a text file, one text a line",
    "medi": "a JSONL file of rows with instructions",
}
_FOLDERS = {
    "beir": "a retrieval set in BEIR's layout",
    "transfer": "one of files of SentEval's tasks",
}
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

    Files of one name, ``A/test.tsv`` and ``B/test.tsv``, are called by as much of their
    paths as tells them apart: "A/test" and "B/test".

    Args:
        args: of ``add_flags``, and ``--split`` and ``--plot``.

    Returns:
        What the files hold.

    Raises:
        OSError: a file can't be read.
        ValueError: a path that leads nowhere or is named twice, a bad line, with its
            place, or a task that no file has.
        ImportError: what scores or draws is not installed.
    """
    columns = {
        role: getattr(args, f"{role}_column")
        for role in _ROLES
        if getattr(args, f"{role}_column")
    }
    _check_paths(args)
    sts = [sts_sets.load_tsv(path, columns) for path in args.sts]
    retrieval = [beir_folder.load(folder, args.split) for folder in args.beir]
    geometry = [
        evaluate_geometry.load(path, columns, args.positive_score)
        for path in args.geometry
    ]
    instructions = [evaluate_instructions.load(path) for path in args.medi]
    inputs = Inputs(
        sts=_renamed(sts, args.sts),
        retrieval=_renamed(retrieval, args.beir),
        geometry=_renamed(geometry, args.geometry),
        positive_score=args.positive_score,
        transfer=[s for f in args.transfer for s in transfer_sets.load_folder(f)],
        instructions=_renamed(instructions, args.medi),
        labelled=frozenset(task for task in args.labelled.split(",") if task),
    )
    evaluate_instructions.check_labelled(inputs.labelled, inputs.instructions)
    if inputs.transfer:
        transfer.check_installed()
    if args.plot:
        geometry_plots.check_installed()
    return inputs


def _check_paths(args: argparse.Namespace) -> None:
    """Refuses paths that aren't there, and those that would count twice in a mean."""
    for flag in (*_FILES, *_FOLDERS):
        paths = getattr(args, flag)
        for path in paths:
            if flag in _FILES:
                command_paths.check_file(f"--{flag}", path, _FILES[flag])
            else:
                command_paths.check_folder(f"--{flag}", path, _FOLDERS[flag])
        counts = collections.Counter(map(os.path.abspath, paths))
        for path, count in counts.items():
            if count > 1:
                raise ValueError(
                    f"--{flag}: got {path} {count} times, expected it once."
                )


def _renamed(items: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """Returns what was read, those of one name with names that differ.

    Args:
        items: dataclasses with a ``name``.
        paths: what each was read from; they differ.
    """
    where = collections.defaultdict(list)
    for i, item in enumerate(items):
        where[item.name].append(i)
    names = [item.name for item in items]
    for name, places in where.items():
        if len(places) > 1:
            told_apart = _told_apart(name, [paths[i] for i in places])
            for i, new in zip(places, told_apart, strict=True):
                names[i] = new
    pairs = zip(items, names, strict=True)
    return [dataclasses.replace(item, name=name) for item, name in pairs]


def _told_apart(name: str, paths: Sequence[str]) -> list[str]:
    """Returns the shortest ends of paths that differ, without endings if they can.

    Args:
        name: of all the files, without their endings.
        paths: of the files; they differ.
    """
    parts = [pathlib.PurePath(os.path.abspath(path)).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        for last in ([name] * len(parts), [path[-1] for path in parts]):
            ends = zip(parts, last, strict=True)
            names = ["/".join((*path[-depth:-1], end)) for path, end in ends]
            if len(set(names)) == len(names):
                return names
    raise AssertionError("Paths that differ have ends that do.")
