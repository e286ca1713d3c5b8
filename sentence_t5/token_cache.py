"""Runs a SeqIO task once and keeps its token ids in memory-mapped files.

Training walks examples by index, in any order, on every host; `tf.data` can only stream
them. So a task is tokenized once, untrimmed, into flat arrays:

    inputs.tokens [T]  inputs.starts [n+1]       row i is tokens[starts[i]:starts[i+1]]
    negative_targets.rows [n+1]                  row i has texts rows[i]..rows[i+1]-1

in a folder named by a hash of everything that the ids depend on: the source's contents,
the preprocessors' code, the vocabulary and the features. A folder is written elsewhere
and renamed, so that it is complete or absent.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from absl import logging

from sentence_t5 import names, task_identity
from sentence_t5.tasks import text_pairs

_FORMAT = 1
_ENVIRONMENT = "SENTENCE_T5_CACHE"
_DEFAULT_DIR = "~/.cache/sentence_t5/tokens"
_CHECKED_ROWS = 8
_TEXTS = (names.INPUTS, names.TARGETS, names.NEGATIVE_TARGETS)

# A block of rows as numpy: for each text feature the list of its rows (a list of ids,
# or, for negatives, a list of lists of ids); for scores a list of floats.
Block = Mapping[str, list]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token ids of many texts, end to end.

    Attributes:
      tokens: ids, each text ending in EOS; [T], uint16 or int32.
      starts: where each text starts, and the end of the last one; int64 [n+1].
    """

    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        return self.tokens[self.starts[index] : self.starts[index + 1]].tolist()

    def num_longer(self, length: int) -> int:
        """Returns how many texts have more than `length` tokens, EOS included."""
        return int(np.count_nonzero(np.diff(self.starts) > length))


@dataclasses.dataclass(frozen=True)
class TokenizedExamples:
    """All examples of one split of one task, by index.

    Attributes:
      task_name: the SeqIO task.
      split: its split.
      fingerprint: hash of the ids and scores themselves: equal for equal examples.
      vocabulary_size: pieces and sentinels of the vocabulary.
      max_id: the largest id that occurs.
      texts: for each text feature, its texts.
      negative_rows: row i has the negatives `negative_rows[i]` up to, not including,
        `negative_rows[i + 1]`; int64 [n+1]. None without negatives.
      scores: similarity judgements; float32 [n]. None without scores.
    """

    task_name: str
    split: str
    fingerprint: str
    vocabulary_size: int
    max_id: int
    texts: Mapping[str, Texts]
    negative_rows: np.ndarray | None = None
    scores: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts[names.INPUTS])

    def row(self, index: int) -> Mapping[str, Any]:
        """Returns the ids (untrimmed, with EOS) and the score of one example."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)} in {self.task_name!r}.")
        row = {key: self.texts[key][index] for key in _TEXTS[:2] if key in self.texts}
        if self.negative_rows is not None:
            first, last = self.negative_rows[index : index + 2]
            negatives = self.texts[names.NEGATIVE_TARGETS]
            row[names.NEGATIVE_TARGETS] = [negatives[i] for i in range(first, last)]
        if self.scores is not None:
            row[names.SCORES] = float(self.scores[index])
        return row


def load(task: seqio.Task, split: str, cache_dir: str | None) -> TokenizedExamples:
    """Returns the tokenized examples of a task, from the cache where it has them.

    Args:
      task: gives rank-1 `inputs` and `targets`, optionally rank-2 `negative_targets`
        and float `scores`. Each text ends in EOS.
      split: one of the task's splits.
      cache_dir: a local folder; None for ~/.cache. The environment variable
        SENTENCE_T5_CACHE wins over both.

    Raises:
      ValueError: the task draws at random, has no rows, or leaves out EOS.
    """
    # TensorFlow reads and tokenizes; the accelerators are JAX's.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    key = task_identity.cache_key(task, split, _FORMAT)
    if key is None:
        logging.info(
            "Task %r reads from a source whose contents cannot be fingerprinted: it is "
            "tokenized anew at each start.",
            task.name,
        )
        return _build_temporary(task, split)
    try:
        root = _root(cache_dir)
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"{key}.lock", "w")  # noqa: SIM115
    except OSError as error:
        logging.warning(
            "The token cache %s cannot be written (%s): %r is tokenized anew. Set %s "
            "or `DatasetConfig.cache_dir` to a folder that can be written.",
            cache_dir,
            error,
            task.name,
            _ENVIRONMENT,
        )
        return _build_temporary(task, split)
    with lock, _exclusive(lock):
        folder = root / key
        if examples := _hit(task, split, folder):
            return examples
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=root) as building:
            fresh = pathlib.Path(building) / "new"
            _build(task, split, fresh)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(fresh, folder)
        return _open(folder)


def _root(cache_dir: str | None) -> pathlib.Path:
    """Returns the folder that holds all cached tasks."""
    chosen = os.environ.get(_ENVIRONMENT) or cache_dir or _DEFAULT_DIR
    if "://" in str(chosen):
        raise ValueError(
            f"The token cache must be a local folder, since it is memory-mapped; got "
            f"{chosen!r}. Set {_ENVIRONMENT} or `DatasetConfig.cache_dir`."
        )
    return pathlib.Path(chosen).expanduser()


@contextlib.contextmanager
def _exclusive(file) -> Iterator[None]:
    """Holds a lock, so that of several processes on a machine one tokenizes."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # Some network file systems: at worst the work is done twice.
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _hit(
    task: seqio.Task, split: str, folder: pathlib.Path
) -> TokenizedExamples | None:
    """Opens `folder` if it is whole and its first rows are what the task gives."""
    if not folder.exists():
        return None
    try:
        examples = _open(folder)
    except (OSError, ValueError, KeyError) as error:
        logging.warning("Damaged token cache %s (%s): tokenizing anew.", folder, error)
        return None
    for index, row in enumerate(_head(task, split)):
        if index >= len(examples) or row != examples.row(index):
            logging.warning(
                "Task %r no longer gives the ids in %s (row %d): tokenizing anew.",
                task.name,
                folder,
                index,
            )
            return None
    return examples


def _build_temporary(task: seqio.Task, split: str) -> TokenizedExamples:
    """Tokenizes into a folder that goes away with the examples."""
    parent = tempfile.mkdtemp(prefix="sentence_t5-tokens-")
    folder = pathlib.Path(parent) / "new"
    try:
        _build(task, split, folder)
        examples = _open(folder)
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    weakref.finalize(examples, shutil.rmtree, parent, ignore_errors=True)
    return examples


def _build(task: seqio.Task, split: str, folder: pathlib.Path) -> None:
    """Tokenizes all rows of a task into `folder`."""
    folder.mkdir()
    vocabulary = task.output_features[names.INPUTS].vocabulary
    writer = _Writer(folder, task, vocabulary.vocab_size)
    plain = text_pairs.is_plain(task)
    for block in _plain_blocks(task, split) if plain else _any_blocks(task, split):
        writer.append(block)
    writer.close(split)


def _plain_blocks(task: seqio.Task, split: str) -> Iterator[Block]:
    """Yields all rows of a task of our own kind, encoded straight by SentencePiece.

    That is many times faster than row by row in `tf.data`. The first rows are compared
    with what SeqIO gives.
    """
    for index, rows in enumerate(task.source.blocks(split)):
        if index == 0:
            head = rows[:_CHECKED_ROWS]
            by_seqio = _seqio_rows(
                task.replace(source=task.source.holding(head)), split
            )
            if _rows(text_pairs.encode(task, head)) != by_seqio:
                raise RuntimeError(
                    f"Task {task.name!r}: tensorflow-text and sentencepiece give other "
                    "ids for the first rows. Install versions that agree."
                )
        yield text_pairs.encode(task, rows)


def _any_blocks(task: seqio.Task, split: str) -> Iterator[Block]:
    """Yields all rows of any task, after a check that it does not draw at random."""
    if _seqio_rows(task, split) != _seqio_rows(task, split):
        raise ValueError(
            f"Task {task.name!r} gives other ids each time it is read: it shuffles or "
            "draws at random. It is tokenized once, so that chance would be frozen "
            "for all epochs. Give all candidates as a list in `negative_targets`; "
            "`DatasetConfig.num_negatives` draws from them anew in each epoch."
        )
    yield from _seqio_blocks(task, split)


def _rows(block: Block) -> list[dict]:
    """Returns the rows of a block as dicts."""
    return [
        dict(zip(block, values, strict=True))
        for values in zip(*block.values(), strict=True)
    ]


def _head(task: seqio.Task, split: str) -> list[dict]:
    """Returns the first rows as they should be in the cache, if that is quick."""
    if not text_pairs.is_plain(task):
        return _seqio_rows(task, split)
    if not task.source.streams:
        return []
    rows = next(task.source.blocks(split), [])
    return _rows(text_pairs.encode(task, rows[:_CHECKED_ROWS]))


def _seqio_rows(task: seqio.Task, split: str) -> list[dict]:
    """Returns the first rows as SeqIO gives them."""
    block = next(_seqio_blocks(task, split, _CHECKED_ROWS), None)
    return _rows(block) if block else []


def _seqio_blocks(
    task: seqio.Task, split: str, limit: int | None = None
) -> Iterator[Block]:
    """Yields rows in blocks, as `task.get_dataset` gives them."""
    wanted = [key for key in (*_TEXTS, names.SCORES) if key in task.output_features]
    try:
        dataset = task.get_dataset(
            sequence_length=None,
            split=split,
            shuffle=False,
            num_epochs=1,
            try_in_mem_cache=False,
        )
        missing = [key for key in wanted if key not in dataset.element_spec]
        if missing:
            raise ValueError(
                f"Task {task.name!r} declares the features {missing} but its "
                f"preprocessors give only {sorted(dataset.element_spec)}."
            )
        dataset = dataset.map(lambda row: {key: row[key] for key in wanted})
        if limit is not None:
            dataset = dataset.take(limit)
        for block in dataset.ragged_batch(text_pairs.BLOCK_ROWS):
            yield {key: _to_list(block[key]) for key in wanted}
    except tf.errors.OpError:
        # TensorFlow keeps only the text of what went wrong in Python.
        if error := getattr(task.source, "error", None):
            raise error from None
        raise


def _to_list(tensor: tf.Tensor | tf.RaggedTensor) -> list:
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.to_list()
    return tensor.numpy().tolist()


class _Writer:
    """Appends blocks of rows to the files of one folder."""

    def __init__(self, folder: pathlib.Path, task: seqio.Task, vocabulary_size: int):
        self._folder = folder
        self._task = task
        self._vocabulary_size = vocabulary_size
        self._dtype = np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")
        self._lengths = collections.defaultdict(list)
        self._hashes = collections.defaultdict(hashlib.sha256)
        self._max_id = -1
        self._num_rows = 0

    def append(self, block: Block) -> None:
        """Appends a block of rows."""
        for key, rows in block.items():
            if key == names.SCORES:
                self._write("scores", np.asarray(rows, "<f4"))
                continue
            if key == names.NEGATIVE_TARGETS:
                self._lengths[f"{key}.rows"].extend(map(len, rows))
                rows = [text for texts in rows for text in texts]
            self._check_eos(key, rows)
            self._lengths[f"{key}.starts"].extend(map(len, rows))
            ids = np.asarray([token for text in rows for token in text], np.int64)
            self._check_ids(key, ids)
            self._write(f"{key}.tokens", ids.astype(self._dtype))
        self._num_rows += len(block[names.INPUTS])

    def close(self, split: str) -> None:
        """Writes where the rows start, and the description that completes a folder."""
        if not self._num_rows:
            raise ValueError(
                f"Task {self._task.name!r} has no rows in split {split!r}."
            )
        digest = hashlib.sha256()
        for name, lengths in self._lengths.items():
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
            self._write(name, starts)
        for name, part in sorted(self._hashes.items()):
            digest.update(f"{name} {part.hexdigest()}\n".encode())
        description = {
            "format": _FORMAT,
            "task": self._task.name,
            "split": split,
            "num_rows": self._num_rows,
            "dtype": self._dtype.str,
            "vocabulary_size": self._vocabulary_size,
            "max_id": self._max_id,
            "files": {
                name: (self._folder / name).stat().st_size for name in self._hashes
            },
            "fingerprint": digest.hexdigest(),
        }
        (self._folder / "description.json").write_text(
            json.dumps(description, indent=2), encoding="utf-8"
        )

    def _write(self, name: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._hashes[name].update(data)
        with open(self._folder / name, "ab") as file:
            file.write(data)

    def _check_eos(self, key: str, texts: list[list[int]]) -> None:
        for index, text in enumerate(texts):
            if not text or text[-1] != names.EOS_ID:
                raise ValueError(
                    f"Task {self._task.name!r}: text {index} of {key!r} near row "
                    f"{self._num_rows} does not end in EOS (id {names.EOS_ID}); its "
                    f"last ids are {text[-3:]}. Add "
                    "`seqio.preprocessors.append_eos_after_trim` as the last "
                    "preprocessor, and `add_eos=True` to the feature."
                )

    def _check_ids(self, key: str, ids: np.ndarray) -> None:
        if not ids.size:
            return
        self._max_id = max(self._max_id, int(ids.max()))
        if ids.min() < 0 or ids.max() >= self._vocabulary_size:
            raise ValueError(
                f"Task {self._task.name!r}: {key!r} has ids from {ids.min()} to "
                f"{ids.max()}, outside its vocabulary of {self._vocabulary_size}."
            )


def _open(folder: pathlib.Path) -> TokenizedExamples:
    """Maps the files of a complete folder into memory."""
    text = (folder / "description.json").read_text(encoding="utf-8")
    description = json.loads(text)
    for name, size in description["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} has not its {size} bytes")

    def read(name: str, dtype: str) -> np.ndarray:
        if not description["files"][name]:
            return np.empty(0, dtype)
        return np.memmap(folder / name, dtype, mode="r")

    files = description["files"]
    texts = {
        key: Texts(
            read(f"{key}.tokens", description["dtype"]), read(f"{key}.starts", "<i8")
        )
        for key in _TEXTS
        if f"{key}.starts" in files
    }
    negative_rows = f"{names.NEGATIVE_TARGETS}.rows"
    return TokenizedExamples(
        task_name=description["task"],
        split=description["split"],
        fingerprint=description["fingerprint"],
        vocabulary_size=description["vocabulary_size"],
        max_id=description["max_id"],
        texts=texts,
        negative_rows=read(negative_rows, "<i8") if negative_rows in files else None,
        scores=read("scores", "<f4") if "scores" in files else None,
    )
