"""``sentence-t5 evaluate``: score a trained model on files of the usual evaluations.

    sentence-t5 evaluate --model_dir=runs/mean --sts STSB.dev.tsv STS16.test.tsv
    sentence-t5 evaluate --model_dir=runs/gtr --beir scifact nfcorpus \
        --query_length=64 --passage_length=512
    sentence-t5 evaluate --model_dir=runs/mean --transfer senteval
    sentence-t5 evaluate --model_dir=runs/mean --geometry STSB.dev.tsv
    sentence-t5 evaluate --model_dir=runs/instructor --medi held_out.jsonl

Prints a table and, with ``--json``, writes a report that also records what was scored
how: model, step, pooling, lengths, dtype, row counts and hashes of the files. Retrieval
sets are folders in BEIR's layout. The modules ``evaluate_*`` do the parts.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import sentence_t5
from sentence_t5 import (
    command_paths,
    evaluate_geometry,
    evaluate_inputs,
    evaluate_instructions,
    evaluate_retrieval,
    evaluate_sts,
    evaluate_transfer,
    inference,
    instructions,
    retrieve,
    whole_files,
)
from sentence_t5.evals import geometry_plots, sts_sets

_logger = logging.getLogger(__name__)

# Parts of a report whose texts have no sides with lengths of their own.
_BY_MAX_LENGTH = ("sts", "geometry", "transfer", "instructions")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0 also where a score is undefined, 1 for a user's mistake.
    """
    args = _parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        for flag, path in (("--json", args.json), ("--plot", args.plot)):
            if path:
                command_paths.check_target(flag, path)
        report = _run(args)
        # The report first: a plot or a closed pipe must not cost the scores.
        if args.json:
            text = json.dumps(report, indent=2, allow_nan=False)
            whole_files.write(args.json, f"{text}\n".encode())
        print(format_table(report))
        if args.plot:
            names = [entry["name"] for entry in report["geometry"]]
            geometry_plots.draw(args.plot, report["geometry"], names)
    except (OSError, ValueError, ImportError, FloatingPointError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the files, then the model, and returns the report of all parts."""
    # The files first: a bad line should not cost the loading of a model.
    inputs = evaluate_inputs.read(args)
    options = retrieve.options_from(
        args, args.max_length, keep_identical_ids=args.keep_identical_ids
    )
    model = inference.SentenceT5.load(
        args.model_dir, args.step, dtype=args.dtype, dim=args.dim
    )
    encoding = _encoding(
        model,
        instruction=args.instruction,
        prompt_name=args.prompt_name,
        max_length=args.max_length,
        batch_size=args.batch_size,
        cache_dir=args.cache_dir,
    )
    report = _score(model, inputs, encoding, options)
    report["model"]["path"] = os.path.abspath(args.model_dir)
    _name_files(report, args)
    return report


def _score(
    model: inference.SentenceT5,
    inputs: evaluate_inputs.Inputs,
    encoding: Mapping[str, Any],
    options: retrieve.Options,
) -> dict[str, Any]:
    """Scores a model on all inputs; retrieval alone goes by ``options``."""
    report = _score_sts(model, inputs.sts, encoding)
    report["retrieval"] = [
        evaluate_retrieval.make_entry(model, collection, options)
        for collection in inputs.retrieval
    ]
    report["geometry"] = [
        evaluate_geometry.make_entry(model, cloud, encoding, inputs.positive_score)
        for cloud in inputs.geometry
    ]
    report["transfer"] = [
        evaluate_transfer.make_entry(model, transfer_set, encoding)
        for transfer_set in inputs.transfer
    ]
    report["instructions"] = [
        evaluate_instructions.make_entry(
            model,
            rows,
            max_length=encoding["max_length"],
            batch_size=encoding["batch_size"],
            labelled=inputs.labelled,
        )
        for rows in inputs.instructions
    ]
    return report


def _name_files(report: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Writes into each entry of a report what it was scored on."""
    for part, key, paths in (
        ("sts", "file", args.sts),
        ("retrieval", "folder", args.beir),
        ("geometry", "file", args.geometry),
        ("instructions", "file", args.medi),
    ):
        for path, entry in zip(paths, report[part], strict=True):
            entry[key] = os.path.abspath(path)


def make_report(
    model: inference.SentenceT5,
    sets: Sequence[sts_sets.StsSet],
    *,
    batch_size: int = 64,
    max_length: int | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Scores a model on STS sets and records how.

    Args:
        model: the model.
        sets: what to score it on.
        batch_size: texts computed at once; scores don't depend on it.
        max_length: tokens a text is trimmed to; the model's own by default.
        instruction: put before each text; None is the model's default prompt, if any.
        prompt_name: instead, the name of one of the model's prompts.
        cache_dir: a local folder that keeps vectors; None keeps nothing.

    Returns:
        A JSON-able report: ``model``, ``settings``, one entry per set under ``sts``,
        and ``average``, the mean over sets of the pooled correlations (None without
        any).

    Raises:
        ValueError: two sets of one name.
    """
    encoding = _encoding(
        model,
        instruction=instruction,
        prompt_name=prompt_name,
        max_length=max_length,
        batch_size=batch_size,
        cache_dir=cache_dir,
    )
    return _score_sts(model, sets, encoding)


def _encoding(
    model: inference.SentenceT5,
    *,
    instruction: str | None,
    prompt_name: str | None,
    max_length: int | None,
    batch_size: int,
    cache_dir: str | os.PathLike | None,
) -> dict[str, Any]:
    """Returns how texts without sides are encoded, for ``embedding_cache.encode``."""
    prompt = instructions.choose(
        instruction, prompt_name, model.prompts, model.default_prompt
    )
    return {
        # What was chosen, "" if it is nothing: the default is not asked for again.
        "prompt": prompt or "",
        "max_length": model.max_length if max_length is None else max_length,
        "batch_size": batch_size,
        "cache_dir": cache_dir,
    }


def _score_sts(
    model: inference.SentenceT5,
    sets: Sequence[sts_sets.StsSet],
    encoding: Mapping[str, Any],
) -> dict[str, Any]:
    """Begins a report: model, settings, STS sets and their average."""
    evaluate_sts.check_names(sets)
    results = [evaluate_sts.score(model, sts_set, encoding) for sts_set in sets]
    named = {s.name: r for s, r in zip(sets, results, strict=True)}
    return {
        "format_version": 1,
        "model": _describe(model),
        "settings": {
            "similarity": "cosine",
            "max_length": encoding["max_length"],
            "batch_size": encoding["batch_size"],
            "prompt": encoding["prompt"] or None,
        },
        "sts": [
            evaluate_sts.make_entry(model, sts_set, result, encoding)
            for sts_set, result in zip(sets, results, strict=True)
        ],
        "average": evaluate_sts.average(named) if sets else None,
    }


def format_table(report: Mapping[str, Any]) -> str:
    """Returns a report as tables for people; scores × 100."""
    model, settings = report["model"], report["settings"]
    header = (
        f"{model.get('path', 'model')}, step {model['step']}: {model['pooling']} "
        f"pooling, projection {model['projection_dim']}, {model['dtype']}"
    )
    width = model["projection_dim"] or model["encoder"]["t5"]["d_model"]
    if model["embedding_dim"] < width:
        header += f", first {model['embedding_dim']} of {width} dimensions"
    parts = []
    if any(report.get(part) for part in _BY_MAX_LENGTH):
        header += f", max_length {settings['max_length']}"
        if report["sts"]:
            header += f", {settings['similarity']} similarity"
        if settings["prompt"]:
            header += f"\nprompt: {settings['prompt']!r}"
    if report["sts"]:
        parts.append(evaluate_sts.format_table(report))
    if report.get("retrieval"):
        parts.append(evaluate_retrieval.format_table(report["retrieval"]))
    if report.get("geometry"):
        parts.append(evaluate_geometry.format_table(report["geometry"]))
    if report.get("transfer"):
        parts.append(evaluate_transfer.format_table(report["transfer"]))
    if report.get("instructions"):
        parts.append(evaluate_instructions.format_table(report["instructions"]))
    return "\n\n".join([header, *parts])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 evaluate",
        description="Score a trained model on STS files (UTF-8 TSV with a header), "
        "retrieval sets (folders in BEIR's layout) and SentEval's transfer tasks, and "
        "measure how its vectors lie.",
    )
    parser.add_argument("--model_dir", required=True, help="what train wrote")
    evaluate_inputs.add_flags(parser)
    parser.add_argument(
        "--step", type=int, help="which checkpoint; the newest by default, 0: untrained"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report here")
    parser.add_argument(
        "--plot", metavar="PNG", help="also draw what --geometry measures"
    )
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, help="the model's own by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--dim", type=int, help="numbers to keep of each vector")
    parser.add_argument(
        "--instruction", help="put before each text; '' for none, not even the default"
    )
    parser.add_argument("--prompt_name", help="of one of the model's own prompts")
    group = parser.add_argument_group(
        "for --beir (--cache_dir: --sts, --geometry and --transfer too)"
    )
    group.add_argument("--split", default="test", help="file of qrels/; test")
    retrieve.add_flags(group)
    group.add_argument(
        "--keep_identical_ids",
        action="store_true",
        help="keep passages with the id of the query, which BEIR leaves out",
    )
    args = parser.parse_args(argv)
    if not (args.sts or args.beir or args.geometry or args.transfer or args.medi):
        parser.error(
            "nothing to score: pass --sts, --geometry or --medi files, or --beir or "
            "--transfer folders."
        )
    if args.plot and not args.geometry:
        parser.error("--plot draws what --geometry measures: pass its files too.")
    return args


def _describe(model: inference.SentenceT5) -> dict[str, Any]:
    """Returns what a score depends on."""
    config = model.config
    return {
        "step": model.step,
        "pooling": config.pooling,
        "projection_dim": config.projection_dim,
        "embedding_dim": model.embedding_dim,
        "normalize": config.normalize,
        "pool_instruction": config.pool_instruction,
        "dtype": config.t5.dtype,
        "num_params": config.num_params(),
        "encoder": config.to_dict(),
        "vocabulary": model.tokenizer.describe(),
        "versions": {"sentence_t5": sentence_t5.__version__, "jax": jax.__version__},
    }


if __name__ == "__main__":
    sys.exit(main())
