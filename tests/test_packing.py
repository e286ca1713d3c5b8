"""Packed batches against padded ones: the same texts, losses and updates."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sentence_t5 import (
    batching,
    encoder,
    losses,
    names,
    optim,
    packing,
    partitioning,
    schedules,
    steps,
    text_groups,
)
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenized import Texts, TokenizedExamples

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, L, P, STEPS = 16, 12, 16, 5
LENGTHS = {"inputs": L, "targets": 8, "negative_targets": 8}
T5 = T5Config(
    vocab_size=64, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=2,
    num_decoder_layers=1, dropout_rate=0.1,
)  # fmt: skip


def make_texts(rng, num, longest, instructions):
    rows = [
        [*rng.integers(2, 64, rng.integers(1, longest)), names.EOS_ID]
        for _ in range(num)
    ]
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    lengths = None
    if instructions:
        lengths = np.array([rng.integers(0, len(row)) for row in rows], np.int32)
    return Texts(np.concatenate(rows).astype(np.uint16), starts, lengths)


@functools.cache
def examples(num=50, instructions=False, seed=0, longest=L + 4):
    """Random texts, some longer than they may be, with up to three negatives each."""
    rng = np.random.default_rng(seed)
    negative_rows = np.cumsum([0, *rng.integers(0, 4, num)], dtype=np.int64)
    counts = {"inputs": num, "targets": num, "negative_targets": negative_rows[-1]}
    texts = {
        key: make_texts(rng, count, longest, instructions)
        for key, count in counts.items()
    }
    return TokenizedExamples("t", "train", "f", 64, 63, texts, negative_rows)


def make_padded(num_negatives=2, schedule=None, parts=None, **host):
    parts = parts or [batching.Part(examples(), B)]
    return batching.TrainBatches(
        parts, LENGTHS, seed=3, shuffle=True, num_negatives=num_negatives,
        schedule=schedule, **{"process_index": 0, "process_count": 1} | host,
    )  # fmt: skip


def make_packed(padded, num_shards=1, num_chunks=1, num_rows=None, **host):
    return packing.PackedBatches(
        padded, P, num_rows=num_rows, num_shards=num_shards, num_chunks=num_chunks,
        **{"process_index": 0, "process_count": 1} | host,
    )  # fmt: skip


def texts_of(packed):
    """Reads a packed batch back: for each pair its texts, lists of ids."""
    places = packed[names.PACKED_PLACES]
    shards = places.shape[0]
    slots_per_row = packed[names.PACKED_NUMBERS].shape[1]
    tokens = packed[names.PACKED_TOKENS].reshape(shards, -1, P)
    slots = packed[names.PACKED_SLOTS].reshape(shards, -1, P)
    pairs = []
    for shard, pair in np.ndindex(places.shape[:2]):
        pairs.append([])
        for place in places[shard, pair]:
            row, slot = divmod(place, slots_per_row)
            found = tokens[shard, row][slots[shard, row] == slot] if place >= 0 else []
            pairs[-1].append(list(found))
    return pairs


@pytest.mark.parametrize("num_shards", [1, 4])
def test_every_text_is_there_whole_once_and_in_one_piece(num_shards):
    padded, packed = make_padded(), make_packed(make_padded(), num_shards)
    for step in range(7):  # into the third epoch
        expected, ids = padded.batch(step)
        batch, packed_ids = packed.batch(step)
        order = np.argsort(packed_ids)[np.argsort(np.argsort(ids))]
        np.testing.assert_array_equal(packed_ids[order], ids)
        columns = [expected[key][:, None] for key in ("left_tokens", "right_tokens")]
        columns = [np.pad(c, ((0, 0), (0, 0), (0, L - c.shape[-1]))) for c in columns]
        negatives = expected[names.NEGATIVE_TOKENS]
        columns.append(np.pad(negatives, ((0, 0), (0, 0), (0, L - 8))))
        rows = np.concatenate(columns, axis=1)
        want = [[list(text[text > 0]) for text in pair] for pair in rows]
        found = texts_of(batch)
        assert [found[i] for i in order] == want
        real = batch[names.PACKED_TOKENS] > 0
        assert real.sum() == (rows > 0).sum()
        np.testing.assert_array_equal(batch[names.PACKED_SLOTS] >= 0, real)
        for slots in batch[names.PACKED_SLOTS]:
            changes = np.flatnonzero(np.diff(slots))
            assert len(changes) == len(set(slots)) - 1  # each text in one piece


def test_numbers_are_those_of_the_padded_batch():
    padded, packed = make_padded(), make_packed(make_padded(), 4)
    lengths = padded.text_lengths(2).reshape(-1)
    batch, _ = packed.batch(2)
    numbers = batch[names.PACKED_NUMBERS]
    seen = np.sort(numbers[numbers >= 0])
    np.testing.assert_array_equal(seen, np.flatnonzero(lengths))
    for row, slots in enumerate(batch[names.PACKED_SLOTS]):
        sizes = np.bincount(slots[slots >= 0], minlength=numbers.shape[1])
        real = numbers[row] >= 0
        np.testing.assert_array_equal(sizes[real], lengths[numbers[row][real]])


def test_lengths_are_counted_without_reading_the_texts():
    for instructions in (False, True):
        parts = [batching.Part(examples(instructions=instructions), B)]
        padded = make_padded(parts=parts)
        batch, _ = padded.batch(1)
        keys = (names.LEFT_TOKENS, names.RIGHT_TOKENS, names.NEGATIVE_TOKENS)
        counts = [np.count_nonzero(batch[key], axis=-1).reshape(B, -1) for key in keys]
        np.testing.assert_array_equal(
            padded.text_lengths(1), np.concatenate(counts, axis=1)
        )


def test_hosts_make_the_parts_of_one_global_batch():
    whole = make_packed(make_padded(), num_shards=4)
    for step in range(3):
        batch, ids = whole.batch(step)
        parts = [
            make_packed(
                make_padded(process_index=host, process_count=2),
                num_shards=4, process_index=host, process_count=2,
            ).batch(step)
            for host in range(2)
        ]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), ids)
        for key, values in batch.items():
            joined = np.concatenate([part[key] for part, _ in parts])
            np.testing.assert_array_equal(joined, values, key)


def test_a_batch_that_needs_more_rows_gets_them(caplog):
    packed = make_packed(make_padded(), num_shards=2, num_rows=2, num_chunks=1)
    batch, _ = packed.batch(0)
    assert batch[names.PACKED_TOKENS].shape[0] > 2
    assert "instead of 2: its step is compiled anew" in caplog.text
    assert sum(bool(text) for pair in texts_of(batch) for text in pair) == (
        np.count_nonzero(make_padded().text_lengths(0))
    )


def test_one_shape_for_all_tasks_of_a_mixture():
    parts = [
        batching.Part(examples(40, seed=1, longest=4), B),
        batching.Part(examples(40, seed=2), B, first_id=40),
    ]
    schedule = schedules.Schedule([0.5, 0.5], seed=0, shuffle=True)
    packed = make_packed(make_padded(schedule=schedule, parts=parts))
    shapes = {packed.batch(step)[0][names.PACKED_TOKENS].shape for step in range(12)}
    assert len(shapes) == 1


def test_refusals():
    with pytest.raises(ValueError, match=r"packed_length is 16.*'inputs'.*20 tokens"):
        padded = make_padded()
        padded.lengths["inputs"] = 20
        make_packed(padded)
    with pytest.raises(ValueError, match=r"packed_rows is 9.*multiple of 4"):
        make_packed(make_padded(), num_shards=2, num_chunks=2, num_rows=9)


# Rows.


def brute_force_fits(lengths, rows, starts, slots, num_rows):
    """Checks by going over the tokens one by one."""
    used = [[None] * P for _ in range(num_rows)]
    for text, length in enumerate(lengths):
        for place in range(starts[text], starts[text] + length):
            assert used[rows[text]][place] is None
            used[rows[text]][place] = slots[text]
    return used


def test_rows_are_filled():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, P // 2 + 2, 400)
    rows, starts, slots, made = packing.pack(lengths, P, max_texts=P)
    brute_force_fits(lengths, rows, starts, slots, len(made))
    assert len(made) <= math.ceil(lengths.sum() / P) + 1


def test_a_row_has_no_more_texts_than_it_may():
    lengths = np.full(30, 2)
    rows, _, slots, made = packing.pack(lengths, P, max_texts=3)
    assert len(made) == 10
    assert slots.max() == 2
    np.testing.assert_array_equal(np.bincount(rows), 3)


def test_devices_have_as_many_pairs_and_about_as_many_tokens():
    tokens = np.random.default_rng(0).integers(5, 60, 256)
    pairs = packing._share_out(tokens, 8)
    np.testing.assert_array_equal(np.sort(pairs.reshape(-1)), np.arange(256))
    sums = tokens[pairs].sum(axis=1)
    assert np.ptp(sums) <= tokens.max()


# Numbers.


def make_trainer(pooling, mesh, microbatch_size=None, optimizer="sgd", t5=T5):
    partitioner = partitioning.Partitioner(
        partitioning.MeshConfig(*mesh), jax.devices()[: math.prod(mesh)]
    )
    config = encoder.EncoderConfig(t5, pooling, 8, pool_instruction=False)
    rates = {
        "sgd": optim.sgd(optim.constant(0.003)),
        "adafactor": optim.adafactor(
            optim.linear_decay(peak=0.02, total_steps=50), min_dim_size_to_factor=8
        ),
    }
    model = steps.Model(
        config, losses.LossConfig(logit_scale=20.0, mask_duplicates=True),
        rates[optimizer],
    )  # fmt: skip
    return steps.Trainer(model, partitioner, microbatch_size)


def run(trainer, batches):
    state = trainer.init_state(0)
    values = []
    for step in range(STEPS):
        batch = trainer.partitioner.put_batch(batches.batch(step)[0])
        state, metrics = trainer.train_step(state, batch)
        values.append(jax.device_get(metrics))
    return values, jax.device_get(state.params)


def padded_batches(num_negatives, instructions):
    parts = [batching.Part(examples(instructions=instructions), B)]
    return make_padded(num_negatives, parts=parts)


@functools.cache
def run_padded(pooling, num_negatives, instructions, optimizer):
    """Trains without packing on one device."""
    trainer = make_trainer(pooling, (1, 1, 1), optimizer=optimizer)
    return run(trainer, padded_batches(num_negatives, instructions))


def compare(
    pooling, num_negatives, mesh, *, instructions=False, optimizer="sgd", **more
):
    want, want_params = run_padded(pooling, num_negatives, instructions, optimizer)
    padded = padded_batches(num_negatives, instructions)
    trainer = make_trainer(pooling, mesh, optimizer=optimizer, **more)
    packed = make_packed(
        padded, trainer.partitioner.num_batch_shards, trainer.num_chunks(B)
    )
    got, params = run(trainer, packed)
    for have, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(have["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(have["accuracy"], expected["accuracy"], atol=1e-6)
    for path, expected in jax.tree_util.tree_leaves_with_path(want_params):
        have = functools.reduce(lambda tree, key: tree[key.key], path, params)
        error = np.linalg.norm(have - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def test_packed_gradients_are_padded_gradients():
    parts = [batching.Part(examples(instructions=True), B)]
    padded = make_padded(parts=parts)
    results = []
    # Quick to compile; the slow tests have dropout and two scanned layers.
    t5 = dataclasses.replace(T5, num_layers=1, scan_layers=False, dropout_rate=0.0)
    for batches, shards in ((padded, 1), (make_packed(padded, 2), 2)):
        trainer = make_trainer("mean", (shards, 1, 1), t5=t5)
        params = random_params(trainer)
        batch = trainer.partitioner.put_batch(batches.batch(0)[0])
        gradients = jax.jit(trainer._value_and_grad)
        results.append(jax.device_get(gradients(params, batch, jax.random.key(1))))
    ((want, _), expected), ((got, _), grads) = results
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        have = functools.reduce(lambda tree, key: tree[key.key], path, grads)
        error = np.linalg.norm(have - leaf) / np.linalg.norm(leaf)
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def random_params(trainer):
    """Draws weights with numpy: compiling the initializers takes many seconds."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32),
        trainer.abstract_state.params,
    )


@pytest.mark.slow
def test_packed_training_is_padded_training_on_a_mesh():
    compare("mean", 2, (2, 2, 2), instructions=True, microbatch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize("pooling", ["mean", "first", "attention", "decoder_first"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (8, 1, 1)])
def test_packed_training_is_padded_training_for_all(
    pooling, num_negatives, mesh, optimizer
):
    compare(pooling, num_negatives, mesh, optimizer=optimizer)
    compare(
        pooling, num_negatives, mesh,
        optimizer=optimizer, microbatch_size=8, instructions=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "pooling",
    [
        "mean",
        *[pytest.param(p, marks=pytest.mark.slow) for p in encoder.POOLINGS[1:]],
    ],
)
def test_texts_of_a_row_do_not_see_each_other(pooling):
    trainer = make_trainer(pooling, (1, 1, 1))
    params = random_params(trainer)
    batch, _ = make_packed(make_padded()).batch(0)
    (texts,) = text_groups.make_groups(jax.tree.map(jnp.asarray, batch))
    module = encoder.SentenceEncoder(trainer.model.encoder)
    embed = jax.jit(functools.partial(text_groups.embed, module, rng=None))
    before = embed(params, texts)
    row = int(np.argmax((texts.numbers >= 0).sum(axis=1)))
    place = int(np.argmax(texts.slots[row] == 1))
    tokens = texts.tokens.at[row, place].set(63 - texts.tokens[row, place] // 2)
    after = embed(params, texts._replace(tokens=tokens))
    moved = np.abs(np.asarray(after - before)).max(axis=-1)
    assert moved[row, 1] > 1e-3
    moved[row, 1] = 0
    moved[np.asarray(texts.numbers) < 0] = 0
    assert moved.max() <= 1e-6


def test_packed_texts_have_the_ids_of_padded_ones():
    padded, packed = make_padded(), make_packed(make_padded(), 4)
    batch, ids = padded.batch(0)
    packed_batch, packed_ids = packed.batch(0)
    order = np.argsort(packed_ids)[np.argsort(np.argsort(ids))]
    want, have = text_groups.text_ids(batch), text_groups.text_ids(packed_batch)
    for expected, found in zip(want, have, strict=True):
        expected, found = np.asarray(expected), np.asarray(found)[order]
        real = expected.any(axis=-1)
        np.testing.assert_array_equal(found[real], expected[real])


@pytest.mark.slow
def test_dropout_does_not_depend_on_a_text_s_row():
    # A row's only text and the second of three have the same draws.
    config = dataclasses.replace(T5, dropout_rate=0.5)
    module = encoder.SentenceEncoder(encoder.EncoderConfig(config, "decoder_first", 8))
    text = jnp.array([[5, 9, 6, 1]])
    variables = jax.jit(module.init)(jax.random.key(0), text)
    apply = jax.jit(module.apply)

    def embed(tokens, numbers, slots=None):
        return apply(
            variables, jnp.array(tokens), text_numbers=jnp.array(numbers), slots=slots,
            rngs={"dropout": jax.random.key(1)},
        )  # fmt: skip

    alone = embed(jnp.pad(text, ((0, 0), (0, 3))), [7])
    row = [[4, 1, 5, 9, 6, 1, 8, 1, 0]]
    slots = jnp.array([[0, 0, 1, 1, 1, 1, 2, 2, -1]])
    packed = embed(row, [[3, 7, 9, -1]], slots)
    np.testing.assert_allclose(packed[0, 1], alone[0], atol=1e-6)
    other = embed(row, [[3, 8, 9, -1]], slots)
    assert np.abs(other[0, 1] - alone[0]).max() > 1e-2
