"""Instructions before texts: which one, how both become tokens, how they share a row.

    "Represent the title:" + "3D"  ─►  [▁Re present ▁the ▁title :] [▁3 D </s>]
                                        instruction, 5 ids          text

The two are tokenized apart, which is what SentencePiece makes of them with white space
in between. So no token holds parts of both, and a text's ids are the same whatever is
before it. White space around an instruction doesn't count; an empty one is none.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sentence_t5 import tokenizer as tokenizer_lib

ON_CROWDING = ("error", "keep_text")


def choose(
    instruction: str | Sequence[str] | None,
    prompt_name: str | None,
    prompts: Mapping[str, str],
    default_prompt: str | None,
) -> str | list[str] | None:
    """Returns the instruction to use.

    Args:
        instruction: one for all texts, or one for each; "" for none at all.
        prompt_name: instead, the name of one of the prompts.
        prompts: the model's.
        default_prompt: name of the one to use if neither is given.

    Returns:
        One string, one for each text, or None.

    Raises:
        TypeError: an instruction that is no string.
        ValueError: both are given, or no prompt has that name.
    """
    if instruction is not None and prompt_name is not None:
        raise ValueError(
            f"got instruction={instruction!r} and prompt_name={prompt_name!r}: give "
            "one of them."
        )
    if instruction is None:
        name = default_prompt if prompt_name is None else prompt_name
        if name is None:
            return None
        if name not in prompts:
            raise ValueError(
                f"The model has no prompt {name!r}; it has "
                f"{', '.join(map(repr, prompts)) or 'none'}. Pass instruction=... "
                "with the text itself."
            )
        return prompts[name]
    if isinstance(instruction, str):
        return instruction
    given = list(instruction)
    for i, each in enumerate(given):
        if not isinstance(each, str):
            raise TypeError(
                f"instruction[{i}] is {each!r} ({type(each).__name__}), expected a "
                "str; '' is none."
            )
    return given


def prepend(
    tokenizer: tokenizer_lib.Tokenizer,
    rows: Sequence[list[int]],
    instruction: str | Sequence[str] | None,
) -> tuple[list[list[int]], np.ndarray]:
    """Puts instructions before tokenized texts.

    Args:
        tokenizer: tokenizes the instructions.
        rows: the texts' ids, each closed by EOS.
        instruction: one for all texts, or one for each.

    Returns:
        The joined ids, and how many of each row are its instruction's, int64 [n].

    Raises:
        ValueError: another number of instructions than texts.
    """
    if instruction is None:
        return list(rows), np.zeros(len(rows), np.int64)
    given = [instruction] * len(rows) if isinstance(instruction, str) else instruction
    if len(given) != len(rows):
        raise ValueError(
            f"got {len(given)} instructions for {len(rows)} texts: give one for each, "
            "or one string for all."
        )
    # Not left to the vocabulary, some of which keep a line's end.
    given = [text.strip() for text in given]
    different = list(dict.fromkeys(given))
    ids = {
        text: row[:-1]  # without EOS
        for text, row in zip(different, tokenizer.encode(different), strict=True)
    }
    joined = [ids[text] + row for text, row in zip(given, rows, strict=True)]
    return joined, np.array([len(ids[text]) for text in given], np.int64)


def fit(
    rows: Sequence[list[int]], lengths: np.ndarray, max_length: int, policy: str
) -> tuple[list[list[int]], np.ndarray]:
    """Cuts instructions that would crowd their text out, as ``kept_lengths`` says.

    Args:
        rows: joined ids.
        lengths: how many of each row are its instruction's, int [n].
        max_length: ids that a row may have.
        policy: ``error`` or ``keep_text``.

    Returns:
        The rows, which may still be too long, and the new lengths.

    Raises:
        ValueError: one would, and ``policy`` is ``error``; or an unknown policy.
    """
    if policy not in ON_CROWDING:
        raise ValueError(
            f"on_crowding: got {policy!r}, expected one of {', '.join(ON_CROWDING)}."
        )
    kept = kept_lengths(lengths, np.array([len(row) for row in rows]), max_length)
    crowded = np.flatnonzero(kept < lengths)
    if not len(crowded):
        return list(rows), lengths
    if policy == "error":
        first = crowded[0]
        raise ValueError(
            f"{len(crowded)} of {len(rows)} texts have an instruction that leaves them "
            f"less than half of {max_length} tokens: that of texts[{first}] has "
            f"{lengths[first]}. Shorten it, raise max_length, or pass "
            "on_crowding='keep_text', which cuts it."
        )
    cut = list(rows)
    for i in crowded:
        cut[i] = rows[i][: kept[i]] + rows[i][lengths[i] :]
    return cut, kept


def kept_lengths(lengths: np.ndarray, sizes: np.ndarray, max_length: int) -> np.ndarray:
    """Returns how many ids of each instruction leave the text its room.

    All of them, if the row isn't too long or the instruction takes at most half of it;
    else so many that the text fits or has the other half.

    Args:
        lengths: ids of each instruction, int [n].
        sizes: ids of each row, int [n]: instruction, text and EOS.
        max_length: ids that a row may have.
    """
    room = np.maximum(max_length - (sizes - lengths), max_length // 2)
    return np.minimum(lengths, room)
