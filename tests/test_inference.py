"""Encoding: order, padding, shapes compiled, devices, policies, and no TensorFlow."""

import dataclasses
import errno
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import flax.linen as nn
import jax
import numpy as np
import pytest

from sentence_t5 import (
    checkpoints,
    encode,
    encoder,
    given_texts,
    inference,
    partitioning,
    text_layouts,
    vector_files,
)
from sentence_t5.inference import SentenceT5
from sentence_t5.t5.config import T5Config
from sentence_t5.tokenizer import Tokenizer, trim

VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
MAX_LENGTH = 16  # two buckets: every shape costs a compilation

T5 = T5Config(
    vocab_size=1408, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=1
)
CONFIG = encoder.EncoderConfig(t5=T5, pooling="mean", projection_dim=12)


pytestmark = pytest.mark.usefixtures("quick_compilation")


def random_params(config, seed=0):
    """Draws weights with numpy: compiling the initializers takes many seconds."""
    rng = np.random.default_rng(seed)
    init = encoder.SentenceEncoder(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), np.ones((1, 8), np.int32))
    return jax.tree.map(
        lambda x: rng.normal(0.0, 0.5, x.shape).astype(x.dtype),
        nn.unbox(shapes["params"]),
    )


def make_texts(n, seed=0, max_words=18):
    rng = np.random.default_rng(seed)
    words = ["a", "small", "dog", "runs", "in", "the", "park", "while", "two", "cats"]
    return [" ".join(rng.choice(words, rng.integers(0, max_words))) for _ in range(n)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model_dir as train leaves it: steps 0 and 5, random weights."""
    folder = tmp_path_factory.mktemp("model")
    checkpoints.write_description(folder, CONFIG, Tokenizer(VOCABULARY), MAX_LENGTH)
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), folder) as saver:
        for step in (0, 5):
            params = random_params(CONFIG, seed=step)
            saver.save(step, params=params, train={"step": np.int32(step)}, meta={})
    return folder


@pytest.fixture(scope="module")
def model(model_dir):
    return SentenceT5.load(model_dir, devices=jax.devices()[:1])


def plain_encode(texts, config=CONFIG, seed=5):
    """One row at a time, unpadded: what encode must equal."""
    module = encoder.SentenceEncoder(config)
    rows = [trim(row, MAX_LENGTH) for row in Tokenizer(VOCABULARY).encode(texts)]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    params = random_params(config, seed)
    return np.asarray(jax.jit(module.apply)({"params": params}, tokens))


def test_vectors_are_the_encoders_in_input_order(model):
    texts = make_texts(50)
    got = model.encode(texts, on_truncate="ignore")
    assert got.shape == (50, 12)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, plain_encode(texts), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-5)
    # The input is not sorted, so that a wrong order would show.
    assert np.abs(got - got[::-1]).max() > 0.1


def test_a_permuted_input_permutes_the_output(model):
    texts = make_texts(40, seed=1)
    order = np.random.default_rng(2).permutation(40)
    got = model.encode([texts[i] for i in order], on_truncate="ignore")
    want = model.encode(texts, on_truncate="ignore")[order]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_batch_size_does_not_matter(model):
    texts = make_texts(19, seed=3)
    want = model.encode(texts, batch_size=64, on_truncate="ignore")
    got = model.encode(texts, batch_size=2, on_truncate="ignore")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_batch_mates_do_not_matter(model):
    alone = model.encode(["a small dog"])
    beside = model.encode(
        ["a small dog", "two cats sleep " * 100], on_truncate="ignore"
    )
    np.testing.assert_allclose(beside[0], alone[0], atol=1e-5)


def test_the_empty_string_has_a_vector(model):
    got = model.encode(["", "a small dog"])
    assert np.isfinite(got).all()
    np.testing.assert_allclose(np.linalg.norm(got[0]), 1.0, atol=1e-5)
    np.testing.assert_allclose(got[1], model.encode(["a small dog"])[0], atol=1e-5)


def test_one_string_gives_one_vector_and_none_give_none(model):
    np.testing.assert_array_equal(model.encode("a dog"), model.encode(["a dog"])[0])
    empty = model.encode([])
    assert (empty.shape, empty.dtype) == ((0, 12), np.float32)


def test_texts_may_come_from_any_iterable(model):
    want = model.encode(["a dog", "two cats"])
    for texts in (
        ("a dog", "two cats"),
        np.array(["a dog", "two cats"]),
        iter(["a dog", "two cats"]),
    ):
        np.testing.assert_array_equal(model.encode(texts), want)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", float("nan")], r"texts\[1\] is nan \(float\)"),
        (["a", "b", None], r"texts\[2\] is None \(NoneType\)"),
        ([b"a"], r"texts\[0\] is b'a' \(bytes\)"),
        ([["a", "b"]], r"texts\[0\] is \['a', 'b'\] \(list\)"),
        (7, r"texts is a int"),
        ({"a": 1}, r"texts is a dict"),
        ({"a", "b"}, r"texts is a set"),
    ],
)
def test_what_is_no_text_is_named(model, texts, message):
    with pytest.raises(TypeError, match=message):
        model.encode(texts)


# Long texts.


def test_truncation_is_one_line(model, caplog):
    long = "a small dog runs in the park " * 30
    with caplog.at_level(logging.INFO):
        got = model.encode([long + "A", long + "B"])
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("sentence_t5")]
    assert lines == ["2 of 2 texts truncated (max 16 tokens)"]
    np.testing.assert_allclose(got[0], got[1], atol=1e-6)


def test_truncation_policies(model, caplog):
    texts = ["a dog", "a small dog runs in the park " * 30]
    with pytest.raises(
        ValueError, match=r"1 of 2 texts truncated \(max 16 tokens\): texts\[1\] has \d"
    ):
        model.encode(texts, on_truncate="error")
    quiet = model.encode(texts, on_truncate="ignore")
    assert quiet.shape == (2, 12)
    assert not caplog.records
    with pytest.raises(ValueError, match="on_truncate: got 'drop'"):
        model.encode(texts, on_truncate="drop")
    np.testing.assert_array_equal(model.truncated(texts), [False, True])
    np.testing.assert_array_equal(model.truncated(texts, 2), [True, True])


def test_one_string_is_one_text_to_be_trimmed(model):
    long = "a small dog " * 20
    assert model.truncated([long, "dog"]).tolist() == [True, False]
    assert model.truncated(long) == np.True_
    assert model.truncated("dog") == np.False_
    assert model.truncated("dog").shape == ()


@pytest.mark.parametrize("max_length", [0, -1])
def test_a_max_length_below_one_is_said_first(model, caplog, max_length):
    message = rf"^max_length: got {max_length}, expected 1 or more\.$"
    for method in (model.encode, model.truncated):
        with pytest.raises(ValueError, match=message):
            method(["a dog"], max_length=max_length, instruction="Find it:")
    assert not caplog.records


def test_another_max_length(model):
    texts = ["a small dog runs in the park while two cats sleep " * 3]
    short = model.encode(texts, max_length=8, on_truncate="ignore")
    ids = trim(model.tokenizer.encode(texts)[0], 8)
    assert (len(ids), ids[-1]) == (8, 1)
    assert np.abs(short - model.encode(texts, on_truncate="ignore")).max() > 1e-3


# Shapes.


def test_buckets():
    assert text_layouts.make_buckets(512) == [
        8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512
    ]  # fmt: skip
    assert text_layouts.make_buckets(100) == [8, 16, 24, 32, 48, 64, 96, 100]
    assert text_layouts.make_buckets(8) == [8]
    assert text_layouts.make_buckets(3) == [3]


def test_compilations_are_bounded(model_dir):
    model = SentenceT5.load(model_dir, devices=jax.devices()[:1])
    inputs = [make_texts(n, seed=n) for n in range(1, 120, 3)]
    for texts in inputs:
        model.encode(texts, batch_size=8, on_truncate="ignore")
    assert model.num_compilations == len(text_layouts.make_buckets(MAX_LENGTH)) == 2
    # A larger batch has its own shapes, the remainders keep those of the small one.
    for texts in inputs:
        model.encode(texts, batch_size=32, on_truncate="ignore")
    assert model.num_compilations == 4


def test_rows_are_the_same_if_ids_and_instruction_are():
    rows = [[5, 1], [7, 1], [5, 1], [5, 1], [7, 1], [5]]
    lengths = np.array([0, 0, 1, 0, 0, 1])
    firsts, times, same_as = given_texts.distinct(rows, lengths)
    np.testing.assert_array_equal(firsts, [0, 1, 2, 5])
    np.testing.assert_array_equal(times, [2, 2, 1, 1])
    np.testing.assert_array_equal(same_as, [0, 1, 2, 0, 1, 3])
    assert [len(part) for part in given_texts.distinct([], lengths[:0])] == [0, 0, 0]


def test_progress_bar_on_long_inputs_only(model, capsys):
    model.encode(make_texts(64, seed=4), on_truncate="ignore")
    assert capsys.readouterr().err == ""
    texts = make_texts(1300, seed=4)
    model.encode(texts, on_truncate="ignore")
    assert "1300/1300" in capsys.readouterr().err
    model.encode(texts, on_truncate="ignore", show_progress=False)
    assert capsys.readouterr().err == ""


# Devices and precision.


@pytest.mark.parametrize(
    "mesh",
    [
        partitioning.MeshConfig(),
        partitioning.MeshConfig(data=2, fsdp=2, model=2),
    ],
)
def test_any_mesh_gives_the_same_vectors(model, model_dir, mesh):
    texts = make_texts(21, seed=5, max_words=5)
    want = model.encode(texts)
    sharded = SentenceT5.load(model_dir, mesh=mesh)
    got = sharded.encode(texts, batch_size=7)
    np.testing.assert_allclose(got, want, atol=1e-5)
    if mesh.fsdp > 1:
        table = sharded._params["token_embedder"]["embedding"]
        assert table.addressable_shards[0].data.shape == (1408 // 2, 16 // 2)


def test_all_local_devices_hold_a_part_of_the_batch(model_dir):
    model = SentenceT5.load(model_dir)
    assert model._partitioner.num_batch_shards == len(jax.local_devices()) == 8
    batches = []
    embed = model._embed
    model._embed = lambda *inputs: batches.append(inputs[1]) or embed(*inputs)
    model.encode(["a dog", "a cat"] * 5, batch_size=9)
    assert [tokens.shape for tokens in batches] == [(8, 8)]
    assert batches[0].sharding.shard_shape((8, 8)) == (1, 8)


def test_bfloat16_is_close(model, model_dir):
    low = SentenceT5.load(model_dir, dtype="bfloat16", devices=jax.devices()[:1])
    assert low.config.t5.dtype == "bfloat16"
    texts = make_texts(16, seed=6, max_words=5)
    got = low.encode(texts)
    assert got.dtype == np.float32
    want = model.encode(texts)
    cosines = (got * want).sum(1) / np.linalg.norm(got, axis=1)
    assert cosines.min() >= 0.999
    assert np.abs(got - want).max() > 1e-5  # it did compute in bfloat16


def test_damaged_weights_give_an_error_not_nan(model_dir):
    params = random_params(CONFIG)
    params["projection"]["kernel"] = params["projection"]["kernel"] * np.nan
    broken = SentenceT5(
        CONFIG,
        params,
        Tokenizer(VOCABULARY),
        MAX_LENGTH,
        partitioner=partitioning.Partitioner(devices=jax.devices()[:1]),
    )
    with pytest.raises(FloatingPointError, match=r"2 of 2 vectors .*texts\[0\]"):
        broken.encode(["a dog", ""])


def test_shorter_vectors_are_unit_prefixes(model, model_dir, tmp_path, capsys):
    texts = ["a small dog", "", "two cats"]
    whole = model.encode(texts)
    want = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    assert np.linalg.norm(whole[:, :5], axis=1).max() < 0.99  # They were no units.
    np.testing.assert_allclose(model.encode(texts, dim=5), want, atol=1e-6)
    np.testing.assert_allclose(model.encode(texts[0], dim=5), want[0], atol=1e-6)
    np.testing.assert_array_equal(model.encode(texts, dim=12), whole)
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts))
    flags = [f"--model_dir={model_dir}", f"--input={source}", f"--output={target}"]
    assert encode.main([*flags, "--dim=5"]) == 0
    assert "3 vectors of width 5" in capsys.readouterr().out
    np.testing.assert_allclose(np.load(target), want, atol=1e-5)
    short = SentenceT5(CONFIG, model._params, model.tokenizer, MAX_LENGTH, dim=5)
    assert short.fingerprint != model.fingerprint


def test_the_fingerprint_holds_weights_and_the_releases_number(model, monkeypatch):
    def fingerprint(params):
        return SentenceT5(CONFIG, params, model.tokenizer, MAX_LENGTH).fingerprint

    assert fingerprint(model._params) == model.fingerprint
    other = jax.tree.map(lambda x: x + np.float32(1e-6), model._params)
    assert fingerprint(other) != model.fingerprint
    monkeypatch.setattr(inference, "__version__", "0.0.0")
    assert fingerprint(model._params) != model.fingerprint


@pytest.mark.parametrize("dim", [0, 13, -1])
def test_widths_that_the_encoder_does_not_have(model, model_dir, dim):
    message = rf"dim: got {dim}, expected 1 to 12, the width"
    with pytest.raises(ValueError, match=message):
        model.encode(["a"], dim=dim)
    with pytest.raises(ValueError, match=message):
        SentenceT5.load(model_dir, dim=dim)


# Loading.


def test_loads_the_newest_step_or_the_one_named(model, model_dir):
    assert model.step == 5
    assert model.max_length == MAX_LENGTH
    assert model.embedding_dim == 12
    for path, step in ((model_dir, 0), (model_dir / "checkpoints" / "0", None)):
        untrained = SentenceT5.load(path, step, devices=jax.devices()[:1])
        assert untrained.step == 0
        table = untrained._params["token_embedder"]["embedding"]
        want = random_params(CONFIG, seed=0)["token_embedder"]["embedding"]
        np.testing.assert_array_equal(table, want)


def test_load_says_what_is_missing(model_dir, tmp_path):
    message = r"No encoder.json in .*nothing: there is no such folder\.$"
    with pytest.raises(FileNotFoundError, match=message):
        SentenceT5.load(tmp_path / "nothing")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    message = r"in .*hf or above it: .* `sentence-t5 import` makes a model_dir\.$"
    with pytest.raises(FileNotFoundError, match=message):
        SentenceT5.load(tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=r"No step 3 in .*0, 5"):
        SentenceT5.load(model_dir, step=3)


def test_a_description_of_another_encoder_is_an_error(model_dir, tmp_path):
    other = encoder.EncoderConfig(t5=T5, projection_dim=13)
    checkpoints.write_description(tmp_path, other, Tokenizer(VOCABULARY), MAX_LENGTH)
    (tmp_path / "checkpoints").symlink_to(model_dir / "checkpoints")
    message = r"projection/kernel: it has float32 \[16 12\], wanted float32 \[16 13\]"
    with pytest.raises(ValueError, match=message):
        SentenceT5.load(tmp_path)


def test_description_round_trip(model_dir):
    got = checkpoints.read_description(model_dir / "checkpoints" / "5" / "params")
    assert got.encoder == CONFIG
    assert got.max_length == MAX_LENGTH
    assert got.tokenizer.describe() == Tokenizer(VOCABULARY).describe()
    assert got.model_dir.name == model_dir.name


def test_description_refuses_another_meaning(model_dir):
    tokenizer = Tokenizer(VOCABULARY)
    first = encoder.EncoderConfig(t5=T5, pooling="first", projection_dim=12)
    with pytest.raises(ValueError, match="pooling was 'mean', now 'first'"):
        checkpoints.write_description(model_dir, first, tokenizer, MAX_LENGTH)
    with pytest.raises(ValueError, match="extra_ids was 100, now 10"):
        checkpoints.write_description(
            model_dir, CONFIG, Tokenizer(VOCABULARY, 10), MAX_LENGTH
        )
    # The same run may go on computing in another way.
    t5 = dataclasses.replace(T5, dtype="bfloat16", grad_dtype="float32", remat="full")
    other = dataclasses.replace(CONFIG, t5=t5)
    checkpoints.write_description(model_dir, other, tokenizer, MAX_LENGTH)
    try:
        assert SentenceT5.load(model_dir, dtype="float32").config.t5.dtype == "float32"
    finally:
        checkpoints.write_description(model_dir, CONFIG, tokenizer, MAX_LENGTH)


def test_going_on_keeps_prompts_and_says_another_length(model_dir, tmp_path, caplog):
    folder = shutil.copytree(model_dir, tmp_path / "run")
    tokenizer = Tokenizer(VOCABULARY)
    prompts = {"query": "query: "}
    checkpoints.write_description(
        folder, CONFIG, tokenizer, MAX_LENGTH, prompts=prompts, default_prompt="query"
    )
    assert not caplog.records
    checkpoints.write_description(folder, CONFIG, tokenizer, MAX_LENGTH + 8)
    description = checkpoints.read_description(folder)
    assert description.prompts == prompts and description.default_prompt == "query"
    assert description.max_length == MAX_LENGTH + 8
    assert f"to {MAX_LENGTH} tokens until now, from here on to" in caplog.text


def test_description_refuses_a_small_table_and_another_vocabulary(tmp_path):
    tokenizer = Tokenizer(VOCABULARY)
    small = encoder.EncoderConfig(t5=T5Config(vocab_size=1000))
    with pytest.raises(ValueError, match=r"vocab_size is 1000.*ids up to 1379"):
        checkpoints.write_description(tmp_path, small, tokenizer, MAX_LENGTH)
    checkpoints.write_description(tmp_path, CONFIG, tokenizer, MAX_LENGTH)
    vocabulary = tmp_path / "spiece.model"
    vocabulary.write_bytes(vocabulary.read_bytes() + b"\x1a\x00")
    with pytest.raises(ValueError, match="not the vocabulary this model was trained"):
        checkpoints.read_description(tmp_path)


# The command.


def test_encode_command(model, model_dir, tmp_path, capsys):
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_bytes("a small dog\r\n\nnext\u0085line\ntwo cats".encode())
    flags = [f"--model_dir={model_dir}", f"--input={source}", f"--output={target}"]
    assert encode.main(flags) == 0
    assert "4 vectors of width 12" in capsys.readouterr().out
    want = model.encode(["a small dog", "", "next\u0085line", "two cats"])
    np.testing.assert_allclose(np.load(target), want, atol=1e-5)
    assert not list(tmp_path.glob("*.part"))


def test_encode_in_parts(model, tmp_path):
    texts = make_texts(30, seed=8)
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    encode.encode_file(
        model, source, target, num_lines=30, part_lines=7, on_truncate="ignore"
    )
    want = model.encode(texts, on_truncate="ignore")
    np.testing.assert_allclose(np.load(target), want, atol=1e-5)


def test_encode_command_reads_a_pipe(model, model_dir, tmp_path, capsys):
    pipe, target = tmp_path / "pipe", tmp_path / "out.npy"
    os.mkfifo(pipe)
    flags = [f"--model_dir={model_dir}", f"--input={pipe}", f"--output={target}"]

    def encode_bytes(content):
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        try:
            return encode.main(flags)
        finally:
            writer.join()

    assert encode_bytes(b"a small dog\n\ntwo cats\n") == 0
    assert "3 vectors of width 12" in capsys.readouterr().out
    want = model.encode(["a small dog", "", "two cats"])
    np.testing.assert_allclose(np.load(target), want, atol=1e-5)
    assert encode_bytes(b"fine\ncaf\xe9\n") == 1
    assert f"{pipe}, line 2: byte 3 is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_lines", "message"),
    [(8, "expected the 8 lines that were counted, got 7"), (6, "6 .*, got more")],
)
def test_a_file_that_changes_under_encode_is_an_error(
    model, tmp_path, num_lines, message
):
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("a small dog\n" * 7)
    with pytest.raises(ValueError, match=message):
        encode.encode_file(model, source, target, num_lines=num_lines, part_lines=4)
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_is_one_line(model_dir, tmp_path, capsys, monkeypatch):
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("a small dog\n" * 3)
    flags = [f"--model_dir={model_dir}", f"--input={source}", f"--output={target}"]
    sizes = []

    def refuse(code):
        def allocate(descriptor, start, size):
            sizes.append((start, size, os.fstat(descriptor).st_size))
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", allocate)

    refuse(errno.ENOSPC)
    assert encode.main(flags) == 1
    assert capsys.readouterr().err.strip() == (
        "encode: [Errno 28] No space left on device: 3 vectors of width 12 take "
        f"1.44e-07 GB in {tmp_path}. Make room there, or name another folder"
    )
    assert not list(tmp_path.glob("out*"))
    # All of the file's room is asked for: its header's, and 3 x 12 float32.
    assert sizes == [(0, 128 + 144, 128 + 144)]
    # A disk that can't set room aside does without.
    refuse(errno.EOPNOTSUPP)
    assert encode.main(flags) == 0
    assert len(sizes) == 2
    assert np.load(target).shape == (3, 12)


def test_room_on_disk_is_taken_at_once(tmp_path):
    vectors = vector_files.create(tmp_path / "v.npy", (4096, 64))
    assert not vectors.any()
    assert os.stat(tmp_path / "v.npy").st_blocks * 512 >= 4096 * 64 * 4


def test_encode_command_names_the_flag_of_a_bad_path(tmp_path, capsys):
    source = tmp_path / "texts.txt"
    source.write_text("a small dog\n")
    expected = "expected a text file, one text a line."
    for given, target, message in (
        ("nope.txt", "v.npy", f"--input=nope.txt: there is no such file, {expected}"),
        (tmp_path, "v.npy", f"--input={tmp_path}: that is a folder, {expected}"),
        (
            source,
            f"{tmp_path}/gone/v.npy",
            f"--output={tmp_path}/gone/v.npy: there is no folder {tmp_path}/gone. "
            "Make it.",
        ),
        (source, tmp_path, f"--output={tmp_path}: that is no file. Name one to write."),
    ):
        flags = ["--model_dir=m", f"--input={given}", f"--output={target}"]
        assert encode.main(flags) == 1
        assert capsys.readouterr().err == f"encode: {message}\n"


def test_encode_command_errors(model_dir, tmp_path, capsys):
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_bytes(b"fine\ncaf\xe9\n")
    flags = [f"--model_dir={model_dir}", f"--input={source}", f"--output={target}"]
    assert encode.main(flags) == 1
    assert "texts.txt, line 2: byte 3 is not UTF-8 (0xe9)" in capsys.readouterr().err
    source.write_bytes(b"fine\n" + b"a small dog " * 100)
    assert encode.main([*flags, "--on_truncate=error"]) == 1
    assert "1 of 2 texts truncated" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_encode_command_of_an_empty_file(model_dir, tmp_path):
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.touch()
    flags = [f"--model_dir={model_dir}", f"--input={source}", f"--output={target}"]
    assert encode.main(flags) == 0
    assert np.load(target).shape == (0, 12)


@pytest.mark.entry
@pytest.mark.slow
def test_never_imports_tensorflow(model_dir):
    code = (
        "import sys; from sentence_t5 import SentenceT5; "
        f"v = SentenceT5.load({str(model_dir)!r}).encode(['a dog', '']); "
        "print(v.shape, sorted({'tensorflow', 'seqio', 'torch'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "(2, 12) []"
