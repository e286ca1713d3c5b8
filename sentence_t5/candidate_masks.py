"""Which texts of a batch are candidates for which row.

Every row's own right side is a candidate, always. The others are all right sides and
hard negatives of the global batch, less padding, less (if asked) duplicates and what a
guide takes for right answers, and less what a task or INSTRUCTOR's loss leaves out. A
mask is made for the rows at hand, so that rows can be walked in blocks.
"""

from typing import NamedTuple

import flax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

# Equal cosines of a guide may differ by this much: the sums are of float32.
_TIE = 1e-5


class CandidateMask(NamedTuple):
    """Which candidates count for some rows; True keeps.

    Attributes:
        rights: [M B], row i against right side j.
        negatives: [M B*N], row i against hard negative n of row j at ``j * N + n``.
        lefts: [M B], left side i as a candidate of row j in right → left.
    """

    rights: Bool[Array, "M B"]
    negatives: Bool[Array, "M BN"] | None
    lefts: Bool[Array, "M B"]


class TextIds(NamedTuple):
    """Hashes of a batch's texts: equal texts have equal ones.

    Attributes:
        left: [B 2].
        right: [B 2].
        negatives: [B N 2], flattened in ``Candidates``; None without any.
    """

    left: UInt32[Array, "B 2"]
    right: UInt32[Array, "B 2"]
    negatives: UInt32[Array, "*BN 2"] | None = None


class Candidates(flax.struct.PyTreeNode):
    """What is known of a batch's texts, from which the mask of any row is made.

    Attributes:
        rows: [B], rows that are real pairs. A row left out is no candidate either.
        negatives: [B*N], hard negatives that are real; None without any.
        text_ids: of the texts, where equal ones are to be masked.
        in_batch: [B], False for rows whose only candidates are their own right side and
            their own hard negatives; None means none such.
        own_right_only: see ``losses.LossConfig``.
        guide: a guide's unit vectors of the left [B G], right [B G] and negative
            [B*N G] texts; None without a guide.
        guide_margin: see ``losses.LossConfig``.
    """

    rows: Bool[Array, " B"]
    negatives: Bool[Array, " BN"] | None
    text_ids: TextIds | None
    in_batch: Bool[Array, " B"] | None = None
    own_right_only: bool = flax.struct.field(pytree_node=False, default=False)
    guide: tuple[Float[Array, "B G"], Float[Array, "B G"], Array | None] | None = None
    guide_margin: float = flax.struct.field(pytree_node=False, default=0.0)

    def mask(
        self, own: Bool[Array, "M B"], index: Int[Array, " M"] | None = None
    ) -> CandidateMask:
        """Returns the ``CandidateMask`` of some rows, their own right sides kept.

        Args:
            own: True at each row's own right side.
            index: the rows' numbers; None for all.
        """

        def of_rows(x):
            return x if index is None else x[index]

        rights = of_rows(self.rows)[:, None] & self.rows[None]
        negatives = None
        if self.negatives is not None:
            negatives = jnp.broadcast_to(
                self.negatives[None], (own.shape[0], self.negatives.size)
            )
        if self.text_ids is not None:
            left, right, negative = self.text_ids
            rights &= ~(_same(of_rows(left), left) | _same(of_rows(right), right))
            if negatives is not None:
                negatives &= ~_same(of_rows(right), negative)
        lefts = rights
        if self.guide is not None:
            guided = self._guided(of_rows)
            lefts, rights = lefts & guided.lefts, rights & guided.rights
            if negatives is not None:
                negatives &= guided.negatives
        if self.in_batch is not None:
            alone = ~of_rows(self.in_batch)[:, None]
            lefts &= self.in_batch[None]
            rights &= ~alone
            if negatives is not None:
                per_row = self.negatives.size // self.rows.size
                negatives &= ~alone | jnp.repeat(own, per_row, axis=1)
        if self.own_right_only:
            rights = own
        return CandidateMask(rights | own, negatives, lefts | own)

    def _guided(self, of_rows) -> CandidateMask:
        """Returns the candidates that the guide finds no closer than the positive."""
        left, right, negative = self.guide
        limits = jnp.sum(left * right, axis=-1) - self.guide_margin + _TIE
        left, row_limits = of_rows(left), of_rows(limits)[:, None]
        to_rights = _cosines(left, right)
        negatives = None
        if negative is not None:
            negatives = _cosines(left, negative) <= row_limits
        return CandidateMask(
            to_rights <= row_limits, negatives, to_rights <= limits[None]
        )


def make_candidates(
    batch_size: int,
    negative_mask: Bool[Array, "B N"] | None,
    ids: TextIds | None,
    *,
    row_mask: Bool[Array, " B"] | None = None,
    in_batch: Bool[Array, " B"] | None = None,
    own_right_only: bool = False,
    guide: tuple[Array, Array, Array | None] | None = None,
    guide_margin: float = 0.0,
) -> Candidates:
    """Says which texts of a batch are candidates.

    Args:
        batch_size: pairs, B.
        negative_mask: True for real negatives; None without any.
        ids: of the texts, where equal ones are to be masked.
        row_mask: True for real pairs; None means all.
        in_batch: False for rows whose only candidates are their own right side and
            their own hard negatives; None means none such.
        own_right_only: see ``losses.LossConfig``.
        guide: a guide's unit vectors of the left [B G], right [B G] and negative
            [B N G] texts; None without a guide.
        guide_margin: see ``losses.LossConfig``.

    Raises:
        ValueError: ``own_right_only`` without hard negatives: left → right would have
            nothing to tell apart.
    """
    if own_right_only and negative_mask is None:
        raise ValueError(
            "LossConfig.own_right_only tells a row's right side from hard negatives, "
            "and the batch has none. Set DatasetConfig.num_negatives, or "
            "own_right_only to False."
        )
    rows = jnp.ones(batch_size, bool) if row_mask is None else row_mask
    negatives = None
    if negative_mask is not None:
        negatives = (rows[:, None] & negative_mask).reshape(-1)
        if ids is not None:
            ids = ids._replace(negatives=ids.negatives.reshape(-1, 2))
        if guide is not None:
            guide = (*guide[:2], guide[2].reshape(-1, guide[2].shape[-1]))
    return Candidates(
        rows, negatives, ids, in_batch, own_right_only, guide, guide_margin
    )


def text_ids(tokens: Int[Array, "*lead L"]) -> UInt32[Array, "*lead 2"]:
    """Hashes token rows to 64 bits, so that equal texts get equal ids.

    Padding counts for nothing: the same text padded to another length has the same id.
    Different texts share an id with a probability of about 2**-60.
    """
    products = tokens[..., None].astype(jnp.uint32) * _hash_weights(tokens.shape[-1])
    return jnp.sum(products, axis=-2, dtype=jnp.uint32)


def packed_text_ids(
    tokens: Int[Array, "R L"], slots: Int[Array, "R L"], num_slots: int
) -> UInt32[Array, "R S 2"]:
    """Hashes the texts of packed rows, to the same ids as ``text_ids``.

    Args:
        tokens: packed rows.
        slots: which of its row's texts each token is of, -1 for padding.
        num_slots: texts that a row may have, S.
    """
    mask = slots[:, None] == jnp.arange(num_slots)[:, None]  # [R S L]
    places = jnp.arange(tokens.shape[1]) - jnp.argmax(mask, axis=-1)[..., None]
    weights = jnp.asarray(_hash_weights(tokens.shape[1]))[jnp.where(mask, places, 0)]
    products = tokens[:, None, :, None].astype(jnp.uint32) * weights
    return jnp.sum(jnp.where(mask[..., None], products, 0), axis=2, dtype=jnp.uint32)


def _hash_weights(length: int) -> UInt32[np.ndarray, "L 2"]:
    """Returns odd random numbers; a longer row's begin with a shorter one's."""
    rng = np.random.default_rng(0x7E57)
    return rng.integers(0, 2**32, size=(length, 2), dtype=np.uint32) | np.uint32(1)


def _same(a: UInt32[Array, "B 2"], b: UInt32[Array, "C 2"]) -> Bool[Array, "B C"]:
    return jnp.all(a[:, None] == b[None], axis=-1)


def _cosines(a: Float[Array, "B G"], b: Float[Array, "C G"]) -> Float[Array, "B C"]:
    return jnp.einsum("bg,cg->bc", a, b, precision="highest")
