"""Vocabularies for SeqIO tasks: a SentencePiece file, or the project's own small one.

Both follow T5: pad 0, EOS 1, unknown 2, no BOS, and `extra_ids` sentinels numbered
downwards from the end, so that `<extra_id_0>` has the largest id. The public T5
vocabulary has 32,000 pieces and 100 sentinels; its models have a table of 32,128 rows.
"""

import concurrent.futures
import functools
import hashlib
import importlib.resources

import seqio
import tensorflow as tf

from sentence_t5 import names

# A bucket that cannot be reached is retried for minutes; nobody should wait for that.
_REMOTE_TIMEOUT_SECONDS = 20.0
_WHAT_TO_SET = (
    "Set `sentencepiece.path` (the gin macro VOCABULARY_PATH) to a SentencePiece model "
    "file, such as T5's own spiece.model."
)


def sentencepiece(path: str, extra_ids: int = 100) -> seqio.SentencePieceVocabulary:
    """Opens a SentencePiece vocabulary, checking at once that it can be used.

    Args:
      path: a `.model` file; anything that `tf.io.gfile` reads, such as `gs://`.
      extra_ids: sentinels after the model's own pieces; 100 for T5.

    Returns:
      The vocabulary, loaded.

    Raises:
      FileNotFoundError: nothing is at `path`.
      TimeoutError: a remote path does not answer.
      ValueError: the file is no SentencePiece model, or pad or EOS is not T5's.
    """
    if not path or not isinstance(path, str):
        raise ValueError(f"The vocabulary has no path (got {path!r}). {_WHAT_TO_SET}")
    if not _exists(path):
        raise FileNotFoundError(f"No vocabulary at {path!r}. {_WHAT_TO_SET}")
    vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)
    try:
        vocabulary.load_model()
    except Exception as error:
        raise ValueError(
            f"{path!r} is not a SentencePiece model ({error}). {_WHAT_TO_SET}"
        ) from error
    ids = (vocabulary.tokenizer.pad_id(), vocabulary.eos_id)
    if ids != (names.PAD_ID, names.EOS_ID):
        raise ValueError(
            f"The vocabulary {path!r} has pad and EOS ids {ids}, expected "
            f"{(names.PAD_ID, names.EOS_ID)} as in T5. Train it with "
            "`--pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1`."
        )
    return vocabulary


def synthetic(extra_ids: int = 100) -> seqio.SentencePieceVocabulary:
    """Opens the small vocabulary that ships with the package for `tasks.synthetic`."""
    folder = importlib.resources.files("sentence_t5.tasks")
    return sentencepiece(str(folder / "data" / "synthetic.model"), extra_ids)


def sha256(vocabulary: seqio.Vocabulary) -> str:
    """Returns a hash of what a vocabulary does to a text, file and sentinels."""
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return hashlib.sha256(vocabulary.sp_model).hexdigest()
    description = f"{type(vocabulary).__qualname__} {sorted(vars(vocabulary).items())}"
    return hashlib.sha256(description.encode()).hexdigest()


def _exists(path: str) -> bool:
    """Returns whether a file is at `path`, giving up early on remote file systems."""
    if "://" not in path:
        return tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    answer = pool.submit(functools.partial(tf.io.gfile.exists, path))
    pool.shutdown(wait=False)
    try:
        return answer.result(_REMOTE_TIMEOUT_SECONDS)
    except concurrent.futures.TimeoutError:
        raise TimeoutError(
            f"No answer about the vocabulary {path!r} within "
            f"{_REMOTE_TIMEOUT_SECONDS:.0f} seconds. Copy the file to this machine, or "
            f"check the network. {_WHAT_TO_SET}"
        ) from None
