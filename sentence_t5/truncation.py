"""Texts longer than a model reads: how many there are, and the note that says so."""

from collections.abc import Sequence

from sentence_t5 import inference


def count(
    model: inference.SentenceT5,
    texts: Sequence[str],
    max_length: int,
    prompt: str | Sequence[str],
) -> int:
    """Counts the texts that are trimmed.

    Args:
        model: the model.
        texts: what is encoded.
        max_length: tokens a text is trimmed to, its prompt's and EOS included.
        prompt: put before each text, or one for each; "" is none.
    """
    return int(model.truncated(texts, max_length, instruction=prompt).sum())


def notes(
    num_truncated: int, num_texts: int, max_length: int, kind: str = "texts"
) -> list[str]:
    """Returns the note of a report's entry, or none where nothing was trimmed."""
    if not num_truncated:
        return []
    share = f"{num_truncated} of {num_texts} {kind}"
    return [f"{share} truncated (max {max_length} tokens)."]
