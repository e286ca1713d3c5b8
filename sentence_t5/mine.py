r"""``sentence-t5 mine``: find hard negatives for training pairs, by a trained model.

    sentence-t5 mine --model_dir=runs/gtr1 --beir=msmarco --split=train \
        --output=mined.jsonl.gz --num_negatives=8 --relative_margin=0.05
    sentence-t5 train ... --train_file=mined.jsonl.gz --negatives=negatives

Each line has ``anchor``, ``positive`` and ``negatives``, as the ``files`` task reads
them, and the scores behind the choice. Vectors and finished lines are kept beside the
output until it is complete, so that the same command goes on after an interruption and
ends with the same file. ``mining`` has the rules.
"""

import argparse
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from sentence_t5 import (
    inference,
    mining,
    mining_files,
    progress,
    retrieve,
    search,
    whole_files,
)

# Queries searched between two notes of the progress.
_CHUNK_QUERIES = 1024
_WORK, _ABOUT = ".work", ".about.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the process's by default.

    Returns:
        The exit code: 0, or 1 for a user's mistake.
    """
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        rules = mining.Rules(
            **{f.name: getattr(args, f.name) for f in dataclasses.fields(mining.Rules)}
        )
        source = mining_files.load_source(args)
        model = inference.SentenceT5.load(args.model_dir, args.step, dtype=args.dtype)
        options = retrieve.options_from(args)
        about = mine(model, source, rules, options, args.output)
    except (OSError, ValueError, FloatingPointError) as error:
        print(f"mine: {error}", file=sys.stderr)
        return 1
    print(summary(args.output, about))
    return 0


def mine(
    model: inference.SentenceT5,
    source: mining_files.Source,
    rules: mining.Rules,
    options: retrieve.Options,
    output: str | os.PathLike,
    chunk_queries: int = _CHUNK_QUERIES,
) -> dict[str, Any]:
    """Mines negatives into a file, going on where an interrupted call ended.

    Args:
        model: the encoder.
        source: pairs and corpus.
        rules: what is taken.
        options: prompts, lengths, batch size; vectors are kept in ``cache_dir``, or
            beside the output until it is complete.
        output: a name ending in .jsonl or .jsonl.gz. Beside it, ``.about.json`` says
            how it was made.
        chunk_queries: queries searched between two notes of the progress.

    Returns:
        What ``.about.json`` holds: settings and counts.

    Raises:
        ValueError: the output was made with other settings, or begun with others.
    """
    output = pathlib.Path(output)
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(
            f"{output}: the output's name must end in .jsonl or .jsonl.gz."
        )
    settings = _settings(model, source, rules, options)
    about_path = output.with_name(output.name + _ABOUT)
    work = output.with_name(output.name + _WORK)
    if output.exists():
        about = _made_before(output, about_path, settings)
        shutil.rmtree(work, ignore_errors=True)
        return about
    pool = mining.make_pool(source.pairs, source.corpus, source.corpus_ids)
    work.mkdir(parents=True, exist_ok=True)
    lines = mining_files.Lines(work, settings)
    if options.cache_dir is None:
        options = dataclasses.replace(options, cache_dir=str(work / "vectors"))
    passages = retrieve.embed(
        model, pool.passages, options.passage, options, "passages"
    )
    queries = retrieve.embed(model, pool.queries, options.query, options, "queries")
    _search(pool, queries, passages, rules, lines, chunk_queries)
    finished = lines.finish(packed=output.name.endswith(".gz"))
    about = {
        "settings": settings,
        "counts": lines.counts | _counts(model, source, pool, options),
        "sha256": whole_files.sha256(finished),
    }
    # Before the output, whose presence says that all is done.
    about_path.write_text(json.dumps(about, indent=2) + "\n")
    os.replace(finished, output)
    shutil.rmtree(work)
    return about


def _search(
    pool: mining.Pool,
    queries: np.ndarray,
    passages: np.ndarray,
    rules: mining.Rules,
    lines: mining_files.Lines,
    chunk_queries: int,
) -> None:
    """Searches chunk by chunk and writes the lines of each."""
    starts = np.searchsorted(
        [pair.query for pair in pool.pairs], np.arange(len(queries) + 1)
    )
    depth = pool.depth(rules)
    first = lines.num_queries
    bar = progress.bar("mine", len(queries), "query", shown=True, done=first)
    with bar:
        for start in range(first, len(queries), chunk_queries):
            stop = min(start + chunk_queries, len(queries))
            found = search.top_k(
                np.asarray(queries[start:stop]),
                passages[: pool.num_searched],
                depth,
                progress=bar.update,
            )
            rows = [
                _record(pool, number, queries, passages, found, query - start, rules)
                for query in range(start, stop)
                for number in range(starts[query], starts[query + 1])
            ]
            lines.add(rows, stop)


def _record(
    pool: mining.Pool,
    number: int,
    queries: np.ndarray,
    passages: np.ndarray,
    found: search.Neighbours,
    row: int,
    rules: mining.Rules,
) -> dict[str, Any]:
    """Mines for one pair, whose query's neighbours are in ``row`` of ``found``."""
    pair = pool.pairs[number]
    is_candidate = ~np.isin(found.rows[row], pool.excluded[pair.query])
    rows, scores = found.rows[row][is_candidate], found.scores[row][is_candidate]
    positive_score = search.inner_products(
        queries[pair.query], passages[pair.positive][None]
    )[0]
    chosen = rules.choose(scores, positive_score, number)
    record = {
        "anchor": pair.query_text,
        "positive": pair.positive_text,
        "negatives": [pool.passages[row] for row in rows[chosen]],
        "positive_score": _short(positive_score),
        "negative_scores": [_short(score) for score in scores[chosen]],
    }
    if pool.passage_ids is not None:
        record["negative_ids"] = [pool.passage_ids[row] for row in rows[chosen]]
    for name in ("query_id", "positive_id"):
        if (value := getattr(pair, name)) is not None:
            record[name] = value
    return record


def _short(score: np.float32) -> float:
    """Returns the shortest decimal that is this float32."""
    return float(str(np.float32(score)))


def _settings(
    model: inference.SentenceT5,
    source: mining_files.Source,
    rules: mining.Rules,
    options: retrieve.Options,
) -> dict[str, Any]:
    """Returns all that the output depends on, JSON-able."""
    return {
        "model": model.fingerprint,
        "step": model.step,
        "similarity": retrieve.similarity_of(model, options.similarity),
        "query": retrieve.describe_side(model, options.query),
        "passage": retrieve.describe_side(model, options.passage),
        "rules": dataclasses.asdict(rules),
        "files": source.sha256,
    }


def _counts(
    model: inference.SentenceT5,
    source: mining_files.Source,
    pool: mining.Pool,
    options: retrieve.Options,
) -> dict[str, int]:
    """Counts texts, and those that are longer than their side's length."""
    corpus = source.pairs if source.corpus is None else source.corpus
    counts = {
        "queries": len(pool.queries),
        "passages": pool.num_searched,
        "passages_with_repeats": len(corpus),
    }
    for name, texts, side in (
        ("queries", pool.queries, options.query),
        ("passages", pool.passages, options.passage),
    ):
        counts[f"{name}_truncated"] = retrieve.num_truncated(model, texts, side)
    return counts


def _made_before(
    output: pathlib.Path, about_path: pathlib.Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns what says how a complete output was made, if it was made like this."""
    if about_path.exists():
        about = json.loads(about_path.read_text())
        if about["settings"] == settings:
            return about
        changed = mining_files.differences(about["settings"], settings)
        reason = f"with other settings: {changed}"
    else:
        reason = f"by something else: it has no {about_path.name}"
    raise ValueError(
        f"{output} is there already, made {reason}. Remove it or name another --output."
    )


def summary(output: str | os.PathLike, about: dict[str, Any]) -> str:
    """Says in three lines what a mined file holds."""
    counts, rules = about["counts"], about["settings"]["rules"]
    return (
        f"{output}: {counts['pairs']} pairs of {counts['queries']} queries with "
        f"{counts['negatives']} negatives, from {counts['passages']} distinct passages "
        f"({counts['passages_with_repeats']} with repeats).\n"
        f"{counts['short']} pairs have fewer than {rules['num_negatives']}, "
        f"{counts['without']} of them none.\n"
        f"Truncated: {counts['queries_truncated']} queries, "
        f"{counts['passages_truncated']} passages."
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sentence-t5 mine",
        description="Find hard negatives for training pairs, by a trained model.",
    )
    parser.add_argument("--model_dir", required=True, help="what train wrote")
    parser.add_argument("--output", required=True, metavar="FILE.jsonl[.gz]")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--beir", metavar="DIR", help="a folder in BEIR's layout")
    source.add_argument("--pairs", metavar="FILE", help="pairs, TSV or JSONL")
    parser.add_argument("--split", default="train", help="of --beir; train")
    parser.add_argument("--left", default="anchor", help="column of --pairs; anchor")
    parser.add_argument("--right", default="positive", help="the other; positive")
    parser.add_argument(
        "--corpus", metavar="FILE", help="search this TSV or JSONL, not the positives"
    )
    parser.add_argument("--corpus_column", default="text", help="its column; text")
    _add_rules(parser.add_argument_group("which negatives"))
    model = parser.add_argument_group("how texts are encoded")
    model.add_argument("--step", type=int, help="checkpoint; the newest by default")
    model.add_argument("--batch_size", type=int, default=64)
    model.add_argument("--dtype", choices=("float32", "bfloat16"))
    retrieve.add_flags(model)
    args = parser.parse_args(argv)
    if args.corpus and not args.pairs:
        parser.error("--corpus goes with --pairs; a --beir folder has its own.")
    return args


def _add_rules(group) -> None:
    defaults = mining.Rules()
    group.add_argument("--num_negatives", type=int, default=defaults.num_negatives)
    group.add_argument("--min_rank", type=int, default=1, help="1 is the nearest")
    group.add_argument("--max_rank", type=int, default=defaults.max_rank)
    group.add_argument(
        "--margin", type=float, help="at least so far below the positive's score"
    )
    group.add_argument(
        "--relative_margin", type=float, help="0.05: at most 95 %% of its score"
    )
    group.add_argument("--min_score", type=float)
    group.add_argument("--max_score", type=float)
    group.add_argument(
        "--sampling", choices=(mining.TOP, mining.RANDOM), default=mining.TOP
    )
    group.add_argument("--seed", type=int, default=0, help="of --sampling=random")


if __name__ == "__main__":
    sys.exit(main())
