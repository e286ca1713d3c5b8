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

Embeddings whose first numbers are to be embeddings too (``LossConfig.prefix_widths``)
have the sum of these losses, one for each width: ``nested_loss``.

Source: Ni et al. 2021 (arXiv 2108.08877), section 3; both directions are summed, and
only left → right sees the hard negatives, as in T5X Retrieval's ``losses.py``.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from sentence_t5 import candidate_masks
from sentence_t5 import encoder as encoder_lib

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
        block_rows: rows of logits to hold at once, for batches whose [B C] logits don't
            fit; they are walked twice, once forward and once backward, to the same loss
            and gradients. None holds all rows.
        prefix_widths: widths below the embedding's whose first numbers, scaled to unit
            length, are trained to be embeddings too (Matryoshka), for ``encode(...,
            dim=...)``. Their losses are added to that of the whole.
        guide: model_dir of another encoder, whose cosines tell false negatives: in
            training, a candidate that it finds closer than a row's positive is left
            out. See ``guides``.
        guide_margin: how much less close than the positive a candidate must be, in the
            guide's cosine.
    """

    logit_scale: float = 100.0
    bidirectional: bool = True
    mask_duplicates: bool = False
    own_right_only: bool = False
    block_rows: int | None = None
    prefix_widths: tuple[int, ...] = ()
    guide: str | None = None
    guide_margin: float = 0.0

    def __post_init__(self):
        """Checks the numbers.

        Raises:
            ValueError: the scale is not a positive finite number, a block is empty, or
                widths are not positive or given twice.
        """
        if not (np.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ValueError(
                f"LossConfig.logit_scale: got {self.logit_scale}, expected a positive "
                "number (1 / temperature: temperature 0.01 is a scale of 100)."
            )
        if self.block_rows is not None and self.block_rows < 1:
            raise ValueError(
                f"LossConfig.block_rows: got {self.block_rows}, expected a positive "
                "number of rows, or None for all at once."
            )
        widths = self.prefix_widths
        if len(set(widths)) < len(widths) or min(widths, default=1) < 1:
            raise ValueError(
                f"LossConfig.prefix_widths: got {widths}, expected different positive "
                "widths such as (256, 128, 64), or () for none."
            )

    def check_encoder(self, config: encoder_lib.EncoderConfig) -> None:
        """Refuses prefixes that an encoder's embeddings don't have.

        Raises:
            ValueError: a width is not below the embedding's, or there are prefixes of
                embeddings that are not unit vectors.
        """
        if max(self.prefix_widths, default=0) >= config.embedding_dim:
            raise ValueError(
                f"LossConfig.prefix_widths: got {self.prefix_widths}, expected widths "
                f"below {config.embedding_dim}, the embedding's (which is always "
                "trained). Leave larger ones out, or raise "
                "EncoderConfig.projection_dim."
            )
        if self.prefix_widths and not config.normalize:
            raise ValueError(
                f"LossConfig.prefix_widths: got {self.prefix_widths}, but EncoderConfig"
                ".normalize is False: prefixes are compared by cosine, and the whole "
                "would be by its inner product. Set normalize to True."
            )


class ContrastiveOutput(NamedTuple):
    """The loss, and what metrics read: a number for each row.

    Attributes:
        loss: scalar, the mean over real rows.
        positives: [B], left i · right i.
        num_ahead: [B], other candidates that count and are at least as close.
        num_others: [B], other candidates that count.
        sum_others: [B], the sum of their cosines.
    """

    loss: Float[Array, ""]
    positives: Float[Array, " B"]
    num_ahead: Float[Array, " B"]
    num_others: Float[Array, " B"]
    sum_others: Float[Array, " B"]


class _Terms(NamedTuple):
    """What some rows of logits [M C] say."""

    normalizer: Float[Array, " M"]  # log of the summed exponentials, along a row
    columns: Float[Array, " B"]  # the same down each right side's column
    positives: Float[Array, " M"]
    num_ahead: Float[Array, " M"]
    num_others: Float[Array, " M"]
    sum_others: Float[Array, " M"]


def contrastive_loss(
    left: Float[Array, "B E"],
    right: Float[Array, "B E"],
    negatives: Float[Array, "B N E"] | None,
    candidates: candidate_masks.Candidates,
    *,
    logit_scale: float,
    bidirectional: bool,
    block_rows: int | None = None,
) -> ContrastiveOutput:
    """Computes the in-batch softmax loss with hard negatives.

    A batch of one pair without negatives has loss 0: there is nothing to tell apart.

    Args:
        left: unit vectors, float32.
        right: unit vectors, float32; ``right[i]`` belongs to ``left[i]``.
        negatives: hard negatives of each row, or None.
        candidates: from ``candidate_masks``.
        logit_scale: multiplies cosines.
        bidirectional: add the right → left direction.
        block_rows: see ``LossConfig``.

    Returns:
        The loss and each row's statistics, through which no gradient flows.

    Raises:
        ValueError: the sides differ in shape, or negatives or blocks don't fit them.
    """
    _check_shapes(left, right, negatives, block_rows)
    if negatives is not None:
        negatives = negatives.reshape(-1, negatives.shape[-1])

    def terms_of(left, index):
        return _terms(left, index, right, negatives, candidates, logit_scale)

    if block_rows is None:
        terms = terms_of(left, None)
        columns = terms.columns
    else:
        terms, columns = _walk(terms_of, left, left.shape[0] // block_rows)
    positives = logit_scale * terms.positives
    per_row = terms.normalizer - positives
    if bidirectional:
        # Down the columns of the same logits: no second product, no second gather.
        per_row += columns - positives
    rows = candidates.rows
    loss = jnp.sum(jnp.where(rows, per_row, 0.0)) / jnp.maximum(rows.sum(), 1)
    statistics = jax.lax.stop_gradient(
        (terms.positives, terms.num_ahead, terms.num_others, terms.sum_others)
    )
    return ContrastiveOutput(loss, *statistics)


def nested_loss(
    left: Float[Array, "B E"],
    right: Float[Array, "B E"],
    negatives: Float[Array, "B N E"] | None,
    candidates: candidate_masks.Candidates,
    *,
    prefix_widths: Sequence[int] = (),
    **options,
) -> ContrastiveOutput:
    """Adds up the losses of whole embeddings and of their prefixes.

        loss = Σ_w contrastive_loss(unit(left[:w]), unit(right[:w]), …)   w = E, 256, …

    Args:
        left: unit vectors, float32.
        right: unit vectors, float32; ``right[i]`` belongs to ``left[i]``.
        negatives: hard negatives of each row, or None.
        candidates: from ``candidate_masks``; the same at every width.
        prefix_widths: see ``LossConfig``; without any, this is ``contrastive_loss``.
        **options: of ``contrastive_loss``.

    Returns:
        The sum of the losses, all weights 1, and each row's statistics at full width.

    Source: Kusupati et al. 2022, "Matryoshka Representation Learning" (arXiv
    2205.13147), equation 1.
    """
    whole = contrastive_loss(left, right, negatives, candidates, **options)
    loss = whole.loss
    for width in prefix_widths:
        prefixes = [
            None if x is None else encoder_lib.l2_normalize(x[..., :width])
            for x in (left, right, negatives)
        ]
        loss += contrastive_loss(*prefixes, candidates, **options).loss
    return whole._replace(loss=loss)


def _walk(terms_of, left: Float[Array, "B E"], num_blocks: int):
    """Walks the rows in blocks; one block's logits exist at a time, backward too."""

    @jax.checkpoint
    def step(columns, block):
        terms = terms_of(*block)
        return jnp.logaddexp(columns, terms.columns), terms._replace(columns=None)

    batch = left.shape[0]
    blocks = (split_rows(left, num_blocks), split_rows(jnp.arange(batch), num_blocks))
    columns, terms = jax.lax.scan(step, jnp.full(batch, _MASKED), blocks)
    return jax.tree.map(join_rows, terms), columns


def split_rows(x: Shaped[Array, "B *rest"], num_blocks: int) -> Array:
    """Splits rows into [num_blocks B/num_blocks ...].

    A block takes every ``num_blocks``-th row, so that each device has a part of it.
    """
    return x.reshape(-1, num_blocks, *x.shape[1:]).swapaxes(0, 1)


def join_rows(x: Shaped[Array, "n M *rest"]) -> Array:
    """Undoes ``split_rows``."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _terms(left, index, right, negatives, candidates, logit_scale) -> _Terms:
    """Makes the logits of some rows, ``left`` [M E], and what is kept of them."""
    numbers = jnp.arange(right.shape[0])
    own = (numbers if index is None else index)[:, None] == numbers
    mask = candidates.mask(own, index)
    cosines = _dot(left, right)
    positives = jnp.sum(jnp.where(own, cosines, 0.0), axis=1)
    logits = jnp.where(mask.rights, logit_scale * cosines, _MASKED)
    normalizer = jax.nn.logsumexp(logits, axis=1)
    parts = [(mask.rights & ~own, cosines)]
    if negatives is not None:
        negative_cosines = _dot(left, negatives)
        parts.append((mask.negatives, negative_cosines))
        negative_logits = jnp.where(
            mask.negatives, logit_scale * negative_cosines, _MASKED
        )
        # Joined by their sums and not by concatenation: no array of all C columns.
        normalizer = jnp.logaddexp(
            normalizer, jax.nn.logsumexp(negative_logits, axis=1)
        )
    to_lefts = jnp.where(mask.lefts, logit_scale * cosines, _MASKED)
    return _Terms(
        normalizer,
        jax.nn.logsumexp(to_lefts, axis=0),
        positives,
        num_ahead=sum(_count(m & (c >= positives[:, None])) for m, c in parts),
        num_others=sum(_count(m) for m, _ in parts),
        sum_others=sum(jnp.sum(jnp.where(m, c, 0.0), axis=1) for m, c in parts),
    )


def _count(mask: Bool[Array, "M C"]) -> Float[Array, " M"]:
    return jnp.sum(mask, axis=1, dtype=jnp.float32)


def _check_shapes(left, right, negatives, block_rows: int | None) -> None:
    if left.shape != right.shape:
        raise ValueError(
            "left and right embeddings differ in shape: "
            f"{left.shape} and {right.shape}."
        )
    if negatives is not None and (
        negatives.ndim != 3 or negatives.shape[::2] != left.shape
    ):
        raise ValueError(
            f"negatives have shape {negatives.shape}, expected [B, N, E] with "
            f"B, E = {left.shape}."
        )
    if block_rows is not None and left.shape[0] % block_rows:
        raise ValueError(
            f"LossConfig.block_rows is {block_rows}: it must divide the global batch "
            f"of {left.shape[0]}."
        )


def _dot(left: Float[Array, "B E"], right: Float[Array, "C E"]) -> Float[Array, "B C"]:
    # On TPU a default float32 product is one bfloat16 pass: two digits of a cosine,
    # which a scale of 100 turns into errors of 0.4 in the logits.
    return jnp.einsum(
        "be,ce->bc", left, right, precision="highest",
        preferred_element_type=jnp.float32,
    )  # fmt: skip
