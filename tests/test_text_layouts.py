"""Layouts of texts: whole, once, in a few shapes, by the cheaper way."""

import jax
import numpy as np
import pytest

from sentence_t5 import encoder, text_layouts
from sentence_t5.t5.config import T5Config

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = encoder.EncoderConfig(
    T5Config(vocab_size=64, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1),
    projection_dim=8,
)


def make_rows(num, longest, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num)
    return [[*rng.integers(2, 64, length - 1).tolist(), 1] for length in lengths]


def lay_out(rows, batch_size=32, max_length=128, num_shards=1):
    return list(
        text_layouts.lay_out(
            rows, CONFIG,
            batch_size=batch_size, max_length=max_length, num_shards=num_shards,
        )
    )  # fmt: skip


def read_back(layouts, num):
    texts = [None] * num
    for layout in layouts:
        for text, place in zip(layout.texts, layout.places, strict=True):
            assert texts[text] is None
            row, slot = divmod(place, layout.num_slots)
            tokens = layout.tokens[row]
            own = layout.slots[row] == slot if layout.slots is not None else tokens > 0
            texts[text] = tokens[own].tolist()
    return texts


@pytest.mark.parametrize(
    ("num", "longest", "packed"),
    [(7, 20, False), (300, 100, False), (300, 30, True), (300, 5, True)],
)
@pytest.mark.parametrize("num_shards", [1, 4])
def test_every_text_is_there_whole_and_once(num, longest, packed, num_shards):
    rows = make_rows(num, longest)
    layouts = lay_out(rows, num_shards=num_shards)
    assert (layouts[0].slots is not None) == packed
    assert read_back(layouts, num) == rows
    for layout in layouts:
        assert layout.tokens.shape[0] % num_shards == 0
        assert layout.tokens.any(axis=1).all()  # no row without a token
    assert len({layout.tokens.shape for layout in layouts}) <= len(
        text_layouts.make_buckets(128)
    )


def test_packing_leaves_less_padding():
    rows = make_rows(400, 30)
    tokens = sum(map(len, rows))
    assert sum(layout.tokens.size for layout in lay_out(rows)) < 1.1 * tokens


@pytest.mark.parametrize(("left", "sizes"), [(0, []), (20, [8] * 3), (25, [32])])
def test_rows_left_over_go_in_small_batches_where_that_saves(left, sizes):
    layouts = lay_out([[5] * 15 + [1]] * (64 + left))
    assert [len(layout.tokens) for layout in layouts] == [32, 32, *sizes]


def test_texts_of_one_length_are_not_packed():
    rows = [[5] * 15 + [1]] * 64
    assert lay_out(rows)[0].slots is None


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "decoder_first"])
def test_packed_vectors_are_those_of_texts_alone(pooling):
    config = encoder.EncoderConfig(CONFIG.t5, pooling, 8, pool_instruction=False)
    module = encoder.SentenceEncoder(config)
    params = jax.jit(module.init)(jax.random.key(0), np.ones((1, 8), np.int32))
    apply = jax.jit(module.apply)
    rows = make_rows(40, 30)
    instructions = np.array([len(row) // 3 for row in rows])
    seen = 0
    for layout in lay_out(rows, batch_size=8, max_length=32):
        embedded = apply(
            params, layout.tokens, layout.spread(instructions), slots=layout.slots,
            text_numbers=np.zeros((len(layout.tokens), layout.num_slots), np.int32),
        )  # fmt: skip
        vectors = np.asarray(embedded).reshape(-1, 8)[layout.places]
        for text, vector in zip(layout.texts, vectors, strict=True):
            row = np.zeros((1, 32), np.int32)
            row[0, : len(rows[text])] = rows[text]
            alone = apply(params, row, instructions[text : text + 1])
            np.testing.assert_allclose(vector, alone[0], atol=1e-5)
            seen += 1
    assert seen == 40
