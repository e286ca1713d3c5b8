"""Ranks the passages of a collection for each of its queries, with one encoder.

    texts ─► prompt + text ─► vectors (kept on disk, if asked) ─► exact search ─► ids

Queries and passages are sides of their own: each has its prompt and its length.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sentence_t5 import (
    embedding_cache,
    encoder,
    inference,
    instructions,
    progress,
    search,
    truncation,
)
from sentence_t5 import options as options_lib
from sentence_t5.tasks import beir_folder

# Passages ranked for each query, as BEIR's runs have them.
DEPTH = 1000
# A progress bar shows from so many passages on.
_LONG_SEARCH = 100_000


@dataclasses.dataclass(frozen=True)
class Side:
    """How the texts of one side become vectors.

    Attributes:
        prompt: put before each text as it is, such as "query: "; None: the model's own
            default, "": none.
        max_length: tokens a text is trimmed to; None: the model's own.
    """

    prompt: str | None = None
    max_length: int | None = None

    def __post_init__(self):
        """Checks the length.

        Raises:
            ValueError: it is below 1.
        """
        options_lib.check_positive("max_length", self.max_length)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a collection is encoded and searched.

    Attributes:
        query: the side of the queries.
        passage: the side of the passages.
        similarity: "cosine", "dot", or None for what the model was trained with.
        batch_size: texts computed at once; results don't depend on it.
        depth: passages ranked for each query.
        keep_identical_ids: keep passages whose id is the query's own. BEIR leaves them
            out, because in some of its sets they are the query itself.
        cache_dir: where vectors are kept; None keeps none.
    """

    query: Side = Side()
    passage: Side = Side()
    similarity: str | None = None
    batch_size: int = 64
    depth: int = DEPTH
    keep_identical_ids: bool = False
    cache_dir: str | None = None

    def __post_init__(self):
        """Checks the choices.

        Raises:
            ValueError: an unknown similarity, or a depth below 1.
        """
        if self.similarity not in (None, encoder.COSINE, encoder.DOT):
            raise ValueError(
                f"similarity: got {self.similarity!r}, expected {encoder.COSINE!r}, "
                f"{encoder.DOT!r} or None."
            )
        options_lib.check_positive("depth", self.depth)


@dataclasses.dataclass(frozen=True)
class Run:
    """What was retrieved.

    Attributes:
        results: query id -> passage id -> score, as many as the depth says.
        num_identical: passages left out because their id is the query's own.
        num_identical_relevant: those of them that are judged relevant.
    """

    results: dict[str, dict[str, float]]
    num_identical: int
    num_identical_relevant: int


def add_flags(parser) -> None:
    """Adds the flags of prompts, lengths, similarity and the cache of vectors.

    Args:
        parser: an ``argparse`` parser or group.
    """
    for side in ("query", "passage"):
        parser.add_argument(
            f"--{side}_prompt",
            metavar="TEXT",
            help=f"put before each {side} as it is; the model's own by default",
        )
        parser.add_argument(
            f"--{side}_length",
            type=int,
            metavar="TOKENS",
            help=f"tokens kept of a {side}, EOS included; the model's own by default",
        )
    parser.add_argument(
        "--similarity",
        choices=(encoder.COSINE, encoder.DOT),
        help="as the model was trained by default",
    )
    parser.add_argument(
        "--cache_dir", metavar="DIR", help="keep vectors here; go on where they end"
    )


def options_from(
    args: argparse.Namespace, max_length: int | None = None, **more
) -> Options:
    """Makes options from ``add_flags``' flags and ``--batch_size``.

    Args:
        args: the flags.
        max_length: for a side without a length of its own.
        **more: further fields of ``Options``.

    Raises:
        ValueError: a length below 1; its flag is named.
    """
    options_lib.check_positive("--max_length", max_length)
    sides = {}
    for side in ("query", "passage"):
        flag = f"{side}_length"
        length = getattr(args, flag)
        options_lib.check_positive(f"--{flag}", length)
        length = max_length if length is None else length
        sides[side] = Side(getattr(args, f"{side}_prompt"), length)
    return Options(
        **sides,
        similarity=args.similarity,
        batch_size=args.batch_size,
        cache_dir=args.cache_dir,
        **more,
    )


def similarity_of(model: inference.SentenceT5, asked: str | None = None) -> str:
    """Returns the similarity asked for, or the one that the model was trained with."""
    return asked or model.config.similarity


def prompt_of(model: inference.SentenceT5, side: Side) -> str:
    """Returns what is put before each text of a side: its prompt, or the model's."""
    chosen = instructions.choose(side.prompt, None, model.prompts, model.default_prompt)
    return chosen or ""


def describe_side(model: inference.SentenceT5, side: Side) -> dict[str, Any]:
    """Returns the prompt and the length that a side's texts get, JSON-able."""
    return {
        "prompt": prompt_of(model, side),
        "max_length": model.max_length if side.max_length is None else side.max_length,
    }


def num_truncated(model: inference.SentenceT5, texts: Sequence[str], side: Side) -> int:
    """Counts the texts of a side that are longer than its length."""
    how = describe_side(model, side)
    return truncation.count(model, texts, how["max_length"], how["prompt"])


def embed(
    model: inference.SentenceT5,
    texts: Sequence[str],
    side: Side,
    options: Options,
    label: str = "encode",
) -> np.ndarray:
    """Encodes the texts of one side so that inner products are the similarity.

    Args:
        model: the model.
        texts: of one side.
        side: their prompt and length.
        options: batch size, similarity and cache.
        label: what the progress bar is called.

    Returns:
        float32 [n E].
    """
    vectors = embedding_cache.encode(
        model,
        texts,
        prompt=prompt_of(model, side),
        max_length=side.max_length,
        batch_size=options.batch_size,
        cache_dir=options.cache_dir,
        label=label,
    )
    by_dot = similarity_of(model, options.similarity) == encoder.DOT
    if by_dot or model.config.normalize:
        return vectors
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, np.finfo(np.float32).tiny)


def run(
    model: inference.SentenceT5,
    collection: beir_folder.Collection,
    options: Options,
) -> Run:
    """Ranks the passages for every judged query.

    Args:
        model: the model.
        collection: queries and passages.
        options: how.

    Returns:
        The results.
    """
    passages = embed(model, collection.passages, options.passage, options, "passages")
    queries = embed(model, collection.queries, options.query, options, "queries")
    # One more, since the one with the query's own id may be among them.
    extra = 0 if options.keep_identical_ids else 1
    with progress.bar(
        "search", len(queries), "query", shown=len(passages) >= _LONG_SEARCH
    ) as bar:
        found = search.top_k(
            queries, passages, options.depth + extra, progress=bar.update
        )
    results, num_identical, num_relevant = {}, 0, 0
    for i, query in enumerate(collection.query_ids):
        ids = [collection.passage_ids[row] for row in found.rows[i]]
        scores = dict(zip(ids, found.scores[i].tolist(), strict=True))
        if not options.keep_identical_ids and scores.pop(query, None) is not None:
            num_identical += 1
            num_relevant += collection.judgements[query].get(query, 0) > 0
        results[query] = dict(list(scores.items())[: options.depth])
    return Run(results, num_identical, num_relevant)
