r"""Answers the papers' questions by training: one command, one page.

    python launch/study.py --out=/tmp/study --sizes=tiny,small \
        --nli_file=triples.tsv --cqa_file=qa.jsonl.gz --medi_file=medi.jsonl.gz \
        --sts STSB.dev.tsv STS16.test.tsv --vocabulary=spiece.model

Which pooling; raw against tuned; NLI against questions and answers, then NLI; what size
brings; INSTRUCTOR's ablations. Trains every model (`study_plan`), scores each by
`sentence-t5 evaluate`, and writes OUT/study.html and OUT/study.md beside its plots.

Given again, the same command goes on where it was. `--page` only writes the page anew.
docs/study.md says more.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent import futures
from multiprocessing import get_context

import study_data
import study_plan
import study_report
import sweep

from sentence_t5 import checkpoint_files
from sentence_t5.evals import geometry_plots

EVALUATE = (sys.executable, "-m", "sentence_t5.evaluate")

_USAGE_ERROR = 2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; what is not the study's own is kept for training."""
    parser = argparse.ArgumentParser(
        prog="launch/study.py",
        description="Trains and scores models that answer the papers' questions.",
        epilog="All other flags go to every training: see `sentence-t5 train --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", required=True, help="folder of the study")
    parser.add_argument(
        "--sizes", type=_words, default=["tiny", "small"], metavar="SIZE,SIZE",
        help="files of gin/sizes; poolings and instructions are compared at the first; "
        "tiny,small",
    )  # fmt: skip
    parser.add_argument(
        "--poolings", type=_words, default=["mean", "first", "encdec"], metavar="P,P",
        help="files of gin/pooling; sizes are compared with the first; "
        "mean,first,encdec",
    )  # fmt: skip
    _add_files(parser)
    parser.add_argument(
        "--initial_checkpoint_path", metavar="PATH",
        help="T5's weights, {size} in it standing for each size; else random ones",
    )  # fmt: skip
    parser.add_argument(
        "--gin_search_paths", type=_words, default=[], metavar="DIRS",
        help="folders to look for gin files in first, between commas",
    )  # fmt: skip
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the page of what is there, run nothing",
    )
    flags, flags.more = parser.parse_known_args(argv)
    if flags.gin_search_paths:
        flags.more.append(f"--gin_search_paths={','.join(flags.gin_search_paths)}")
    _check(flags, parser)
    return flags


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the files to train and to score on."""
    parser.add_argument("--nli_file", help="TSV or JSONL of NLI triples")
    parser.add_argument(
        "--nli_columns", type=_words, metavar="LEFT,RIGHT,NEGATIVE",
        default=["anchor", "positive", "hard_negative"],
        help="its columns; anchor,positive,hard_negative",
    )  # fmt: skip
    parser.add_argument("--cqa_file", help="TSV or JSONL of questions and answers")
    parser.add_argument(
        "--cqa_columns", type=_words, metavar="LEFT,RIGHT",
        default=["question", "answer"], help="its columns; question,answer",
    )  # fmt: skip
    parser.add_argument("--medi_file", help="JSONL of rows with instructions")
    parser.add_argument(
        "--labelled", type=_words, default=[], metavar="TASK,TASK",
        help="its task_ids whose rows share labels: no negatives to each other, and "
        "not scored by retrieval",
    )  # fmt: skip
    parser.add_argument(
        "--sts", nargs="+", default=[], metavar="TSV",
        help="files of scored pairs; geometry is measured on the first",
    )  # fmt: skip
    parser.add_argument(
        "--transfer", nargs="+", default=[], metavar="DIR", help="SentEval's tasks"
    )
    parser.add_argument(
        "--beir", nargs="+", default=[], metavar="DIR", help="retrieval sets"
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses what could not be trained or compared."""
    if not (flags.sizes and flags.poolings):
        parser.error("--sizes and --poolings: expected one name or more of each.")
    if not (flags.nli_file or flags.cqa_file or flags.medi_file):
        parser.error(
            "nothing to train on: pass --nli_file, --cqa_file or --medi_file, one or "
            "more."
        )
    if (flags.nli_file or flags.cqa_file) and not flags.sts:
        parser.error("nothing to score sentences on: pass --sts, one file or more.")
    for name, wanted in (("nli_columns", 3), ("cqa_columns", 2)):
        given = getattr(flags, name)
        if len(given) != wanted:
            parser.error(f"--{name}: got {len(given)} names, expected {wanted}.")
    files = (flags.nli_file, flags.cqa_file, flags.medi_file)
    for path in (*files, *flags.sts, *flags.transfer, *flags.beir):
        if path and "://" not in path and not os.path.exists(path):
            parser.error(f"there is no {path}.")


def make_plan(
    flags: argparse.Namespace, instructed: study_data.Files | None
) -> list[study_plan.Model]:
    """Plans in a process of its own, so that this one keeps no devices.

    Raises:
        SweepError: a name or value is wrong.
    """
    with futures.ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(plan, flags, instructed).result()
        except ValueError as error:
            raise sweep.SweepError(str(error)) from None


def plan(
    flags: argparse.Namespace, instructed: study_data.Files | None
) -> list[study_plan.Model]:
    """Returns the study's models; see ``study_plan.plan``."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return study_plan.plan(flags, instructed)


def load_instructed(flags: argparse.Namespace) -> study_data.Files | None:
    """Makes the files of rows with instructions, if there is one to make them of.

    Raises:
        SweepError: a row of another form, or an unknown task in ``--labelled``.
    """
    if not flags.medi_file:
        return None
    try:
        files = study_data.prepare(flags.medi_file, pathlib.Path(flags.out) / "data")
    except ValueError as error:
        raise sweep.SweepError(str(error)) from None
    if unknown := sorted(set(flags.labelled) - set(files.kinds)):
        raise sweep.SweepError(
            f"--labelled: {flags.medi_file} has no task {', '.join(unknown)}; it has "
            f"{', '.join(files.kinds)}."
        )
    return files


def score(models: Sequence[study_plan.Model], out: pathlib.Path) -> dict[str, str]:
    """Scores each trained model that has no report yet.

    Args:
        models: the study's.
        out: its folder.

    Returns:
        Model -> what went wrong, of those that could not be scored.
    """
    failures = {}
    for index, model in enumerate(models):
        label = f"[{index + 1}/{len(models)}] {model.run.name}"
        if not _is_trained(model):
            continue
        report = report_path(out, model)
        record = json.dumps([*model.scored_by, *_stamps(model)])
        made_of = report.with_suffix(".made_of.json")
        if report.exists() and made_of.exists() and made_of.read_text() == record:
            print(f"{label}: scored before", flush=True)
            continue
        print(f"{label}: scoring", flush=True)
        report.parent.mkdir(parents=True, exist_ok=True)
        log = report.with_suffix(".log")
        part = report.with_suffix(".part")
        with log.open("w") as output:
            code = subprocess.run(
                [*EVALUATE, f"--model_dir={model.run.model_dir}", *model.scored_by,
                 f"--json={part}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=sweep.end_with_parent,
            ).returncode  # fmt: skip
        if code:
            failures[model.run.name] = f"not scored ({code})"
            print(f"{label}: FAILED with exit code {code}:\n{sweep.tail(log)}")
            continue
        part.replace(report)
        made_of.write_text(record)
    return failures


def report_path(out: pathlib.Path, model: study_plan.Model) -> pathlib.Path:
    """Returns where a model's report is."""
    return out / "scores" / f"{model.run.name}.json"


def _is_trained(model: study_plan.Model) -> bool:
    steps = checkpoint_files.whole_steps(checkpoint_files.absolute(model.run.model_dir))
    return max(steps, default=None) == model.run.total_steps


def _stamps(model: study_plan.Model) -> list:
    """Returns size and time of all that a report depends on: weights and files."""
    words = [f"{model.run.model_dir}/checkpoints/{model.run.total_steps}"]
    words += [word for word in model.scored_by if os.path.exists(word)]
    paths = [pathlib.Path(word) for word in words]
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    return [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns]
        for file in files
        if file.is_file()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study.

    Args:
        argv: the arguments; the process's by default.

    Returns:
        The exit code: 0, 1 if a model failed, 2 for a mistake in the arguments, 128 + N
        after signal N.
    """
    flags = parse(sys.argv[1:] if argv is None else argv)
    out = pathlib.Path(flags.out).expanduser().absolute()
    flags.out = str(out)
    # Many of the models share their programs: each is compiled once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{out}/compiled")
    try:
        geometry_plots.check_installed()
        instructed = load_instructed(flags)
        models = make_plan(flags, instructed)
        training = sweep.Sweep([model.run for model in models], flags.out)
        code, failures = 0, {}
        if not flags.page:
            code = training.run()
            if code > 1:  # A signal, which the sweep has kept to itself.
                return code
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            failures = training.failures | score(models, out)
        reports = {}
        for model in models:
            path = report_path(out, model)
            if path.exists():
                reports[model.run.name] = json.loads(path.read_text())
        study_report.write(models, reports, failures, instructed, out)
        print(f"{out}/study.html")
        return max(code, bool(failures))
    except (sweep.SweepError, ImportError) as error:
        print(f"launch/study.py: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
