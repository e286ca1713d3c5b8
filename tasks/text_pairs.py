"""What all tasks share: rows of texts become a SeqIO task of token ids.

A row is a dict: `inputs` str, `targets` str, and, where the source has them,
`negative_targets` (any number of strings) and `scores` (a float). The task tokenizes,
trims each text to L-1 tokens and appends EOS, so that a text always ends in EOS.

    inputs [T]   targets [T]   negative_targets [N T] (ragged)   scores []

Each text may have an instruction before it: `inputs_instruction` str and so on. The two
are tokenized apart and joined, as if white space lay between them: no token holds parts
of both, and a text has the same tokens whatever is before it. How many of the joined
tokens are the instruction's is a feature too:

    inputs_instruction_length []   negative_targets_instruction_length [N]
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from sentence_t5 import names, whole_files

Row = Mapping[str, Any]

# Rows are handed on in blocks: one by one is ten times slower.
BLOCK_ROWS = 1024
_TEXTS = (names.INPUTS, names.TARGETS)


class RowSource(seqio.DataSource):
    """A SeqIO data source over a function that yields rows in a fixed order.

    Attributes:
      error: what the function raised while TensorFlow was asking it for rows, since
        TensorFlow passes on its text only; None if nothing went wrong.
      has_negatives: whether rows have `negative_targets`.
      has_scores: whether rows have `scores`.
      has_instructions: whether rows have an instruction for each text.
      in_batch_negatives: whether rows are negatives to each other.
      streams: whether the first rows cost little.
    """

    def __init__(
        self,
        rows: Callable[[str], Iterable[Row]],
        identity: Callable[[str], Mapping[str, Any]],
        splits: Sequence[str],
        *,
        negatives: bool = False,
        scores: bool = False,
        instructions: bool = False,
        in_batch_negatives: bool = True,
        streams: bool = True,
    ):
        """Makes a source.

        Args:
          rows: from a split's name to its rows; always the same rows in the same order.
          identity: from a split's name to a JSON-able description that changes whenever
            the rows change (file contents, versions, seeds). It keys the token cache.
          splits: the names of the splits.
          negatives: whether rows have `negative_targets`.
          scores: whether rows have `scores`.
          instructions: whether rows have an instruction for each text, such as
            `inputs_instruction`; "" for none.
          in_batch_negatives: False if the other rows of a batch may well be as right
            as a row's own right text (many rows share a label, say): they are no
            negatives then, and only a row's own hard negatives are.
          streams: False if everything is read before the first row is given.
        """
        self._rows = rows
        self._identity = identity
        self.has_negatives = negatives
        self.has_scores = scores
        self.has_instructions = instructions
        self.in_batch_negatives = in_batch_negatives
        self.streams = streams
        self.error: Exception | None = None
        super().__init__(splits=splits, caching_permitted=True)

    def identity(self, split: str) -> Mapping[str, Any]:
        """Returns what the rows of `split` depend on; see `__init__`."""
        return self._identity(split)

    def holding(self, rows: Sequence[Row]) -> "RowSource":
        """Returns a source like this one that holds only `rows`."""
        return RowSource(
            rows=lambda split: rows,
            identity=lambda split: {"rows": repr(rows)},
            splits=self.splits,
            negatives=self.has_negatives,
            scores=self.has_scores,
            instructions=self.has_instructions,
            in_batch_negatives=self.in_batch_negatives,
        )

    def rows(self, split: str) -> Iterable[Row]:
        """Returns the rows of `split` as they are."""
        return self._rows(split)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """False: rows come from one function."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the one shard of `split`."""
        return [split]

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        *,
        sequence_length: Mapping[str, int] | None = None,
        use_cached: bool = False,
        num_epochs: int | None = 1,
    ) -> tf.data.Dataset:
        """Returns the rows, as strings; see `seqio.DataSource`."""
        if shard_info and shard_info.num_shards > 1:
            raise ValueError(
                f"{type(self).__name__} has one shard, got num_shards="
                f"{shard_info.num_shards}; shard the examples instead."
            )
        text = tf.TensorSpec([None], tf.string)
        spec = {names.INPUTS: text, names.TARGETS: text}
        if self.has_negatives:
            spec[names.NEGATIVE_TARGETS] = tf.RaggedTensorSpec([None, None], tf.string)
            if self.has_instructions:
                spec[instruction_key(names.NEGATIVE_TARGETS)] = spec[
                    names.NEGATIVE_TARGETS
                ]
        if self.has_instructions:
            spec |= {instruction_key(key): text for key in _TEXTS}
        if self.has_scores:
            spec[names.SCORES] = tf.TensorSpec([None], tf.float32)
        blocks = tf.data.Dataset.from_generator(
            lambda: self._blocks(split), output_signature=spec
        )
        return blocks.unbatch()

    def blocks(self, split: str) -> Iterator[list[Row]]:
        """Yields the rows of `split` as they are, in blocks."""
        rows = iter(self.rows(split))
        while block := list(itertools.islice(rows, BLOCK_ROWS)):
            yield block

    def _blocks(self, split: str) -> Iterable[Mapping[str, Any]]:
        """Yields the rows in blocks of tensors, remembering what went wrong."""
        self.error = None
        try:
            for block in self.blocks(split):
                yield self._stack(block)
        except Exception as error:
            self.error = error
            raise

    def _stack(self, block: Sequence[Row]) -> Mapping[str, Any]:
        """Turns rows into one dict of tensors with a leading row axis."""
        texts = _with_instructions(_TEXTS, self.has_instructions)
        stacked = {key: [row[key] for row in block] for key in texts}
        lists = (names.NEGATIVE_TARGETS,) if self.has_negatives else ()
        for key in _with_instructions(lists, self.has_instructions):
            negatives = [list(row[key]) for row in block]
            stacked[key] = tf.RaggedTensor.from_row_lengths(
                tf.constant(list(itertools.chain(*negatives)), tf.string),
                [len(texts) for texts in negatives],
            )
        if self.has_scores:
            stacked[names.SCORES] = [float(row[names.SCORES]) for row in block]
        return stacked


def task(name: str, source: RowSource, vocabulary: seqio.Vocabulary) -> seqio.Task:
    """Makes the SeqIO task that tokenizes the rows of `source`.

    Args:
      name: the task's name: letters, digits, `_`, `.`, `:` and `#`.
      source: the rows.
      vocabulary: turns texts into ids; shared by all features.

    Returns:
      A task that is in no registry.
    """
    features = {key: seqio.Feature(vocabulary, add_eos=True) for key in _TEXTS}
    if source.has_negatives:
        features[names.NEGATIVE_TARGETS] = seqio.Feature(
            vocabulary, add_eos=True, rank=2
        )
    numbers = {}
    if source.has_instructions:
        numbers = {
            f"{key}{names.INSTRUCTION_LENGTH}": (tf.int32, feature.rank - 1)
            for key, feature in features.items()
        }
    if source.has_scores:
        numbers[names.SCORES] = (tf.float32, 0)
    for key, (dtype, rank) in numbers.items():
        features[key] = seqio.Feature(
            seqio.PassThroughVocabulary(size=1), add_eos=False, dtype=dtype, rank=rank
        )
    return seqio.Task(
        name,
        source=source,
        output_features=features,
        preprocessors=_PREPROCESSORS,
    )


def tokenize(
    dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]
) -> tf.data.Dataset:
    """Turns the texts into ids, without EOS; scores pass unchanged."""
    texts = {k: f for k, f in output_features.items() if f.add_eos}
    with_length = [
        k for k in texts if f"{k}{names.INSTRUCTION_LENGTH}" in output_features
    ]
    instructions = {instruction_key(key): texts[key] for key in with_length}
    dataset = seqio.preprocessors.tokenize(
        dataset, {**texts, **instructions}, copy_pretokenized=False
    )
    return dataset.map(_join, tf.data.AUTOTUNE) if with_length else dataset


def _join(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Puts instructions before their texts and counts their ids."""
    joined = dict(row)
    for key in [key for key in row if instruction_key(key) in row]:
        before = joined.pop(instruction_key(key))
        if isinstance(before, tf.RaggedTensor):
            length = before.row_lengths()
        else:
            length = tf.shape(before)[0]
        joined[key] = tf.concat([before, row[key]], axis=-1)
        joined[f"{key}{names.INSTRUCTION_LENGTH}"] = tf.cast(length, tf.int32)
    return joined


_PREPROCESSORS = [tokenize, seqio.preprocessors.append_eos_after_trim]


def is_plain(task: seqio.Task) -> bool:
    """Returns whether `encode` applies: a task as `task` makes it, and no more."""
    vocabularies = [f.vocabulary for f in task.output_features.values() if f.add_eos]
    return (
        isinstance(task.source, RowSource)
        and list(task.preprocessors) == _PREPROCESSORS
        and all(type(v) is seqio.SentencePieceVocabulary for v in vocabularies)
        and all(v == vocabularies[0] for v in vocabularies)
    )


def encode(task: seqio.Task, rows: Sequence[Row]) -> dict[str, list]:
    """Turns rows of a plain task into ids with EOS, without TensorFlow.

    Gives what `task.get_dataset(sequence_length=None)` gives, many times faster.

    Args:
      task: one for which `is_plain` is true.
      rows: some of its source's rows.

    Returns:
      For each feature, the list of its values: ids, lists of ids, or numbers.
    """
    processor = task.output_features[names.INPUTS].vocabulary.tokenizer
    source = task.source

    def encode_column(
        key: str, texts: list[str], befores: list[str]
    ) -> dict[str, list]:
        ids = processor.encode(texts, add_eos=True, num_threads=-1) if texts else []
        if not source.has_instructions:
            return {key: ids}
        before = {text: processor.encode(text) for text in set(befores)}
        return {
            key: [before[b] + row for b, row in zip(befores, ids, strict=True)],
            f"{key}{names.INSTRUCTION_LENGTH}": [len(before[b]) for b in befores],
        }

    encoded = {}
    for key in _TEXTS:
        befores = [row.get(instruction_key(key), "") for row in rows]
        encoded |= encode_column(key, [row[key] for row in rows], befores)
    if source.has_negatives:
        key = names.NEGATIVE_TARGETS
        groups = [row[key] for row in rows]
        flat = encode_column(
            key,
            [text for texts in groups for text in texts],
            [text for row in rows for text in row.get(instruction_key(key), ())],
        )
        for name, values in flat.items():
            left = iter(values)
            encoded[name] = [list(itertools.islice(left, len(g))) for g in groups]
    if source.has_scores:
        scores = np.asarray([row[names.SCORES] for row in rows], np.float32)
        encoded[names.SCORES] = scores.tolist()
    return encoded


def instruction_key(key: str) -> str:
    """Names the instruction before a text: `inputs` → `inputs_instruction`."""
    return f"{key}{names.INSTRUCTION}"


def _with_instructions(keys: Sequence[str], has_instructions: bool) -> list[str]:
    return [*keys, *(instruction_key(key) for key in keys if has_instructions)]


def source_sha256(*paths: str) -> str:
    """Returns a hash of the contents of source files, for `RowSource.identity`."""
    return hashlib.sha256("".join(map(file_sha256, paths)).encode()).hexdigest()


def file_sha256(path: str) -> str:
    """Returns a hash of a file's contents; anything that `tf.io.gfile` reads."""
    return whole_files.sha256(path, tf.io.gfile.GFile)
