"""What all tasks share: rows of texts become a SeqIO task of token ids.

A row is a dict: `inputs` str, `targets` str, and, where the source has them,
`negative_targets` (any number of strings) and `scores` (a float). The task tokenizes,
trims each text to L-1 tokens and appends EOS, so that a text always ends in EOS.

    inputs [T]   targets [T]   negative_targets [N T] (ragged)   scores []
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from sentence_t5 import names

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
          streams: False if everything is read before the first row is given.
        """
        self._rows = rows
        self._identity = identity
        self.has_negatives = negatives
        self.has_scores = scores
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
        )

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
        if self.has_scores:
            spec[names.SCORES] = tf.TensorSpec([None], tf.float32)
        blocks = tf.data.Dataset.from_generator(
            lambda: self._blocks(split), output_signature=spec
        )
        return blocks.unbatch()

    def blocks(self, split: str) -> Iterator[list[Row]]:
        """Yields the rows of `split` as they are, in blocks."""
        rows = iter(self._rows(split))
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
        stacked = {key: [row[key] for row in block] for key in _TEXTS}
        if self.has_negatives:
            negatives = [list(row[names.NEGATIVE_TARGETS]) for row in block]
            stacked[names.NEGATIVE_TARGETS] = tf.RaggedTensor.from_row_lengths(
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
    if source.has_scores:
        features[names.SCORES] = seqio.Feature(
            seqio.PassThroughVocabulary(size=1),
            add_eos=False,
            dtype=tf.float32,
            rank=0,
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
    texts = {key: f for key, f in output_features.items() if key != names.SCORES}
    return seqio.preprocessors.tokenize(dataset, texts, copy_pretokenized=False)


_PREPROCESSORS = [tokenize, seqio.preprocessors.append_eos_after_trim]


def is_plain(task: seqio.Task) -> bool:
    """Returns whether `encode` applies: a task as `task` makes it, and no more."""
    vocabularies = [
        feature.vocabulary
        for key, feature in task.output_features.items()
        if key != names.SCORES
    ]
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
      For each feature, the list of its values: ids, lists of ids, or scores.
    """
    processor = task.output_features[names.INPUTS].vocabulary.tokenizer

    def ids(texts: list[str]) -> list[list[int]]:
        return processor.encode(texts, add_eos=True, num_threads=-1) if texts else []

    encoded = {key: ids([row[key] for row in rows]) for key in _TEXTS}
    if task.source.has_negatives:
        groups = [row[names.NEGATIVE_TARGETS] for row in rows]
        flat = iter(ids([text for texts in groups for text in texts]))
        encoded[names.NEGATIVE_TARGETS] = [
            list(itertools.islice(flat, len(texts))) for texts in groups
        ]
    if task.source.has_scores:
        scores = np.asarray([row[names.SCORES] for row in rows], np.float32)
        encoded[names.SCORES] = scores.tolist()
    return encoded


def source_sha256(*paths: str) -> str:
    """Returns a hash of the contents of source files, for `RowSource.identity`."""
    return hashlib.sha256("".join(map(file_sha256, paths)).encode()).hexdigest()


def file_sha256(path: str) -> str:
    """Returns a hash of a file's contents; anything that `tf.io.gfile` reads."""
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
