"""The contrastive loss: a softmax over the candidates of the whole global batch.

    logits [B C] = logit_scale * left @ [right; negatives].T        C = B * (1 + N)
    left → right:  -log softmax over all C candidates, at row i's own right side
    right → left:  -log softmax over the B left sides, at column i's own left side
    loss = mean(left → right) + mean(right → left)

Everything is written over global arrays. Under jit on a mesh the compiler gathers the
candidates, so the value and the gradients are those of one device whatever the mesh.
Rows are pairs; row i's positive is column i.

INSTRUCTOR's loss is the same with fewer candidates (``LossConfig.own_right_only``):
left → right sees row i's own right side and all hard negatives, right → left is as
above. It is a mask, like a task whose rows are no negatives to each other.

Source: Ni et al. 2021 (arXiv 2108.08877), section 3; both directions are summed, and
only left → right sees the hard negatives, as in T5X Retrieval's ``losses.py``.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

# Logits of masked candidates: finite, and exp(_MASKED - max) is exactly 0.
_MASKED = -1e9


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """How pairs are contrasted.

    Attributes:
        logit_scale: multiplies cosines; 1 / temperature, so 100 is temperature 0.01.
            Losses at different scales can't be compared.
        bidirectional: add the right → left direction.
        mask_duplicates: leave out candidates that are no negatives at all: another row
            with the same left or the same right text, and hard negatives equal to a
            row's right text. Texts are compared over the whole global batch.
        own_right_only: leave other rows' right sides out of left → right, so that its
            candidates are a row's own right side and all hard negatives of the batch.
            Source: ``train.py`` of the code published with INSTRUCTOR (Su et al. 2022,
            arXiv 2212.09741); the paper's text describes in-batch negatives.
    """

    logit_scale: float = 100.0
    bidirectional: bool = True
    mask_duplicates: bool = False
    own_right_only: bool = False

    def __post_init__(self):
        """Checks the scale.

        Raises:
            ValueError: it is not a positive finite number.
        """
        if not (np.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ValueError(
                f"LossConfig.logit_scale: got {self.logit_scale}, expected a positive "
                "number (1 / temperature: temperature 0.01 is a scale of 100)."
            )


class CandidateMask(NamedTuple):
    """Which candidates count for which row; True keeps.

    Attributes:
        rights: [B B], row i against right side j.
        negatives: [B B*N], row i against hard negative n of row j at ``j * N + n``.
        rows: [B], rows that are real pairs. A row left out is no candidate either.
        lefts: [B B], left side i as a candidate of row j in right → left; None means
            that it is ``rights``.
    """

    rights: Bool[Array, "B B"]
    negatives: Bool[Array, "B BN"] | None
    rows: Bool[Array, " B"]
    lefts: Bool[Array, "B B"] | None = None


class ContrastiveOutput(NamedTuple):
    """The loss and what metrics read.

    Attributes:
        loss: scalar, the mean over real rows.
        right_cosines: [B B], left i · right j.
        negative_cosines: [B B*N], left i · negative, None without hard negatives.
    """

    loss: Float[Array, ""]
    right_cosines: Float[Array, "B B"]
    negative_cosines: Float[Array, "B BN"] | None


def contrastive_loss(
    left: Float[Array, "B E"],
    right: Float[Array, "B E"],
    negatives: Float[Array, "B N E"] | None,
    mask: CandidateMask,
    *,
    logit_scale: float,
    bidirectional: bool,
) -> ContrastiveOutput:
    """Computes the in-batch softmax loss with hard negatives.

    A batch of one pair without negatives has loss 0: there is nothing to tell apart.

    Args:
        left: unit vectors, float32.
        right: unit vectors, float32; ``right[i]`` belongs to ``left[i]``.
        negatives: hard negatives of each row, or None.
        mask: from ``candidate_mask``.
        logit_scale: multiplies cosines.
        bidirectional: add the right → left direction.

    Returns:
        The loss and the cosines it was made of.

    Raises:
        ValueError: the sides differ in shape, or negatives don't fit them.
    """
    if left.shape != right.shape:
        raise ValueError(
            "left and right embeddings differ in shape: "
            f"{left.shape} and {right.shape}."
        )
    right_cosines = _dot(left, right)
    logits = jnp.where(mask.rights, logit_scale * right_cosines, _MASKED)
    positives = logit_scale * jnp.diagonal(right_cosines)
    normalizer = jax.nn.logsumexp(logits, axis=1)
    negative_cosines = None
    if negatives is not None:
        if negatives.ndim != 3 or negatives.shape[::2] != left.shape:
            raise ValueError(
                f"negatives have shape {negatives.shape}, expected [B, N, E] with "
                f"B, E = {left.shape}."
            )
        negative_cosines = _dot(left, negatives.reshape(-1, negatives.shape[-1]))
        negative_logits = jnp.where(
            mask.negatives, logit_scale * negative_cosines, _MASKED
        )
        # Joined by their sums and not by concatenation: no array of all C columns.
        normalizer = jnp.logaddexp(
            normalizer, jax.nn.logsumexp(negative_logits, axis=1)
        )
    per_row = normalizer - positives
    if bidirectional:
        # Down the columns of the same logits: no second product, no second gather.
        if mask.lefts is not None:
            logits = jnp.where(mask.lefts, logit_scale * right_cosines, _MASKED)
        per_row += jax.nn.logsumexp(logits, axis=0) - positives
    num_rows = jnp.maximum(mask.rows.sum(), 1)
    loss = jnp.sum(jnp.where(mask.rows, per_row, 0.0)) / num_rows
    return ContrastiveOutput(loss, right_cosines, negative_cosines)


def _dot(left: Float[Array, "B E"], right: Float[Array, "C E"]) -> Float[Array, "B C"]:
    # On TPU a default float32 product is one bfloat16 pass: two digits of a cosine,
    # which a scale of 100 turns into errors of 0.4 in the logits.
    return jnp.einsum(
        "be,ce->bc", left, right, precision="highest",
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def candidate_mask(
    left_tokens: Int[Array, "B L"],
    right_tokens: Int[Array, "B M"],
    negative_tokens: Int[Array, "B N M"] | None = None,
    *,
    negative_mask: Bool[Array, "B N"] | None = None,
    row_mask: Bool[Array, " B"] | None = None,
    in_batch: Bool[Array, " B"] | None = None,
    mask_duplicates: bool = False,
    own_right_only: bool = False,
) -> CandidateMask:
    """Says which candidates count for which row.

    Args:
        left_tokens: ids of the left texts.
        right_tokens: ids of the right texts.
        negative_tokens: ids of the hard negatives, or None.
        negative_mask: True for real negatives; None means all.
        row_mask: True for real pairs; None means all.
        in_batch: False for rows whose only candidates are their own right side and
            their own hard negatives; None means none such.
        mask_duplicates: see ``LossConfig``.
        own_right_only: see ``LossConfig``.

    Returns:
        Masks whose diagonal is always kept.

    Raises:
        ValueError: ``own_right_only`` without hard negatives: left → right would have
            nothing to tell apart.
    """
    if own_right_only and negative_tokens is None:
        raise ValueError(
            "LossConfig.own_right_only tells a row's right side from hard negatives, "
            "and the batch has none. Set DatasetConfig.num_negatives, or "
            "own_right_only to False."
        )
    batch = left_tokens.shape[0]
    rows = jnp.ones(batch, bool) if row_mask is None else row_mask
    rights = rows[:, None] & rows[None]
    negatives = None
    if negative_tokens is not None:
        real = jnp.broadcast_to(rows[:, None], negative_tokens.shape[:2])
        if negative_mask is not None:
            real &= negative_mask
        negatives = jnp.broadcast_to(real.reshape(1, -1), (batch, real.size))
    if mask_duplicates:
        left_ids, right_ids = text_ids(left_tokens), text_ids(right_tokens)
        rights &= ~(_same(left_ids, left_ids) | _same(right_ids, right_ids))
        if negatives is not None:
            ids = text_ids(negative_tokens).reshape(-1, 2)
            negatives &= ~_same(right_ids, ids)
    mask = CandidateMask(rights, negatives, rows)
    if in_batch is not None:
        mask = _without_others(mask, in_batch)
    own = jnp.eye(batch, dtype=bool)
    lefts = None if mask.lefts is None else mask.lefts | own
    if own_right_only:
        lefts = mask.rights | own if lefts is None else lefts
        mask = mask._replace(rights=own)
    return mask._replace(rights=mask.rights | own, lefts=lefts)


def _without_others(mask: CandidateMask, in_batch: Bool[Array, " B"]) -> CandidateMask:
    """Leaves rows that are not ``in_batch`` their own hard negatives alone."""
    negatives = mask.negatives
    if negatives is not None:
        batch = len(in_batch)
        own = jnp.repeat(
            jnp.eye(batch, dtype=bool), negatives.shape[1] // batch, axis=1
        )
        negatives &= in_batch[:, None] | own
    return mask._replace(
        rights=mask.rights & in_batch[:, None],
        negatives=negatives,
        lefts=mask.rights & in_batch[None],
    )


def text_ids(tokens: Int[Array, "*lead L"]) -> UInt32[Array, "*lead 2"]:
    """Hashes token rows to 64 bits, so that equal texts get equal ids.

    Padding counts for nothing: the same text padded to another length has the same id.
    Different texts share an id with a probability of about 2**-60.
    """
    weights = np.random.default_rng(0x7E57).integers(
        0, 2**32, size=(tokens.shape[-1], 2), dtype=np.uint32
    )
    products = tokens[..., None].astype(jnp.uint32) * (weights | np.uint32(1))
    return jnp.sum(products, axis=-2, dtype=jnp.uint32)


def _same(a: UInt32[Array, "B 2"], b: UInt32[Array, "C 2"]) -> Bool[Array, "B C"]:
    return jnp.all(a[:, None] == b[None], axis=-1)
