"""Vocabularies for SeqIO tasks: a SentencePiece file, or the project's own small one.

Both follow T5: pad 0, EOS 1, unknown 2, no BOS, and `extra_ids` sentinels numbered
downwards from the end, so that `<extra_id_0>` has the largest id. The public T5
vocabulary has 32,000 pieces and 100 sentinels; its models have a table of 32,128 rows.
"""

import hashlib
import importlib.resources

import seqio

from sentence_t5 import tokenizer


def sentencepiece(path: str, extra_ids: int = 100) -> seqio.SentencePieceVocabulary:
    """Opens a SentencePiece vocabulary, checking at once that it can be used.

    Args:
      path: a `.model` file, local or in a bucket (`gs://`).
      extra_ids: sentinels after the model's own pieces; 100 for T5.

    Returns:
      The vocabulary, loaded.

    Raises:
      FileNotFoundError: nothing is at `path`, or its bucket cannot be reached.
      ValueError: the file is no SentencePiece model, or pad or EOS is not T5's.
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"The vocabulary's path must be a string, got {path!r}.")
    try:
        tokenizer.Tokenizer(path, extra_ids)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error} To `sentence-t5 train` this is --vocabulary; in a gin file "
            "`VOCABULARY_PATH`, the `path` of `vocabularies.sentencepiece`."
        ) from error
    vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)
    vocabulary.load_model()
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
