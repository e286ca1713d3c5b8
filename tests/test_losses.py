"""The contrastive loss against loops in numpy, and what its masks promise."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import (
    candidate_masks,
    encoder,
    losses,
    metrics,
    names,
    optim,
    partitioning,
    steps,
    text_groups,
)

B, E = 6, 5
SCALE = 20.0

# Texts of the six pairs, one letter each. Rows 0 and 3 have one right text, rows 1 and
# 4 one left text, and the first hard negative of row 2 is the right text of row 5.
LEFTS = "abcdbe"
RIGHTS = "pqrpst"
NEGATIVES = ["uvw", "xyz", "tAB", "CDE", "FGH", "IJK"]
NEGATIVE_MASK = np.array(
    [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1]], bool
)
ROW_MASK = np.array([1, 1, 1, 1, 0, 1], bool)


def tokens_of(text, length):
    """Returns two ids for a one-letter text, the end symbol, and padding."""
    ids = [ord(text), 100 + ord(text) % 7, 1]
    return np.array(ids + [0] * (length - len(ids)), np.int32)


def make_tokens(num_negatives):
    # The sides have different lengths: the same text is padded differently.
    left = np.stack([tokens_of(t, 4) for t in LEFTS])
    right = np.stack([tokens_of(t, 6) for t in RIGHTS])
    negatives = np.zeros((B, num_negatives, 6), np.int32)
    for i, n in itertools.product(range(B), range(num_negatives)):
        negatives[i, n] = tokens_of(NEGATIVES[i][n], 6)
    return left, right, negatives


def make_candidates(left, right, negatives=None, mask_duplicates=False, **masks):
    """Says which texts are candidates, as a training step does with its batch."""
    negative_mask = masks.pop("negative_mask", None)
    batch = {names.LEFT_TOKENS: left, names.RIGHT_TOKENS: right}
    if negatives is not None:
        batch[names.NEGATIVE_TOKENS] = negatives
        if negative_mask is None:
            negative_mask = np.ones(negatives.shape[:2], bool)
    ids = text_groups.text_ids(batch) if mask_duplicates else None
    return candidate_masks.make_candidates(len(left), negative_mask, ids, **masks)


def make_embeddings(num_negatives, seed=0):
    """Returns unit vectors, positives closer than the rest."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(B, E))
    right = left + rng.normal(size=(B, E))
    negatives = rng.normal(size=(B, num_negatives, E))
    return [
        (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
        for x in (left, right, negatives)
    ]


def brute_force(
    left, right, negatives, *, scale, bidirectional, rows, negative_mask, texts=None
):
    """Returns the loss in float64, row by row and candidate by candidate.

    ``texts`` (lefts, rights, negatives) switches the masking of duplicates on.
    """
    total = 0.0
    for i in range(len(left)):
        if not rows[i]:
            continue
        positive = scale * float(left[i] @ right[i])
        forward, backward = [positive], [positive]
        for j in range(len(left)):
            if j == i or not rows[j]:
                continue
            same = texts and (texts[0][i] == texts[0][j] or texts[1][i] == texts[1][j])
            if not same:
                forward.append(scale * float(left[i] @ right[j]))
                backward.append(scale * float(left[j] @ right[i]))
        for j, n in itertools.product(range(len(left)), range(negatives.shape[1])):
            same = texts and texts[1][i] == texts[2][j][n]
            if rows[j] and negative_mask[j, n] and not same:
                forward.append(scale * float(left[i] @ negatives[j, n]))
        directions = [forward, backward] if bidirectional else [forward]
        for logits in directions:
            top = max(logits)
            sum_exp = sum(math.exp(x - top) for x in logits)
            total += top + math.log(sum_exp) - positive
    return total / max(sum(rows), 1)


def differences(loss, arrays, step=1e-5):
    """Returns gradients of ``loss(*arrays)`` by central differences in float64."""
    arrays = [np.array(x, np.float64) for x in arrays]
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(*array.shape):
            kept = array[index]
            array[index] = kept + step
            above = loss(*arrays)
            array[index] = kept - step
            below = loss(*arrays)
            array[index] = kept
            gradient[index] = (above - below) / (2 * step)
        gradients.append(gradient)
    return gradients


@functools.partial(
    jax.jit,
    static_argnames=(
        "bidirectional",
        "mask_duplicates",
        "own_right_only",
        "block_rows",
    ),
)
def loss_and_gradients(
    left,
    right,
    negatives,
    tokens,
    negative_mask,
    row_mask,
    *,
    scale=SCALE,
    bidirectional=True,
    mask_duplicates=False,
    block_rows=None,
    **more,
):
    candidates = make_candidates(
        *tokens,
        negative_mask=negative_mask,
        row_mask=row_mask,
        mask_duplicates=mask_duplicates,
        **more,
    )

    def loss(left, right, negatives):
        return losses.contrastive_loss(
            left, right, negatives, candidates,
            logit_scale=scale, bidirectional=bidirectional, block_rows=block_rows,
        ).loss  # fmt: skip

    return jax.value_and_grad(loss, (0, 1, 2))(left, right, negatives)


# --- value and gradients --------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "negatives", "rows", "duplicates", "all"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_negatives", [0, 1, 3])
def test_value_and_gradients_equal_brute_force(num_negatives, bidirectional, mask):
    embeddings = make_embeddings(num_negatives)
    rows, negative_mask = np.ones(B, bool), np.ones((B, num_negatives), bool)
    if mask in ("negatives", "all"):
        negative_mask = NEGATIVE_MASK[:, :num_negatives]
    if mask in ("rows", "all"):
        rows = ROW_MASK
    mask_duplicates = mask in ("duplicates", "all")
    expected = functools.partial(
        brute_force,
        scale=SCALE,
        bidirectional=bidirectional,
        rows=rows,
        negative_mask=negative_mask,
        texts=(LEFTS, RIGHTS, NEGATIVES) if mask_duplicates else None,
    )
    loss, gradients = loss_and_gradients(
        *embeddings,
        make_tokens(num_negatives),
        negative_mask,
        rows,
        bidirectional=bidirectional,
        mask_duplicates=mask_duplicates,
    )
    np.testing.assert_allclose(loss, expected(*embeddings), rtol=1e-5)
    for ours, theirs in zip(gradients, differences(expected, embeddings), strict=True):
        largest = max(np.abs(theirs).max(initial=0), 1.0)
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * largest)
        assert np.isfinite(ours).all()


@pytest.mark.parametrize(("block_rows", "bidirectional"), [(1, True), (3, False)])
def test_walked_in_blocks_it_is_the_same(block_rows, bidirectional):
    arguments = (*make_embeddings(3), make_tokens(3), NEGATIVE_MASK, ROW_MASK)
    options = {
        "bidirectional": bidirectional,
        "mask_duplicates": True,
        "own_right_only": not bidirectional,
        "in_batch": np.array([1, 0, 1, 1, 0, 1], bool),
    }
    loss, gradients = loss_and_gradients(*arguments, **options)
    walked = loss_and_gradients(*arguments, **options, block_rows=block_rows)
    np.testing.assert_allclose(walked[0], loss, rtol=1e-6)
    for ours, theirs in zip(walked[1], gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * np.abs(theirs).max())


def test_blocks_of_a_batch_of_512():
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(2, 512, 16)).astype(np.float32)
    negatives = rng.normal(size=(512, 1, 16)).astype(np.float32)
    embeddings = [
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (left, right, negatives)
    ]
    texts = rng.integers(1, 300, (3, 512, 1))  # Some of them the same.
    tokens = (texts[0], texts[1], texts[2][:, None])
    masks = (rng.random((512, 1)) < 0.8, rng.random(512) < 0.9)
    options = {"scale": 100.0, "mask_duplicates": True}
    whole = loss_and_gradients(*embeddings, tokens, *masks, **options)
    blocks = loss_and_gradients(*embeddings, tokens, *masks, **options, block_rows=64)
    np.testing.assert_allclose(blocks[0], whole[0], rtol=1e-6)
    for ours, theirs in zip(blocks[1], whole[1], strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def largest_array(jaxpr) -> int:
    """Returns the elements of the largest array that any equation makes.

    It is that of two words of a text's hash for each row and column.
    """
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [np.prod(v.aval.shape, dtype=int) for v in eqn.outvars]
        sizes += map(largest_array, jax.extend.core.jaxprs_in_params(eqn.params))
    return max(sizes)


@pytest.mark.parametrize(
    ("block_rows", "limit"), [(None, 512 * 512 * 2), (64, 64 * 512 * 2)]
)
def test_in_blocks_no_array_is_of_all_logits(block_rows, limit):
    def loss(left, right):
        tokens = 1 + jnp.arange(512)[:, None]
        candidates = make_candidates(tokens, tokens, mask_duplicates=True)
        output = losses.contrastive_loss(
            left, right, None, candidates,
            logit_scale=SCALE, bidirectional=True, block_rows=block_rows,
        )  # fmt: skip
        values = metrics.contrastive_metrics(
            output, candidates.rows, right, block_rows=block_rows
        )
        return output.loss, values

    sides = [jax.ShapeDtypeStruct((512, 2), jnp.float32)] * 2
    traced = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1), has_aux=True))(*sides)
    assert limit / 4 < largest_array(traced.jaxpr) <= limit


def brute_force_of_fewer(
    left, right, negatives, *, own_right_only, in_batch, rows, negative_mask
):
    """Returns INSTRUCTOR's loss, and that of rows without in-batch negatives."""
    total = 0.0
    for i in range(len(left)):
        if not rows[i]:
            continue
        own = SCALE * float(left[i] @ right[i])
        query, text = [own], [own]
        for j in range(len(left)):
            if not rows[j] or (j != i and not in_batch[i]):
                continue
            for n in range(negatives.shape[1]):
                if negative_mask[j, n]:
                    query.append(SCALE * float(left[i] @ negatives[j, n]))
            if j != i and not own_right_only:
                query.append(SCALE * float(left[i] @ right[j]))
            if j != i:
                text.append(SCALE * float(right[i] @ left[j]))
        for logits in (query, text):
            total += math.log(sum(math.exp(x - own) for x in logits))
    return total / sum(rows)


@pytest.mark.parametrize("some_alone", [False, True])
@pytest.mark.parametrize("own_right_only", [False, True])
def test_fewer_candidates_equal_brute_force(own_right_only, some_alone):
    embeddings = make_embeddings(3)
    in_batch = np.array([1, 0, 1, 1, 0, 0] if some_alone else [1] * B, bool)
    loss, gradients = loss_and_gradients(
        *embeddings,
        make_tokens(3),
        NEGATIVE_MASK,
        ROW_MASK,
        own_right_only=own_right_only,
        in_batch=in_batch if some_alone else None,
    )
    expected = functools.partial(
        brute_force_of_fewer,
        own_right_only=own_right_only,
        in_batch=in_batch,
        rows=ROW_MASK,
        negative_mask=NEGATIVE_MASK,
    )
    np.testing.assert_allclose(loss, expected(*embeddings), rtol=1e-5)
    for ours, theirs in zip(gradients, differences(expected, embeddings), strict=True):
        largest = max(np.abs(theirs).max(), 1.0)
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * largest)


@pytest.mark.slow
def test_prefixes_equal_brute_force():
    embeddings = make_embeddings(3)
    candidates = make_candidates(
        *make_tokens(3), negative_mask=NEGATIVE_MASK, row_mask=ROW_MASK,
        mask_duplicates=True,
    )  # fmt: skip
    options = {"logit_scale": SCALE, "bidirectional": True}

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def nested(left, right, negatives):
        output = losses.nested_loss(
            left, right, negatives, candidates, prefix_widths=(4, 2), **options
        )
        return output.loss, output

    def expected(*embeddings):
        total = 0.0
        for width in (E, 4, 2):
            cut = [x[..., :width] for x in embeddings]
            if width < E:
                cut = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in cut]
            total += brute_force(
                *cut, scale=SCALE, bidirectional=True, rows=ROW_MASK,
                negative_mask=NEGATIVE_MASK, texts=(LEFTS, RIGHTS, NEGATIVES),
            )  # fmt: skip
        return total

    (loss, output), gradients = nested(*embeddings)
    np.testing.assert_allclose(loss, expected(*embeddings), rtol=1e-5)
    for ours, theirs in zip(gradients, differences(expected, embeddings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    # What is reported beside the loss is of whole embeddings.
    cosines = np.sum(embeddings[0] * embeddings[1], axis=1)
    np.testing.assert_allclose(output.positives, cosines, atol=1e-6)


def test_own_right_alone_is_no_contrast():
    left, right, _ = make_tokens(1)
    with pytest.raises(ValueError, match="hard negatives, and the batch has none"):
        make_candidates(left, right, own_right_only=True)


def test_temperature_of_the_papers():
    embeddings = make_embeddings(1)
    rows, negative_mask = np.ones(B, bool), np.ones((B, 1), bool)
    expected = brute_force(
        *[x.astype(np.float64) for x in embeddings],
        scale=100.0, bidirectional=True, rows=rows, negative_mask=negative_mask,
    )  # fmt: skip
    loss, _ = loss_and_gradients(
        *embeddings, make_tokens(1), negative_mask, rows, scale=100.0
    )
    assert expected > 1
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_two_pairs_by_hand():
    left = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    right = jnp.array([[0.6, 0.8], [0.0, 1.0]])
    # Cosines [[.6, 0], [.8, 1]]: rows give log(1 + e^-.6) and log(1 + e^-.2), columns
    # log(1 + e^.2) and log(1 + e^-1).
    forward = (0.4374880 + 0.5981389) / 2
    backward = (0.7981389 + 0.3132617) / 2
    assert float(one_loss(left, right, bidirectional=False)) == pytest.approx(forward)
    assert float(one_loss(left, right)) == pytest.approx(forward + backward)


@functools.partial(jax.jit, static_argnames=("bidirectional",))
def one_loss(
    left, right, negatives=None, *, scale=1.0, bidirectional=True, candidates=None
):
    if candidates is None:
        tokens = 1 + np.arange(left.shape[0])[:, None]
        shape = None if negatives is None else negatives.shape[:2]
        other = None if shape is None else np.full((*shape, 1), 99)
        candidates = make_candidates(tokens, tokens, other)
    return losses.contrastive_loss(
        left,
        right,
        negatives,
        candidates,
        logit_scale=scale,
        bidirectional=bidirectional,
    ).loss


def mask_of(*tokens, **masks):
    """Returns the mask of all rows."""
    own = np.eye(len(tokens[0]), dtype=bool)
    return make_candidates(*tokens, **masks).mask(own)


def test_no_masks_mean_that_all_counts():
    left, right, negatives = make_tokens(3)
    without = mask_of(left, right, negatives)
    with_ones = mask_of(
        left, right, negatives,
        negative_mask=np.ones((B, 3), bool), row_mask=np.ones(B, bool),
    )  # fmt: skip
    for ours, theirs in zip(without, with_ones, strict=True):
        assert ours.all()
        np.testing.assert_array_equal(ours, theirs)
    assert without.rights.shape == (B, B)
    assert without.negatives.shape == (B, 3 * B)


def test_no_negatives_and_none_are_the_same():
    left, right, negatives = make_embeddings(0)
    assert negatives.shape == (B, 0, E)
    tokens = make_tokens(0)
    candidates = make_candidates(*tokens)
    empty = one_loss(left, right, negatives, scale=SCALE, candidates=candidates)
    none = one_loss(left, right, None, scale=SCALE)
    assert float(none) > 0.1
    np.testing.assert_allclose(empty, none, rtol=1e-6)


def test_one_pair_has_nothing_to_be_told_apart_from():
    left, right, negatives = (x[:1] for x in make_embeddings(1))
    value, gradients = jax.jit(jax.value_and_grad(one_loss, (0, 1)))(left, right)
    assert float(value) == 0
    assert not np.any(gradients[0]) and not np.any(gradients[1])
    with_negative = one_loss(left, right, negatives, bidirectional=False)
    difference = float(left[0] @ negatives[0, 0] - left[0] @ right[0])
    assert float(with_negative) == pytest.approx(math.log1p(math.exp(difference)))


def test_masked_out_batch_is_zero():
    embeddings = make_embeddings(3)
    loss, gradients = loss_and_gradients(
        *embeddings, make_tokens(3), NEGATIVE_MASK, np.zeros(B, bool)
    )
    assert float(loss) == 0
    assert all(not np.any(g) for g in gradients)


# --- rows, negatives and duplicates that don't count ----------------------------------


def test_padding_rows_are_as_if_they_were_not_there():
    embeddings = make_embeddings(3)
    kept, (left, right, negatives) = ROW_MASK, make_tokens(3)
    loss, gradients = loss_and_gradients(
        *embeddings, (left, right, negatives), NEGATIVE_MASK, ROW_MASK
    )
    small, small_gradients = loss_and_gradients(
        *[x[kept] for x in embeddings],
        (left[kept], right[kept], negatives[kept]),
        NEGATIVE_MASK[kept],
        np.ones(kept.sum(), bool),
    )
    assert float(loss) > 0.1
    np.testing.assert_allclose(loss, small, rtol=1e-6)
    for ours, theirs in zip(gradients, small_gradients, strict=True):
        assert not np.any(ours[~kept])
        np.testing.assert_allclose(ours[kept], theirs, atol=1e-6)


def test_padded_negatives_weigh_exactly_nothing():
    left, right, negatives = make_embeddings(3)
    tokens, rows = make_tokens(3), np.ones(B, bool)
    loss, gradients = loss_and_gradients(
        left, right, negatives, tokens, NEGATIVE_MASK, rows
    )
    # The closest candidate there can be, were it one.
    changed = np.where(NEGATIVE_MASK[..., None], negatives, left[:, None])
    again, _ = loss_and_gradients(left, right, changed, tokens, NEGATIVE_MASK, rows)
    assert float(loss) == float(again)
    assert not np.any(gradients[2][~NEGATIVE_MASK])
    assert np.all(np.any(gradients[2][NEGATIVE_MASK], axis=-1))


def test_row_without_negatives_equals_the_column_removed():
    left, right, negatives = make_embeddings(1)
    mask = np.array([[1], [1], [0], [1], [1], [1]], bool)
    loss, _ = loss_and_gradients(
        left, right, negatives, make_tokens(1), mask, np.ones(B, bool)
    )
    # By hand: five negative columns in all, for every row.
    logits = SCALE * left @ np.concatenate([right, negatives[mask[:, 0], 0]]).T
    forward = np.log(np.exp(logits).sum(1)) - np.diagonal(logits)
    backward = np.log(np.exp(logits[:, :B]).sum(0)) - np.diagonal(logits)
    np.testing.assert_allclose(loss, np.mean(forward + backward), rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_duplicate_positives_leave_a_floor_unless_masked(num_devices):
    # Four orthogonal pairs, then row 1 made a copy of row 0: nothing can tell them
    # apart, so that half the rows keep a loss of ln 2. On 4 devices, each has one row.
    vectors = np.eye(4, dtype=np.float32)[[0, 0, 2, 3]]
    tokens = np.array([[7, 1], [7, 1], [8, 1], [9, 1]], np.int32)
    partitioner = partitioning.Partitioner(devices=jax.devices()[:num_devices])

    @functools.partial(jax.jit, static_argnums=2)
    def losses_of(vectors, tokens, mask_duplicates):
        candidates = make_candidates(tokens, tokens, mask_duplicates=mask_duplicates)
        loss = functools.partial(
            one_loss, vectors, vectors, scale=20.0, candidates=candidates
        )
        return loss(bidirectional=False), loss(bidirectional=True)

    vectors, tokens = jax.device_put((vectors, tokens), partitioner.batch_sharding)
    unmasked = losses_of(vectors, tokens, False)
    np.testing.assert_allclose(
        unmasked, np.array([1, 2]) * (2 / 4 * math.log(2)), rtol=1e-5
    )
    masked = losses_of(vectors, tokens, True)
    # What is left: two or three candidates at cosine 0, e^-20 each.
    np.testing.assert_allclose(masked, 0, atol=2e-8)


def test_several_positives_of_an_anchor_are_no_negatives_of_each_other():
    lefts = np.array([[5, 1], [5, 1], [6, 1]])
    rights = np.array([[7, 1], [8, 1], [9, 1]])
    negatives = np.array([[[8, 1]], [[4, 1]], [[9, 1]]])
    unmasked = mask_of(lefts, rights, negatives)
    assert unmasked.rights.all() and unmasked.negatives.all()
    mask = mask_of(lefts, rights, negatives, mask_duplicates=True)
    np.testing.assert_array_equal(mask.rights, [[1, 0, 1], [0, 1, 1], [1, 1, 1]])
    # A negative that is the text of one's own positive is none.
    np.testing.assert_array_equal(mask.negatives, [[1, 1, 1], [0, 1, 1], [1, 1, 0]])


def test_a_left_text_equal_to_its_right_text_stays_a_positive():
    tokens = np.array([[5, 1], [6, 1]])
    mask = mask_of(tokens, tokens[::-1], mask_duplicates=True)
    assert mask.rights.all()


# --- text ids -------------------------------------------------------------------------


def test_text_ids_ignore_padding_and_keep_order():
    text = np.array([[5, 6, 7, 1]])
    ids = candidate_masks.text_ids(text)
    assert ids.dtype == jnp.uint32 and ids.shape == (1, 2)
    longer = np.pad(text, [(0, 0), (0, 60)])
    np.testing.assert_array_equal(ids, candidate_masks.text_ids(longer))
    for other in ([[6, 5, 7, 1]], [[5, 6, 1, 0]], [[5, 6, 7, 7]], [[0, 5, 6, 7]]):
        assert np.any(ids != candidate_masks.text_ids(np.array(other)))


def test_text_ids_do_not_collide():
    rng = np.random.default_rng(0)
    texts = rng.integers(2, 32_128, (100_000, 16), np.int32)
    lengths = rng.integers(3, 17, len(texts))
    texts[np.arange(16) >= lengths[:, None]] = 0
    # Close ones too: all pairs of ids at two places of one text.
    close = np.repeat(texts[:1, :3], 40_000, 0)
    close[:, 0], close[:, 2] = np.divmod(np.arange(40_000), 200)
    texts = np.unique(np.concatenate([texts, np.pad(close, [(0, 0), (0, 13)])]), axis=0)
    ids = np.asarray(jax.jit(candidate_masks.text_ids)(texts))
    assert len(np.unique(ids, axis=0)) == len(texts) > 139_000
    # A sample can't show how rare collisions are; that all 64 bits are used can.
    bits = ids[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
    np.testing.assert_allclose(bits.mean(0), 0.5, atol=0.05)


def test_text_ids_of_negatives_have_their_shape():
    tokens = np.arange(24).reshape(2, 3, 4)
    ids = candidate_masks.text_ids(tokens)
    assert ids.shape == (2, 3, 2)
    np.testing.assert_array_equal(ids[1, 2], candidate_masks.text_ids(tokens[1, 2]))


# --- numerics -------------------------------------------------------------------------


def test_gradients_through_the_norm_are_finite_at_zero():
    left, right, negatives = (2.0 * x for x in make_embeddings(1))
    left[1] = right[2] = negatives[3] = 0.0

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss_and_gradients(left, right, negatives):
        unit = map(encoder.l2_normalize, (left, right, negatives))
        return one_loss(*unit, scale=SCALE)

    value, gradients = loss_and_gradients(left, right, negatives)
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    # A vector of length 2 gets half a unit vector's gradient, none of it along itself.
    along = np.sum(gradients[0] * left, axis=-1)
    np.testing.assert_allclose(along, 0, atol=1e-5)

    def in_float64(left, right, negatives):
        norms = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (left, right)]
        unit = [left / norms[0], right / norms[1]]
        unit.append(negatives / np.linalg.norm(negatives, axis=-1, keepdims=True))
        return brute_force(
            *unit, scale=SCALE, bidirectional=True, rows=np.ones(B, bool),
            negative_mask=np.ones((B, 1), bool),
        )  # fmt: skip

    # Differences need vectors that have a direction.
    arrays = [2.0 * x for x in make_embeddings(1)]
    value, gradients = loss_and_gradients(*arrays)
    np.testing.assert_allclose(value, in_float64(*arrays), rtol=1e-5)
    for ours, theirs in zip(gradients, differences(in_float64, arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def dot_precisions(jaxpr):
    """Returns the precision of every product in a jaxpr, nested ones included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(eqn.params["precision"])
        for nested in jax.extend.core.jaxprs_in_params(eqn.params):
            found += dot_precisions(nested)
    return found


def test_products_are_true_float32_on_every_backend():
    left, right, negatives = make_embeddings(1)

    def loss(left, right, negatives):
        projected = [
            encoder.Projection(3).apply({"params": {"kernel": np.eye(E, 3)}}, x)
            for x in (left, right)
        ]
        return one_loss(*projected, negatives[..., :3])

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(left, right, negatives)
    precisions = dot_precisions(jaxpr.jaxpr)
    # Two projections and two products of cosines, with gradients on both sides.
    assert len(precisions) >= 10
    highest = jax.lax.Precision.HIGHEST
    assert set(precisions) == {(highest, highest)}


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -100.0, math.inf, math.nan])
def test_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match=r"logit_scale.*positive.*temperature"):
        losses.LossConfig(logit_scale=scale)


def test_blocks_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"block_rows.*0.*positive.*None"):
        losses.LossConfig(block_rows=0)
    with pytest.raises(ValueError, match=r"block_rows is 4.*divide.*6"):
        loss_and_gradients(
            *make_embeddings(1),
            make_tokens(1),
            NEGATIVE_MASK[:, :1],
            ROW_MASK,
            block_rows=4,
        )


@pytest.mark.parametrize("widths", [(0,), (4, 4), (-1, 2)])
def test_widths_that_cannot_be(widths):
    with pytest.raises(ValueError, match=r"prefix_widths: got .*different positive"):
        losses.LossConfig(prefix_widths=widths)


@pytest.mark.parametrize(
    ("widths", "normalize", "message"),
    [
        ((256, 16), True, r"got \(256, 16\), expected widths below 16"),
        ((8,), False, r"normalize is False.*Set normalize to True"),
    ],
)
def test_widths_that_the_encoder_does_not_have(widths, normalize, message):
    config = encoder.EncoderConfig(projection_dim=16, normalize=normalize)
    optimizer = optim.sgd(optim.constant(0.1))
    with pytest.raises(ValueError, match=message):
        steps.Model(config, losses.LossConfig(prefix_widths=widths), optimizer)


def test_default_is_temperature_one_hundredth():
    assert losses.LossConfig().logit_scale == pytest.approx(1 / 0.01)


def test_sides_must_match():
    left, right, negatives = make_embeddings(1)
    with pytest.raises(ValueError, match=r"\(6, 5\) and \(5, 5\)"):
        one_loss(left, right[1:])
    candidates = make_candidates(*make_tokens(1))
    with pytest.raises(ValueError, match=r"\(5, 1, 5\), expected \[B, N, E\]"):
        one_loss(left, right, negatives[1:], candidates=candidates)
