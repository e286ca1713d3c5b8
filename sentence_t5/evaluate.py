"""``sentence-t5 evaluate``: score a trained model on files of the usual evaluations.

    sentence-t5 evaluate --model_dir=runs/mean --sts STSB.dev.tsv STS16.test.tsv
    sentence-t5 evaluate --model_dir=runs/gtr --beir scifact nfcorpus \
        --query_length=64 --passage_length=512
    sentence-t5 evaluate --model_dir=runs/mean --geometry STSB.dev.tsv

Prints a table and, with ``--json``, writes a report that also records what was scored
how: model, step, pooling, lengths, dtype, row counts and hashes of the files. Retrieval
sets are folders in BEIR's layout. STS is scored here, the rest by ``evaluate_*``.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import sentence_t5
from sentence_t5 import (
    evaluate_geometry,
    evaluate_retrieval,
    inference,
    instructions,
    retrieve,
)
from sentence_t5.evals import sts, sts_sets
from sentence_t5.tasks import beir_folder

_logger = logging.getLogger(__name__)

_ROLES = ("score", "sentence1", "sentence2", "subset")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0 also where a score is undefined, 1 for a user's mistake.
    """
    args = _parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    columns = {
        role: getattr(args, f"{role}_column")
        for role in _ROLES
        if getattr(args, f"{role}_column")
    }
    try:
        # The files first: a bad line should not cost the loading of a model.
        sets = [sts_sets.load_tsv(path, columns) for path in args.sts]
        collections = [beir_folder.load(folder, args.split) for folder in args.beir]
        clouds = [
            evaluate_geometry.load(path, columns, args.positive_score)
            for path in args.geometry
        ]
        options = retrieve.options_from(
            args, args.max_length, keep_identical_ids=args.keep_identical_ids
        )
        model = inference.SentenceT5.load(args.model_dir, args.step, dtype=args.dtype)
        report = make_report(
            model,
            sets,
            batch_size=args.batch_size,
            max_length=args.max_length,
            instruction=args.instruction,
            prompt_name=args.prompt_name,
        )
        encoding = _encoding(report, args)
        report["retrieval"] = [
            evaluate_retrieval.make_entry(model, collection, options)
            for collection in collections
        ]
        report["geometry"] = [
            evaluate_geometry.make_entry(model, cloud, encoding, args.positive_score)
            for cloud in clouds
        ]
    except (OSError, ValueError, FloatingPointError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    report["model"]["path"] = os.path.abspath(args.model_dir)
    for part, paths in (("sts", args.sts), ("geometry", args.geometry)):
        for path, entry in zip(paths, report[part], strict=True):
            entry["file"] = os.path.abspath(path)
    for path, entry in zip(args.beir, report["retrieval"], strict=True):
        entry["folder"] = os.path.abspath(path)
    print(format_table(report))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2, allow_nan=False)
            file.write("\n")
    return 0


def score(
    model: inference.SentenceT5,
    sts_set: sts_sets.StsSet,
    *,
    batch_size: int = 64,
    max_length: int | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
) -> sts.StsResult:
    """Scores a model on one STS set by the cosine of its vectors.

    The instruction goes before both sides; see ``SentenceT5.encode``.
    """
    # Sentences recur within a set: each is encoded once.
    sentences = list(dict.fromkeys(sts_set.sentences1 + sts_set.sentences2))
    row = {sentence: i for i, sentence in enumerate(sentences)}
    vectors = model.encode(
        sentences,
        instruction=instruction,
        prompt_name=prompt_name,
        batch_size=batch_size,
        max_length=max_length,
        on_truncate="ignore",
    )
    left = vectors[[row[sentence] for sentence in sts_set.sentences1]]
    right = vectors[[row[sentence] for sentence in sts_set.sentences2]]
    return sts.evaluate(
        sts_set.by_subset(sts.cosine(left, right)), sts_set.by_subset(sts_set.scores)
    )


def make_report(
    model: inference.SentenceT5,
    sets: Sequence[sts_sets.StsSet],
    *,
    batch_size: int = 64,
    max_length: int | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
) -> dict[str, Any]:
    """Scores a model on STS sets and records how.

    Args:
        model: the model.
        sets: what to score it on.
        batch_size: texts computed at once; scores don't depend on it.
        max_length: tokens a text is trimmed to; the model's own by default.
        instruction: put before each text; None is the model's default prompt, if any.
        prompt_name: instead, the name of one of the model's prompts.

    Returns:
        A JSON-able report: ``model``, ``settings``, one entry per set under ``sts``,
        and ``average``, the mean over sets of the pooled correlations (None without
        any).
    """
    max_length = model.max_length if max_length is None else max_length
    prompt = instructions.choose(
        instruction, prompt_name, model.prompts, model.default_prompt
    )
    options = {
        "max_length": max_length,
        # What was chosen, "" if it is nothing: the default is not asked for again.
        "instruction": prompt or "",
    }
    entries, results = [], []
    for sts_set in sets:
        result = score(model, sts_set, batch_size=batch_size, **options)
        results.append(result)
        entries.append(_entry(model, sts_set, result, options))
    return {
        "format_version": 1,
        "model": _describe(model),
        "settings": {
            "similarity": "cosine",
            "max_length": max_length,
            "batch_size": batch_size,
            "prompt": prompt,
        },
        "sts": entries,
        "average": _average({s.name: r for s, r in zip(sets, results, strict=True)})
        if sets
        else None,
    }


def _encoding(report: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Returns how texts without sides are encoded, for ``embedding_cache.encode``."""
    settings = report["settings"]
    return {
        "prompt": settings["prompt"] or "",
        "max_length": settings["max_length"],
        "batch_size": settings["batch_size"],
        "cache_dir": args.cache_dir,
    }


def _entry(
    model: inference.SentenceT5,
    sts_set: sts_sets.StsSet,
    result: sts.StsResult,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a set's part of the report."""
    sentences = sts_set.sentences1 + sts_set.sentences2
    num_truncated = int(model.truncated(sentences, **options).sum())
    problem = sts_sets.size_problem(sts_set)
    notes = _notes(result, problem)
    if num_truncated:
        notes.append(
            f"{num_truncated} of {len(sentences)} texts truncated (max "
            f"{options['max_length']} tokens)."
        )
    return {
        "name": sts_set.name,
        "sha256": sts_set.sha256,
        "pairs": len(sts_set.scores),
        "texts_truncated": num_truncated,
        "comparable": problem is None,
        "notes": notes,
        **result.to_dict(),
    }


def format_table(report: Mapping[str, Any]) -> str:
    """Returns a report as tables for people; scores × 100."""
    model, settings = report["model"], report["settings"]
    header = (
        f"{model.get('path', 'model')}, step {model['step']}: {model['pooling']} "
        f"pooling, projection {model['projection_dim']}, {model['dtype']}"
    )
    parts = []
    if report["sts"] or report.get("geometry"):
        header += f", max_length {settings['max_length']}"
        if report["sts"]:
            header += f", {settings['similarity']} similarity"
        if settings["prompt"]:
            header += f"\nprompt: {settings['prompt']!r}"
    if report["sts"]:
        parts.append(_format_sts(report))
    if report.get("retrieval"):
        parts.append(evaluate_retrieval.format_table(report["retrieval"]))
    if report.get("geometry"):
        parts.append(evaluate_geometry.format_table(report["geometry"]))
    return "\n\n".join([header, *parts])


def _format_sts(report: Mapping[str, Any]) -> str:
    """Returns the table of the STS sets, Spearman and Pearson × 100."""
    lines = []
    rows = [("set", "over", "pairs", "Spearman", "Pearson")]
    for entry in report["sts"]:
        num_subsets = len(entry["subsets"])
        cells = {"all": entry["all"]}
        if num_subsets > 1:
            cells |= entry["subsets"]
            cells[f"mean of {num_subsets}"] = entry["mean"]
            cells[f"wmean of {num_subsets}"] = entry["wmean"]
        for over, value in cells.items():
            rows.append(
                (
                    entry["name"],
                    over,
                    str(value["n"]),
                    _cell(value["spearman"]),
                    _cell(value["pearson"]),
                )
            )
    if len(report["sts"]) > 1:
        average = report["average"]
        over = f"mean of {len(report['sts'])} sets' all"
        rows.append(
            ("", over, "", _cell(average["spearman"]), _cell(average["pearson"]))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[2:] = [cell.strip().rjust(len(cell)) for cell in cells[2:]]
        lines.append("  ".join(cells))
    notes = [f"{e['name']}: {note}" for e in report["sts"] for note in e["notes"]]
    return "\n".join(lines + [f"NOTE {note}" for note in notes])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 evaluate",
        description="Score a trained model on STS files (UTF-8 TSV with a header) and "
        "retrieval sets (folders in BEIR's layout), and measure how its vectors lie.",
    )
    parser.add_argument("--model_dir", required=True, help="what train wrote")
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
        "--step", type=int, help="which checkpoint; the newest by default, 0: untrained"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report here")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, help="the model's own by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--instruction", help="put before each text; '' for none, not even the default"
    )
    parser.add_argument("--prompt_name", help="of one of the model's own prompts")
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
    group = parser.add_argument_group("for --beir")
    group.add_argument("--split", default="test", help="file of qrels/; test")
    retrieve.add_flags(group)
    group.add_argument(
        "--keep_identical_ids",
        action="store_true",
        help="keep passages with the id of the query, which BEIR leaves out",
    )
    args = parser.parse_args(argv)
    if not (args.sts or args.beir or args.geometry):
        parser.error(
            "nothing to score: pass --sts or --geometry files, or --beir folders."
        )
    return args


def _describe(model: inference.SentenceT5) -> dict[str, Any]:
    """Returns what a score depends on."""
    config = model.config
    return {
        "step": model.step,
        "pooling": config.pooling,
        "projection_dim": config.projection_dim,
        "normalize": config.normalize,
        "pool_instruction": config.pool_instruction,
        "dtype": config.t5.dtype,
        "num_params": config.num_params(),
        "encoder": config.to_dict(),
        "vocabulary": model.tokenizer.describe(),
        "versions": {"sentence_t5": sentence_t5.__version__, "jax": jax.__version__},
    }


def _notes(result: sts.StsResult, problem: str | None) -> list[str]:
    """Returns what a reader of the scores must know."""
    notes = [problem] if problem else []
    if result.collapsed:
        notes.append(
            "collapsed embeddings: every pair has the cosine "
            f"{result.similarity_mean:.6g}, so that nothing is ranked."
        )
    named = {"all": result.all, **result.subsets}
    if len(result.subsets) > 1:
        named |= {"mean": result.mean, "wmean": result.wmean}
    notes += [f"{k} is undefined: {c.reason}." for k, c in named.items() if c.reason]
    return notes


def _average(results: Mapping[str, sts.StsResult]) -> dict[str, Any]:
    """Averages the pooled correlations over sets; undefined if one of them is."""
    pooled = sts.average({name: r.all for name, r in results.items()}, weighted=False)
    return dataclasses.asdict(pooled)


def _cell(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
