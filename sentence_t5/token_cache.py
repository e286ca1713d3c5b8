"""Runs a SeqIO task once and keeps its token ids in memory-mapped files.

Training walks examples by index, in any order, on every host; `tf.data` can only stream
them. So a task is tokenized once, untrimmed, into the files of `tokenized`, in a folder
named by a hash of everything that the ids depend on: the source's contents, the
preprocessors' code, the vocabulary and the features. A folder is written elsewhere and
renamed, so that it is complete or absent.
"""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator

import seqio
import tensorflow as tf

from sentence_t5 import names, task_identity, tokenized
from sentence_t5.tasks import text_pairs

_logger = logging.getLogger(__name__)

_ENVIRONMENT = "SENTENCE_T5_CACHE"
_DEFAULT_DIR = "~/.cache/sentence_t5/tokens"
_CHECKED_ROWS = 8


def load(
    task: seqio.Task, split: str, cache_dir: str | None
) -> tokenized.TokenizedExamples:
    """Returns the tokenized examples of a task, from the cache where it has them.

    Args:
      task: gives rank-1 `inputs` and `targets`, optionally rank-2 `negative_targets`,
        float `scores`, and how many of a text's ids are an instruction's
        (`inputs_instruction_length` and so on). Each text ends in EOS.
      split: one of the task's splits.
      cache_dir: a local folder; None for ~/.cache. The environment variable
        SENTENCE_T5_CACHE wins over both.

    Raises:
      ValueError: the task draws at random, has no rows, or leaves out EOS.
    """
    key = task_identity.cache_key(task, split, tokenized.FORMAT)
    if key is None:
        _logger.info(
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
        _logger.warning(
            "The token cache %s cannot be written (%s): %r is tokenized anew. Set %s "
            "or `DatasetConfig.cache_dir` to a folder that can be written.",
            cache_dir,
            error,
            task.name,
            _ENVIRONMENT,
        )
        return _build_temporary(task, split)
    with lock, _exclusive(lock) as alone:
        folder = root / key
        if alone:
            _clear_away(root, key)
        if examples := _hit(task, split, folder):
            return examples
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=root) as building:
            fresh = pathlib.Path(building) / "new"
            _build(task, split, fresh)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.replace(fresh, folder)
            except OSError as error:  # without a lock, another may have been faster
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        return tokenized.open_folder(folder)


def _root(cache_dir: str | None) -> pathlib.Path:
    """Returns the folder that holds all cached tasks."""
    chosen = os.environ.get(_ENVIRONMENT) or cache_dir or _DEFAULT_DIR
    if "://" in str(chosen):
        raise ValueError(
            f"The token cache must be a local folder, since it is memory-mapped; got "
            f"{chosen!r}. Set {_ENVIRONMENT} or `DatasetConfig.cache_dir`."
        )
    return pathlib.Path(chosen).expanduser()


def _clear_away(root: pathlib.Path, key: str) -> None:
    """Removes what killed processes had begun to build."""
    for path in root.glob(f"{key}.*"):
        if path.is_dir():
            _logger.warning("Removing %s: its building was interrupted.", path)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(file) -> Iterator[bool]:
    """Holds a lock, so that of several processes on a machine one tokenizes.

    Yields:
      Whether it is held. Some network file systems have none: at worst the work is done
      twice.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _hit(
    task: seqio.Task, split: str, folder: pathlib.Path
) -> tokenized.TokenizedExamples | None:
    """Opens `folder` if it is whole and its first rows are what the task gives."""
    if not folder.exists():
        return None
    try:
        examples = tokenized.open_folder(folder)
    except (OSError, ValueError, KeyError) as error:
        _logger.warning("Damaged token cache %s (%s): tokenizing anew.", folder, error)
        return None
    for index, row in enumerate(_head(task, split)):
        if index >= len(examples) or row != examples.row(index):
            _logger.warning(
                "Task %r no longer gives the ids in %s (row %d): tokenizing anew.",
                task.name,
                folder,
                index,
            )
            return None
    return examples


def _build_temporary(task: seqio.Task, split: str) -> tokenized.TokenizedExamples:
    """Tokenizes into a folder that goes away with the examples."""
    parent = tempfile.mkdtemp(prefix="sentence_t5-tokens-")
    folder = pathlib.Path(parent) / "new"
    try:
        _build(task, split, folder)
        examples = tokenized.open_folder(folder)
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    weakref.finalize(examples, shutil.rmtree, parent, ignore_errors=True)
    return examples


def _build(task: seqio.Task, split: str, folder: pathlib.Path) -> None:
    """Tokenizes all rows of a task into `folder`."""
    folder.mkdir()
    vocabulary = task.output_features[names.INPUTS].vocabulary
    writer = tokenized.Writer(folder, task.name, vocabulary.vocab_size)
    plain = text_pairs.is_plain(task)
    for block in _plain_blocks(task, split) if plain else _any_blocks(task, split):
        writer.append(block)
    writer.close(split, getattr(task.source, "in_batch_negatives", True))


def _plain_blocks(task: seqio.Task, split: str) -> Iterator[tokenized.Block]:
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


def _any_blocks(task: seqio.Task, split: str) -> Iterator[tokenized.Block]:
    """Yields all rows of any task, after a check that it does not draw at random."""
    if _seqio_rows(task, split) != _seqio_rows(task, split):
        raise ValueError(
            f"Task {task.name!r} gives other ids each time it is read: it shuffles or "
            "draws at random. It is tokenized once, so that chance would be frozen "
            "for all epochs. Give all candidates as a list in `negative_targets`; "
            "`DatasetConfig.num_negatives` draws from them anew in each epoch."
        )
    yield from _seqio_blocks(task, split)


def _rows(block: tokenized.Block) -> list[dict]:
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
) -> Iterator[tokenized.Block]:
    """Yields rows in blocks, as `task.get_dataset` gives them."""
    # TensorFlow reads and tokenizes; the accelerators are JAX's.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    lengths = [f"{key}{names.INSTRUCTION_LENGTH}" for key in tokenized.TEXTS]
    wanted = [
        key
        for key in (*tokenized.TEXTS, *lengths, names.SCORES)
        if key in task.output_features
    ]
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
