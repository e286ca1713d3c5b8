"""From a dataset's config to batches: what to read, and how to batch it.

    DatasetConfig ─► load_examples ─► make_batches ─► .batch(step) ─► prefetch
                         (token_cache)    (batching)

A SeqIO task or mixture defines the examples; their order does not come from SeqIO. A
mistake that would fail late or, worse, quietly train on the wrong thing fails here, in
`dataset_checks`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import seqio

from sentence_t5 import (
    batching,
    dataset_checks,
    instructions,
    names,
    options,
    packing,
    prefetching,
    schedules,
    token_cache,
)
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.tokenized import TEXTS, MixedExamples, TokenizedExamples

_MIX_BY = ("rows", "batches")
_MIXTURE_REFUSED = (
    "A mixture cannot be evaluated as one set: evaluate its tasks one by one."
)


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """What to read and how to batch it; the names are T5X's.

    Attributes:
      mixture_or_task_name: a SeqIO task or mixture, or the name of a registered one.
      task_feature_lengths: tokens per text, EOS included, for `inputs`, `targets` and
        optionally `negative_targets` (by default as long as targets).
      split: a split of the task.
      batch_size: pairs in the global batch, over all hosts.
      shuffle: whether each epoch has an order of its own.
      seed: chooses the orders, and the negatives of rows that have more than enough.
      num_negatives: hard negatives per pair, N; 0 leaves them out.
      mix_by: how a mixture is mixed: "rows" gives every batch a share of each task,
        "batches" gives every task a share of the batches, each of one task.
      on_crowding: what to do if an instruction leaves its text less than half of the
        tokens and the text needs more: "error", or "keep_text", which cuts the
        instruction. A text is cut at its end as ever.
      packed_length: tokens of the rows that training packs its texts into; None gives
        every text a padded row of its own. See `packing`.
      packed_rows: rows of a global batch; None finds enough for the data.
      module: imported first, so that it can register tasks.
      cache_dir: where token ids are kept; see `token_cache`.
    """

    mixture_or_task_name: str | seqio.Task | seqio.Mixture
    task_feature_lengths: Mapping[str, int]
    split: str = "train"
    batch_size: int = 512
    shuffle: bool = True
    seed: int = 0
    num_negatives: int = 0
    mix_by: Literal["rows", "batches"] = "rows"
    on_crowding: Literal["error", "keep_text"] = "error"
    packed_length: int | None = None
    packed_rows: int | None = None
    module: str | None = None
    cache_dir: str | None = None

    def __post_init__(self):
        lengths = self.task_feature_lengths
        missing = [key for key in TEXTS[:2] if key not in lengths]
        unknown = [key for key in lengths if key not in TEXTS]
        if missing or unknown:
            raise ValueError(
                f"task_feature_lengths must have {TEXTS[:2]} and may have "
                f"{TEXTS[2]!r}; got {dict(lengths)}."
            )
        for key, length in lengths.items():
            _check_integer(f"task_feature_lengths[{key!r}]", length, minimum=2)
        _check_integer("batch_size", self.batch_size, minimum=1)
        _check_integer("num_negatives", self.num_negatives, minimum=0)
        _check_integer("seed", self.seed, minimum=0)
        for name in ("packed_length", "packed_rows"):
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, minimum=2 if name == "packed_length" else 1)
        if self.packed_rows is not None and self.packed_length is None:
            raise ValueError("packed_rows needs packed_length, the tokens of a row.")
        options.check_choice("mix_by", self.mix_by, _MIX_BY)
        options.check_choice("on_crowding", self.on_crowding, instructions.ON_CROWDING)

    def lengths(self) -> dict[str, int]:
        """Returns the tokens per text of each feature, negatives included."""
        lengths = dict(self.task_feature_lengths)
        lengths.setdefault(names.NEGATIVE_TARGETS, lengths[names.TARGETS])
        return lengths

    def tasks(self) -> list[tuple[seqio.Task, float]]:
        """Returns the task with rate 1, or the mixture's tasks with their rates."""
        if self.module:
            importlib.import_module(self.module)
        found = self.mixture_or_task_name
        if isinstance(found, str):
            found = seqio.get_mixture_or_task(found)
        if isinstance(found, seqio.Mixture):
            return [(task, found.get_rate(task)) for task in found.tasks]
        if isinstance(found, seqio.Task):
            return [(found, 1.0)]
        raise TypeError(
            "mixture_or_task_name must be a SeqIO task or mixture or the name of one, "
            f"got {type(found).__name__}. In gin, call it: `@files.task()`."
        )


Examples = TokenizedExamples | MixedExamples


def load_examples(cfg: DatasetConfig) -> Examples:
    """Tokenizes the task or mixture, or finds it tokenized, and checks its features.

    Args:
      cfg: what to read.

    Returns:
      The examples, with `len()`, `.row(i)` and `.fingerprint`.

    Raises:
      ValueError: a split or feature is missing (the task is named), negatives are asked
        for and there are none, or a row is bad (file and line are named).
    """
    tasks = cfg.tasks()
    for task, _ in tasks:
        dataset_checks.check_features(task, cfg.split, cfg.num_negatives)
    dataset_checks.check_one_vocabulary([task for task, _ in tasks])
    parts = [
        (token_cache.load(task, cfg.split, cfg.cache_dir), rate) for task, rate in tasks
    ]
    dataset_checks.check_negatives(
        [examples for examples, _ in parts], cfg.num_negatives
    )
    if len(parts) == 1:
        return parts[0][0]
    total = sum(rate for _, rate in parts)
    return MixedExamples(tuple((examples, rate / total) for examples, rate in parts))


def make_batches(
    cfg: DatasetConfig,
    examples: Examples,
    *,
    process_index: int = 0,
    process_count: int = 1,
    num_shards: int | None = None,
    num_chunks: int = 1,
) -> batching.TrainBatches | packing.PackedBatches:
    """Makes the training batches of one host.

    Args:
      cfg: lengths, batch size, seed and negatives.
      examples: from `load_examples(cfg)`.
      process_index: which host this is.
      process_count: how many hosts share the global batch.
      num_shards: how many devices share it, for packing; one to a host by default.
      num_chunks: in how many chunks each device encodes its rows, for packing.

    Returns:
      An object whose `.batch(step)` gives the arrays and row ids of this host.

    Raises:
      ValueError: there are fewer rows than a batch holds, the hosts cannot share it, or
        an instruction crowds its text out.
    """
    dataset_checks.check_process_count(cfg.batch_size, process_count)
    parts = _mixture_parts(examples)
    dataset_checks.check_crowding(
        [part for part, _ in parts], cfg.lengths(), cfg.on_crowding
    )
    first_id = 0
    placed = []
    rates = [rate for _, rate in parts]
    schedule = None
    if cfg.mix_by == "batches" and len(parts) > 1:
        schedule = schedules.Schedule(rates, seed=cfg.seed, shuffle=cfg.shuffle)
        shares = [cfg.batch_size] * len(parts)
    else:
        shares = schedules.batch_shares(rates, cfg.batch_size)
    for (part, rate), share in zip(parts, shares, strict=True):
        dataset_checks.check_share(part, rate, share, cfg.batch_size)
        placed.append(batching.Part(part, share, first_id))
        first_id += len(part)
    batches = batching.TrainBatches(
        placed,
        cfg.lengths(),
        seed=cfg.seed,
        shuffle=cfg.shuffle,
        num_negatives=cfg.num_negatives,
        process_index=process_index,
        process_count=process_count,
        schedule=schedule,
    )
    if cfg.packed_length is None:
        return batches
    return packing.PackedBatches(
        batches,
        cfg.packed_length,
        num_rows=cfg.packed_rows,
        num_shards=num_shards or process_count,
        num_chunks=num_chunks,
        process_index=process_index,
        process_count=process_count,
    )


def eval_batches(
    cfg: DatasetConfig,
    examples: Examples,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[batching.Batch]:
    """Yields every example once, in order, in batches of one shape.

    Args:
      cfg: lengths and global batch size.
      examples: from `load_examples(cfg)`.
      process_index: which host this is.
      process_count: how many hosts share the global batch.

    Yields:
      left and right tokens int32 [b L], row_mask bool [b] (False on the padding rows of
      the last batch), negatives as in training, and scores float32 [b] where the task
      has them. All hosts get the same number of batches.
    """
    dataset_checks.check_process_count(cfg.batch_size, process_count)
    if isinstance(examples, MixedExamples):
        raise ValueError(_MIXTURE_REFUSED)
    dataset_checks.check_crowding([examples], cfg.lengths(), cfg.on_crowding)
    return batching.eval_batches(
        examples,
        cfg.lengths(),
        batch_size=cfg.batch_size,
        num_negatives=cfg.num_negatives,
        process_index=process_index,
        process_count=process_count,
    )


def prefetch(
    batches: batching.Batches,
    start_step: int,
    put: Callable[[batching.Batch], Any],
    depth: int = 2,
) -> prefetching.Prefetcher:
    """Builds batches ahead of the training loop, in a thread.

    Args:
      batches: from `make_batches`.
      start_step: the first step wanted; nothing before it is built.
      put: takes a host's batch to its devices.
      depth: how many batches to keep ready.

    Returns:
      An iterator of (step, what `put` returned, row ids int64 [b]); close it when done.
    """
    return prefetching.Prefetcher(batches, start_step, put, depth)


def tokenizer(cfg: DatasetConfig) -> tokenizer_lib.Tokenizer:
    """Returns the vocabulary that the task is tokenized with."""
    task, _ = cfg.tasks()[0]
    vocabulary = task.output_features[names.INPUTS].vocabulary
    return tokenizer_lib.Tokenizer(
        vocabulary.sentencepiece_model_file, vocabulary.extra_ids
    )


def check_token_ids(examples: Examples, vocab_size: int) -> None:
    """Checks that an embedding table has a row for every id of the vocabulary.

    JAX clamps an index beyond an array's end without a word, so that too small a table
    would train on wrong rows.

    Args:
      examples: from `load_examples`.
      vocab_size: rows of the table.

    Raises:
      ValueError: the vocabulary, sentinels included, has more ids than the table rows.
    """
    for part, _ in _mixture_parts(examples):
        needed = max(part.vocabulary_size, part.max_id + 1)
        if vocab_size < needed:
            raise ValueError(
                f"The vocabulary of task {part.task_name!r} has {needed} ids (the "
                f"largest in its texts is {part.max_id}), but the embedding table has "
                f"vocab_size={vocab_size} rows. Set T5Config.vocab_size to at least "
                f"{needed}; for T5's own vocabulary of 32000 pieces and 100 sentinels "
                "it is 32128."
            )


def scores(examples: Examples) -> np.ndarray:
    """Returns the similarity judgements of a task, float32 [n].

    Raises:
      ValueError: it has none, or there are several tasks.
    """
    if isinstance(examples, MixedExamples):
        raise ValueError(_MIXTURE_REFUSED)
    if examples.scores is None:
        raise ValueError(
            f"Task {examples.task_name!r} has no scores, so it can't be evaluated as "
            "STS. Use it as train_eval_dataset_cfg, or choose a task of tasks/sts.py."
        )
    return examples.scores


def _mixture_parts(examples: Examples) -> tuple[tuple[TokenizedExamples, float], ...]:
    if isinstance(examples, MixedExamples):
        return examples.parts
    return ((examples, 1.0),)


def _check_integer(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}.")
