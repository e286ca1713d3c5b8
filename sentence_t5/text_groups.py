"""The texts of a batch as the encoder takes them, and its embeddings back as pairs.

    batch ─► groups: texts that share an encoder call ─► embeddings of each group
          ─► left [B E], right [B E], negatives [B N E]

A pair's texts stay on the device that has the pair. Padded, texts of one length are one
group, side by side; packed, all texts of a batch are. In one call weights are gathered
once a step, and their gradients reduced once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sentence_t5 import candidate_masks, encoder, names

Batch = dict[str, Array]


class PaddedTexts(NamedTuple):
    """Texts of one length, each in a row of its own.

    Attributes:
        tokens: G texts of each pair.
        numbers: each text's number in the global batch.
        instruction_lengths: how many of a text's first tokens are an instruction's;
            None without instructions.
    """

    tokens: Int[Array, "B G L"]
    numbers: Int[Array, "B G"]
    instruction_lengths: Int[Array, "B G"] | None = None


class PackedTexts(NamedTuple):
    """Texts packed into rows, up to S of them in each.

    Attributes:
        tokens: the rows.
        slots: which of its row's texts each token is of, -1 for padding.
        numbers: each text's number in the global batch, -1 where there is none.
        instruction_lengths: as of ``PaddedTexts``.
    """

    tokens: Int[Array, "R P"]
    slots: Int[Array, "R P"]
    numbers: Int[Array, "R S"]
    instruction_lengths: Int[Array, "R S"] | None = None


Group = PaddedTexts | PackedTexts
# [B G E] of padded texts, [R S E] of packed ones.
Embedded = list[Float[Array, "B G E"]]


def is_packed(batch: Batch) -> bool:
    """Says whether a batch's texts are packed into rows."""
    return names.PACKED_TOKENS in batch


def batch_size(batch: Batch) -> int:
    """Returns the number of pairs."""
    if is_packed(batch):
        return batch[names.PACKED_PLACES].shape[0] * batch[names.PACKED_PLACES].shape[1]
    return batch[names.LEFT_TOKENS].shape[0]


def make_groups(batch: Batch) -> list[Group]:
    """Puts texts together that share an encoder call.

    A text's number is its pair's times the texts of a pair, plus its place among them
    (left, right, negatives): the same however the texts are grouped.

    Args:
        batch: see ``names``.

    Returns:
        One group; two (left; right, negatives) if padded sides differ in length.
    """
    if is_packed(batch):
        rows = (batch[names.PACKED_TOKENS], batch[names.PACKED_SLOTS])
        numbers = batch[names.PACKED_NUMBERS]
        lengths = batch.get(names.PACKED_INSTRUCTION_LENGTHS)
        return [PackedTexts(*rows, numbers, lengths)]
    left = batch[names.LEFT_TOKENS][:, None]
    rights = batch[names.RIGHT_TOKENS][:, None]
    if names.NEGATIVE_TOKENS in batch:
        rights = jnp.concatenate([rights, batch[names.NEGATIVE_TOKENS]], axis=1)
    left_lengths = right_lengths = None
    if names.LEFT_INSTRUCTION_LENGTHS in batch:
        left_lengths = batch[names.LEFT_INSTRUCTION_LENGTHS][:, None]
        right_lengths = batch[names.RIGHT_INSTRUCTION_LENGTHS][:, None]
        if names.NEGATIVE_TOKENS in batch:
            negative_lengths = batch[names.NEGATIVE_INSTRUCTION_LENGTHS]
            right_lengths = jnp.concatenate([right_lengths, negative_lengths], axis=1)
    num_pairs, num_texts = left.shape[0], 1 + rights.shape[1]
    numbers = jnp.arange(num_pairs * num_texts).reshape(num_pairs, num_texts)
    sides = (
        PaddedTexts(left, numbers[:, :1], left_lengths),
        PaddedTexts(rights, numbers[:, 1:], right_lengths),
    )
    if left.shape[-1] != rights.shape[-1]:
        return list(sides)
    return [jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *sides)]


def embed(
    module: encoder.SentenceEncoder, params: Any, texts: Group, rng: Array | None
) -> Float[Array, "B G E"]:
    """Embeds the texts of a group, or of some rows of it.

    Args:
        module: the encoder.
        params: its parameters.
        texts: rows of one of ``make_groups``.
        rng: the step's dropout key; None switches dropout off.

    Returns:
        [B G E] of padded texts, [R S E] of packed ones.
    """
    rngs = None if rng is None else {"dropout": rng}
    if isinstance(texts, PackedTexts):
        return module.apply(
            {"params": params}, texts.tokens, texts.instruction_lengths,
            text_numbers=texts.numbers, slots=texts.slots, rngs=rngs,
        )  # fmt: skip
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), texts)
    embedded = module.apply(
        {"params": params}, rows.tokens, rows.instruction_lengths,
        text_numbers=rows.numbers, rngs=rngs,
    )  # fmt: skip
    return embedded.reshape(*texts.numbers.shape, -1)


def embed_all(
    module: encoder.SentenceEncoder,
    params: Any,
    groups: list[Group],
    rng: Array | None,
) -> Embedded:
    """Embeds the texts of a whole batch; see ``embed``."""
    return [embed(module, params, texts, rng) for texts in groups]


def ungroup(
    batch: Batch, embedded: Embedded
) -> tuple[Float[Array, "B E"], Float[Array, "B E"], Float[Array, "B N E"] | None]:
    """Returns left, right and negative embeddings from those of ``make_groups``."""
    if is_packed(batch):
        embedded = [_unpack(embedded[0], batch[names.PACKED_PLACES])]
    left, rights = embedded if len(embedded) == 2 else (embedded[0], embedded[0][:, 1:])
    has_negatives = rights.shape[1] > 1
    return left[:, 0], rights[:, 0], rights[:, 1:] if has_negatives else None


def text_ids(batch: Batch) -> candidate_masks.TextIds:
    """Hashes the texts of a batch, so that equal ones are found."""
    if is_packed(batch):
        numbers = batch[names.PACKED_NUMBERS]
        ids = candidate_masks.packed_text_ids(
            batch[names.PACKED_TOKENS], batch[names.PACKED_SLOTS], numbers.shape[1]
        )
        return _as_sides(_unpack(ids, batch[names.PACKED_PLACES]))
    keys = (names.LEFT_TOKENS, names.RIGHT_TOKENS, names.NEGATIVE_TOKENS)
    return candidate_masks.TextIds(
        *[candidate_masks.text_ids(batch[key]) for key in keys if key in batch]
    )


def _as_sides(ids: Array) -> candidate_masks.TextIds:
    negatives = ids[:, 2:] if ids.shape[1] > 2 else None
    return candidate_masks.TextIds(ids[:, 0], ids[:, 1], negatives)


def _unpack(per_slot: Array, places: Int[Array, "W b G"]) -> Array:
    """Takes [R S ...] to [B G ...]; each device finds its pairs' texts in its rows.

    A text that isn't there (a padding negative) has some other's values.
    """
    shards, num_pairs, num_texts = places.shape
    per_shard = per_slot.reshape(shards, -1, per_slot.shape[-1])
    places = jnp.maximum(places, 0).reshape(shards, -1, 1)
    taken = jnp.take_along_axis(per_shard, places, axis=1)
    return taken.reshape(shards * num_pairs, num_texts, -1)
