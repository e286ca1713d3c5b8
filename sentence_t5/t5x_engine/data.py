"""Our batches as the iterators that T5X reads: same rows, same order, same negatives.

T5X's ``train`` takes its data from a function. Instead of SeqIO's pipeline, which would
shuffle and draw negatives in its own way, it gets ``datasets.make_batches`` here. The
batch of a step is a function of the step, so that resuming is a seek to the step of the
checkpoint; what T5X saves beside it says which data that was.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

from sentence_t5 import batching, data_record, datasets, feature_converters, names

_FEATURES = {
    names.LEFT_TOKENS: feature_converters.LEFT,
    names.RIGHT_TOKENS: feature_converters.RIGHT,
    names.NEGATIVE_TOKENS: feature_converters.NEGATIVES,
}
# What the model makes from the tokens, or the evaluation keeps beside them.
_FOLLOWS = {names.NEGATIVE_MASK, names.ROW_MASK, names.SCORES}


class DatasetConfig(datasets.DatasetConfig):
    """``datasets.DatasetConfig``, with what T5X asks any dataset for."""

    use_cached = False
    use_memory_cache = False


class TrainIterator(dataset_iterator.DatasetIterator):
    """Walks through training batches from a step on."""

    def __init__(self, batches: batching.Batches, step: int, record: Mapping[str, Any]):
        """Builds nothing yet.

        Args:
            batches: this host's share.
            step: updates already done.
            record: what a checkpoint says about the data.
        """
        self._batches = batches
        self._first_step = step
        self._step = step
        self._record = dict(record)

    def __next__(self) -> dict[str, np.ndarray]:
        batch, _ = self._batches.batch(self._step)
        self._step += 1
        return to_features(batch)

    def reset(self) -> None:
        """Goes back to the first step."""
        self._step = self._first_step

    @property
    def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
        """Names, dtypes and shapes of this host's rows."""
        return _spec(to_features(self._batches.batch(0)[0]))

    def save(self, filename: epath.PathLike) -> None:
        """Writes what the data is; the place in it is the step of the checkpoint."""
        epath.Path(filename).write_text(json.dumps(self._record))

    def restore(self, filename: epath.PathLike) -> None:
        """Checks that the data is what it was.

        Raises:
            ValueError: it is not.
        """
        before = json.loads(epath.Path(filename).read_text())
        data_record.check_same(before, self._record, epath.Path(filename).parent)


class EvalBatches:
    """Held-out pairs, each time from the start; padding rows are all padding."""

    def __init__(
        self,
        config: datasets.DatasetConfig,
        examples: datasets.Examples,
        max_batches: int,
        **host: int,
    ):
        """Builds nothing yet.

        Args:
            config: lengths and batch size.
            examples: from ``datasets.load_examples(config)``.
            max_batches: how many batches to look at; -1 for all.
            **host: ``process_index`` and ``process_count``.
        """
        self._config = config
        self._examples = examples
        self._max_batches = max_batches
        self._host = host

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        batches = datasets.eval_batches(self._config, self._examples, **self._host)
        for i, batch in enumerate(batches):
            if i == self._max_batches:
                return
            yield to_features(batch)

    @property
    def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
        """Names, dtypes and shapes of this host's rows."""
        return _spec(next(iter(self)))


def to_features(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the tokens of a batch; masks follow from them.

    Raises:
        ValueError: the batch has instructions, or rows without in-batch negatives.
    """
    lost = sorted(batch.keys() - _FEATURES.keys() - _FOLLOWS)
    if lost:
        raise ValueError(
            f"The data has {', '.join(lost)}, which training under T5X does not carry: "
            "run this file by `sentence-t5 train`."
        )
    return {new: batch[old] for old, new in _FEATURES.items() if old in batch}


def _spec(
    features: Mapping[str, np.ndarray],
) -> dict[str, dataset_iterator.ArraySpec]:
    return {
        key: dataset_iterator.ArraySpec(dtype=rows.dtype, shape=rows.shape)
        for key, rows in features.items()
    }
