"""Checkpoints of every format, read name by name; what does not fit is said."""

import collections
import dataclasses
import io
import json
import logging
import os
import pathlib
import pickle
import shutil
import socket
import sys
import tracemalloc
import types
import zipfile

import checkpoint_folders as folders
import flax.serialization
import flax.traverse_util
import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sentencepiece import sentencepiece_model_pb2

from sentence_t5 import (
    checkpoints,
    import_weights,
    inference,
    inspect_weights,
    pretrained,
)
from sentence_t5 import encoder as encoder_lib
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.pretrained import (
    huggingface,
    matching,
    name_tables,
    orbax_files,
    remote,
    safetensors_io,
    source,
    t5x,
    tensors,
    torch_files,
    vocabulary_files,
)

DATA = pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", ""))
REAL = DATA / "checkpoints"
needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason="SENTENCE_T5_TEST_DATA holds no checkpoints/"
)
ENCODER = encoder_lib.EncoderConfig(t5=folders.T5_1_0, projection_dim=6)


def flat(tree):
    return flax.traverse_util.flatten_dict(tree, sep="/")


def fill(opened, config, **options):
    shapes = pretrained.abstract_params(config)
    return matching.restore(opened, shapes, config, **options)


# --- Hugging Face -------------------------------------------------------------------


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("version", ["1_0", "1_1"])
def test_hugging_face_and_back_is_bit_equal(tmp_path, version, scan_layers):
    weights = folders.golden_weights(version)
    gated = {"feed_forward_proj": "gated-gelu"} if version == "1_1" else {}
    folder = folders.write_huggingface(tmp_path / "hf", weights, **gated)
    opened = pretrained.open_checkpoint(folder)
    assert opened.config.t5.num_decoder_layers == 2
    config = dataclasses.replace(
        opened.config,
        pooling="decoder_first",
        t5=dataclasses.replace(opened.config.t5, scan_layers=scan_layers),
    )
    params, report = fill(opened, config)
    assert len(report.loaded) == len(flat(params))
    assert not report.initialised and not report.ignored
    back = {}
    for name, value in folders.unrolled(flat(params)).items():
        theirs, transposed = name_tables.HUGGINGFACE.to_theirs(name)
        back[theirs] = value.T if transposed else value
    assert set(back) == set(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_shards_and_their_index(tmp_path):
    weights = folders.golden_weights()
    folder = folders.write_huggingface(tmp_path, {})
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for shard, held in shards.items():
        folders.write_safetensors(folder / shard, {n: weights[n] for n in held})
    index = {"weight_map": {n: s for s, held in shards.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = huggingface.open_weights(folder)
    assert set(opened) == set(weights)
    np.testing.assert_array_equal(opened[names[3]].read(), weights[names[3]])
    del shards["b.safetensors"][0]
    folders.write_safetensors(folder / "b.safetensors", {names[-1]: weights[names[-1]]})
    with pytest.raises(ValueError, match=f"b.safetensors lacks {names[20]}"):
        huggingface.open_weights(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names b.safetensors, which is not"):
        huggingface.open_weights(folder)


S, E, D, H = (np.full((60, 16), value, np.float32) for value in (1, 2, 3, 4))
TABLES = {
    "shared": "shared",
    "enc": "encoder.embed_tokens",
    "dec": "decoder.embed_tokens",
    "head": "lm_head",
}


@pytest.mark.parametrize(
    "held, expected, done",
    [
        ({"shared": S}, S, []),
        ({"shared": S, "enc": S, "dec": S, "head": H}, S, ["shared", "dec", "head"]),
        ({"shared": S, "head": H}, S, ["head"]),
        ({"enc": S, "head": H}, S, ["head"]),
        ({"dec": S, "head": H}, S, ["head"]),
        ({"head": H}, H, []),
        ({"shared": S, "enc": E}, E, []),
        ({"enc": E, "dec": D}, E, []),
    ],
)
def test_the_encoder_gets_its_own_table(tmp_path, held, expected, done):
    """Other loaders have taken the output head, or noise, for the embeddings."""
    weights = folders.golden_weights()
    del weights["shared.weight"]
    weights |= {f"{TABLES[key]}.weight": table for key, table in held.items()}
    opened = pretrained.open_checkpoint(folders.write_huggingface(tmp_path, weights))
    np.testing.assert_array_equal(
        opened.tensors["token_embedder/embedding"].read(), expected
    )
    assert set(opened.never_needed) == {f"{TABLES[key]}.weight" for key in done}
    # A decoder with a table of its own is no decoder of ours, but the encoder is one.
    own = "decoder/token_embedder/embedding" in opened.tensors
    assert own == (held.get("enc") is E)
    pretrained.load_encoder(tmp_path)
    if own:
        with pytest.raises(ValueError, match="left over: decoder/token_embedder"):
            pretrained.load_encoder(tmp_path, pooling="decoder_first")


def test_no_table_is_an_error(tmp_path):
    weights = folders.golden_weights()
    weights["lm_head.weight"] = weights.pop("shared.weight")
    folder = folders.write_huggingface(tmp_path, weights, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"no table of input embeddings: .*shared"):
        pretrained.open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_cast_up(tmp_path, dtype):
    weights = folders.golden_weights(decoder=False)
    folder = folders.write_huggingface(tmp_path, weights, dtype)
    params = flat(pretrained.load_encoder(folder).read_params())
    assert {value.dtype for value in params.values()} == {np.dtype("float32")}
    for name, value in (
        ("token_embedder/embedding", weights["shared.weight"]),
        ("encoder/final_norm/scale", weights["encoder.final_layer_norm.weight"]),
    ):
        np.testing.assert_array_equal(
            params[name], value.astype(dtype).astype(np.float32)
        )


def test_layers_with_biases_of_their_own(tmp_path):
    weights = folders.golden_weights(decoder=False)
    name = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    weights[name.format(1)] = weights[name.format(0)].copy()
    folder = folders.write_huggingface(tmp_path, weights, model_type="umt5")
    assert pretrained.open_checkpoint(folder).never_needed == (name.format(1),)
    weights[name.format(1)][0, 0] += 1
    folders.write_huggingface(tmp_path, weights, model_type="umt5")
    with pytest.raises(ValueError, match=r"block\.1.*differs.*as in UMT5"):
        pretrained.open_checkpoint(folder)


def test_folders_that_are_no_t5(tmp_path):
    weights = folders.golden_weights(decoder=False)
    folders.write_huggingface(tmp_path, weights, model_type="bert")
    with pytest.raises(ValueError, match="a 'bert' model, expected one of t5, mt5"):
        pretrained.open_checkpoint(tmp_path)
    folders.write_huggingface(tmp_path, weights, feed_forward_proj="gated-silu")
    with pytest.raises(
        ValueError, match=r"feed_forward_proj is 'gated-silu', expected"
    ):
        pretrained.open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "tf_model.h5")
    with pytest.raises(
        FileNotFoundError, match=r"holds no weights: expected one of mod"
    ):
        pretrained.open_checkpoint(tmp_path)


# --- safetensors --------------------------------------------------------------------


def test_safetensors_read_in_parts(tmp_path):
    values = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "number": np.array(7, np.int64),
        "nothing": np.zeros((0, 2), np.float32),
    }
    path = tmp_path / "x.safetensors"
    safetensors_io.write_file(
        path, {k: tensors.from_array(v) for k, v in values.items()}
    )
    opened = safetensors_io.open_file(path)
    for name, value in values.items():
        read = opened[name].read()
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)
    part = opened["matrix"].T.read((slice(1, 3), slice(0, 99)))
    np.testing.assert_array_equal(part, values["matrix"].T[1:3])
    # The layout other readers rely on: a length, then JSON, then data.
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["matrix"] == {
        "dtype": "F32",
        "shape": [3, 4],
        "data_offsets": [0, 48],
    }
    assert data[8 + length :][:48] == values["matrix"].tobytes()


def test_a_cut_off_file_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    folders.write_safetensors(path, {"a": np.ones(100), "b": np.ones(100)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"x.safetensors is cut short: tensor b ends"):
        safetensors_io.open_file(path)
    path.write_bytes(whole[:20])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        safetensors_io.open_file(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        safetensors_io.open_file(path)


# --- torch's own files --------------------------------------------------------------


class Named:
    """Pickles as a reference to a name of a module that need not be importable."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Pickler(pickle._Pickler):
    """Writes the pickle of ``torch.save`` without torch."""

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())
            return
        super().save(obj, save_persistent_id)

    def persistent_id(self, obj):
        return obj[1:] if isinstance(obj, tuple) and obj[:1] == ("persist",) else None


def write_torch(path, arrays, extra=None):
    """Writes arrays as torch does: transposed ones keep their strides."""
    content, data = {}, {}
    for key, (name, value) in enumerate(arrays.items()):
        flat_value = value.T if value.flags.f_contiguous else value
        data[str(key)] = np.ascontiguousarray(flat_value).tobytes()
        kind = {"float32": "FloatStorage", "float16": "HalfStorage"}[value.dtype.name]
        storage = ("persist", "storage", Named("torch", kind), str(key), "cpu", 1)
        strides = tuple(step // value.itemsize for step in value.strides)
        content[name] = (storage, 0, value.shape, strides)
    stream = io.BytesIO()
    pickler = Pickler(stream, protocol=2)
    pickler.write(b"\x80\x02}(")
    for name, args in content.items():
        pickler.save(name)
        pickler.save(Named("torch._utils", "_rebuild_tensor_v2"))
        pickler.save((*args, False, collections.OrderedDict()))
        pickler.write(b"R")
    if extra is not None:
        pickler.save("extra")
        pickler.save(extra)
    pickler.write(b"u.")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", stream.getvalue())
        for key, value in data.items():
            archive.writestr(f"model/data/{key}", value)


def test_torch_file_is_read_without_torch(tmp_path):
    weights = folders.golden_weights()
    folder = folders.write_huggingface(tmp_path, weights)
    expected = flat(pretrained.load_encoder(folder).read_params())
    (folder / "model.safetensors").unlink()
    weights["shared.weight"] = np.asfortranarray(weights["shared.weight"])
    write_torch(folder / "pytorch_model.bin", weights)
    assert_same(flat(pretrained.load_encoder(folder).read_params()), expected)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"pytorch_model.bin is no file of torch 1.6"):
        pretrained.open_checkpoint(folder)


def test_opening_a_large_torch_file_reads_little_of_it(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_torch(path, {"a": np.arange(3, dtype=np.float32)})
    hole = 2**26
    with zipfile.ZipFile(path, "a") as archive:
        archive.start_dir += hole
        archive.writestr("model/version", "3")
    assert path.stat().st_size > hole
    tracemalloc.start()
    try:
        opened = torch_files.open_file(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(opened["a"].read(), [0, 1, 2])
    assert peak < 2**20


def test_torch_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_torch(path, {"a": np.ones(3, np.float32)}, extra=Named("os", "system"))
    with pytest.raises(ValueError, match=r"names os.system, which no file of tensors"):
        torch_files.open_file(path)


# --- sentence-transformers ----------------------------------------------------------


def write_st(tmp_path, **options):
    projection = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    folder = folders.write_sentence_transformers(
        tmp_path / "st", folders.golden_weights(decoder=False), projection, **options
    )
    return folder, projection


@pytest.mark.parametrize("new", [True, False])
def test_sentence_transformers_folder(tmp_path, new):
    folder, projection = write_st(tmp_path, new=new)
    loaded = pretrained.load_encoder(folder)
    assert loaded.config.pooling == "mean"
    assert loaded.config.projection_dim == 6
    assert loaded.config.normalize
    assert loaded.max_length == 48
    assert loaded.prompts == {"query": "query: "}
    assert loaded.default_prompt is None and loaded.config.pool_instruction
    np.testing.assert_array_equal(
        loaded.read_params()["projection"]["kernel"], projection.T
    )


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_sentence_transformers_poolings_and_absent_parts(tmp_path):
    folder, _ = write_st(tmp_path)
    for mode, ours in (("cls", "first"), ("max", "max"), (["mean"], "mean")):
        edit(folder / "1_Pooling/config.json", pooling_mode=mode)
        assert pretrained.open_checkpoint(folder).config.pooling == ours
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "InstructorEmbedding.INSTRUCTOR_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    edit(folder / "1_Pooling/config.json", include_prompt=False)
    edit(folder / "config_sentence_transformers.json", default_prompt_name="query")
    loaded = pretrained.load_encoder(folder)
    assert loaded.config.projection_dim is None
    assert not loaded.config.normalize
    assert not loaded.config.pool_instruction
    assert loaded.default_prompt == "query"


def test_sentence_transformers_modules_that_are_not_ours(tmp_path):
    folder, _ = write_st(tmp_path)
    edit(folder / "1_Pooling/config.json", pooling_mode=["mean", "max"])
    with pytest.raises(ValueError, match="pools by mean and max; expected exactly one"):
        pretrained.open_checkpoint(folder)
    edit(folder / "1_Pooling/config.json", pooling_mode="lasttoken")
    with pytest.raises(ValueError, match="pools by lasttoken"):
        pretrained.open_checkpoint(folder)
    edit(folder / "1_Pooling/config.json", pooling_mode="mean")
    edit(folder / "2_Dense/config.json", bias=True)
    with pytest.raises(ValueError, match="has bias True"):
        pretrained.open_checkpoint(folder)
    config = json.loads((folder / "2_Dense/config.json").read_text())
    del config["activation_function"]  # the library then takes a Tanh
    (folder / "2_Dense/config.json").write_text(json.dumps({**config, "bias": False}))
    with pytest.raises(ValueError, match=r"activation .*Tanh"):
        pretrained.open_checkpoint(folder)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1] + modules[2:]))
    with pytest.raises(ValueError, match="lists Transformer, Dense, Normalize"):
        pretrained.open_checkpoint(folder)


# --- T5X ----------------------------------------------------------------------------


def t5x_tree(params):
    """Names and orients flat parameters as T5X does; returns a nested tree."""
    theirs = {}
    for name, value in folders.unrolled(params).items():
        renamed, transposed = name_tables.T5X.to_theirs(name)
        theirs[renamed] = np.ascontiguousarray(value.T) if transposed else value
    return flax.traverse_util.unflatten_dict(theirs, sep="/")


def write_msgpack(path, target, state=None):
    content = {"version": 3, "optimizer": {"target": target, "state": state or {}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(flax.serialization.msgpack_serialize(content))


def write_array(folder, name, value):
    """Writes one TensorStore array; returns its description as T5X keeps it."""
    metadata = {
        "shape": list(value.shape), "chunks": [max(1, n // 2) for n in value.shape],
        "dtype": "<f4", "compressor": {"id": "gzip", "level": 1},
    }  # fmt: skip
    spec = {
        "driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/{name}/"},
        "metadata": metadata,
    }  # fmt: skip
    tensorstore.open(spec, create=True).result()[...].write(value).result()
    return {
        "driver": "zarr", "metadata": metadata,
        "kvstore": {"driver": "gfile", "path": f"/elsewhere/{name}/"},
    }  # fmt: skip


def assert_same(params, expected):
    assert set(params) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_t5x_single_file(tmp_path):
    config = dataclasses.replace(ENCODER, pooling="decoder_first")
    expected = folders.random_params(config)
    tree = t5x_tree(expected)
    tree["decoder"]["logits_dense"] = {"kernel": np.zeros((16, 60), np.float32)}
    state = {"step": np.int32(7), "param_states": {"x": {"v": np.ones(3, np.float32)}}}
    write_msgpack(tmp_path / "checkpoint_7", tree, state)
    opened = pretrained.open_checkpoint(tmp_path / "checkpoint_7")
    assert opened.config == dataclasses.replace(ENCODER, pooling="mean")
    assert opened.never_needed == (
        "optimizer state (2 arrays)", "decoder/logits_dense/kernel",
    )  # fmt: skip
    loaded = pretrained.load_encoder(tmp_path / "checkpoint_7", pooling="decoder_first")
    assert_same(flat(loaded.read_params()), expected)
    data = (tmp_path / "checkpoint_7").read_bytes()
    (tmp_path / "checkpoint_7").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"checkpoint_7 .*cut short"):
        pretrained.open_checkpoint(tmp_path / "checkpoint_7")


def test_t5x_tensorstore_folder(tmp_path):
    expected = folders.random_params(ENCODER)
    leaves = flat(t5x_tree(expected))
    for name, value in leaves.items():
        if value.ndim == 2:  # small leaves stay in the file
            leaves[name] = write_array(
                tmp_path, "target." + name.replace("/", "."), value
            )
    tree = flax.traverse_util.unflatten_dict(leaves, sep="/")
    write_msgpack(tmp_path / "checkpoint", tree)
    assert_same(flat(pretrained.load_encoder(tmp_path).read_params()), expected)
    # Copies without hidden files: the description stands in.
    array = tmp_path / "target.encoder.layers_1.attention.out.kernel"
    (array / ".zarray").unlink()
    assert_same(flat(pretrained.load_encoder(tmp_path).read_params()), expected)
    array.rename(tmp_path / "away")
    with pytest.raises(
        FileNotFoundError, match=r"layers_1/attention/out/kernel: .*miss"
    ):
        pretrained.load_encoder(tmp_path)


def test_t5x_orbax_placeholders(tmp_path):
    expected = folders.random_params(ENCODER)
    leaves = flat(t5x_tree(expected))
    for name, value in leaves.items():
        write_array(tmp_path, "target." + name.replace("/", "."), value)
    places = {n: "PLACEHOLDER://target." + n.replace("/", ".") for n in leaves}
    tree = {"target": flax.traverse_util.unflatten_dict(places, sep="/")}
    (tmp_path / "checkpoint").write_bytes(
        flax.serialization.msgpack_serialize({**tree, "flax_mutables": None})
    )
    assert_same(flat(pretrained.load_encoder(tmp_path).read_params()), expected)
    (tmp_path / "target.projection_layer.kernel" / ".zarray").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"projection_layer.kernel/.zarray is mis"
    ):
        pretrained.load_encoder(tmp_path)


def test_t5x_scanned_layers_and_split_heads(tmp_path):
    config = encoder_lib.EncoderConfig(t5=folders.T5_1_0, projection_dim=None)
    expected = folders.random_params(config)
    tree = t5x_tree(expected)
    layers = [tree["encoder"].pop(f"layers_{i}") for i in range(2)]
    stacked = jax.tree.map(lambda *x: np.stack(x, axis=1), *layers)
    for name, kernel in stacked["attention"].items():
        heads = (4, 2, 3, 16) if name == "out" else (16, 2, 4, 3)
        value = kernel["kernel"]
        if name == "out":  # [H*K, layers, D] -> [H, layers, K, D]
            value = value.reshape(4, 3, 2, 16).transpose(0, 2, 1, 3)
        kernel["kernel"] = value.reshape(heads)
    tree["encoder"]["encoder"] = stacked
    write_msgpack(tmp_path / "checkpoint_0", tree)
    loaded = pretrained.load_encoder(tmp_path / "checkpoint_0")
    assert_same(flat(loaded.read_params()), expected)


def leaves_by_msgpack(path):
    """Reads a T5X file without our reader."""
    content = flax.serialization.msgpack_restore(path.read_bytes())
    keep = lambda _, leaf: isinstance(leaf, dict) and "driver" in leaf  # noqa: E731
    return flax.traverse_util.flatten_dict(content, is_leaf=keep, sep="/")


@needs_real
def test_real_dual_encoder_checkpoint():
    folder = REAL / "test_de_t5_tiny.checkpoint_1000"
    opened = t5x.open_tensors(folder)
    raw = leaves_by_msgpack(folder / "checkpoint")
    raw = {
        k: v for k, v in raw.items() if isinstance(v, dict | np.ndarray | np.generic)
    }
    assert set(opened) == set(raw)
    for name, leaf in raw.items():
        if isinstance(leaf, dict):
            path = f"{folder}/{leaf['kvstore']['path']}/"
            spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
            leaf = tensorstore.open(spec).result().read().result()
        assert opened[name].shape == leaf.shape
        np.testing.assert_array_equal(opened[name].read(), leaf, err_msg=name)
    loaded = pretrained.load_encoder(folder)
    assert loaded.config.projection_dim == 768
    assert loaded.report.never_needed == ("optimizer state (81 arrays)",)
    tokens = np.array([[8774, 296, 5, 1, 0, 0], [571, 33, 25, 58, 1, 0]])
    embed = jax.jit(encoder_lib.SentenceEncoder(loaded.config).apply)
    embeddings = embed({"params": loaded.read_params()}, tokens)
    assert embeddings.shape == (2, 768)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=-1), 1.0, atol=1e-5)


@needs_real
def test_real_single_file_checkpoint():
    path = REAL / "test_t5_tiny.checkpoint_0"
    opened = t5x.open_tensors(path)
    raw = leaves_by_msgpack(path)
    raw = {k: v for k, v in raw.items() if isinstance(v, np.ndarray | np.generic)}
    assert set(opened) == set(raw)
    for name, leaf in raw.items():
        np.testing.assert_array_equal(opened[name].read(), leaf, err_msg=name)
    loaded = pretrained.load_encoder(path, pooling="decoder_first")
    assert loaded.config.t5.mlp_activations == ("gelu", "linear")
    assert len(loaded.report.loaded) == 28
    query = loaded.read_params()["encoder"]["layers"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(
        query[1], raw["optimizer/target/encoder/layers_1/attention/query/kernel"]
    )
    bias = loaded.read_params()["decoder"]["relpos_bias"]["embedding"]
    np.testing.assert_array_equal(
        bias.T, raw["optimizer/target/decoder/relpos_bias/rel_embedding"]
    )


@needs_real
def test_real_toy_trees(tmp_path):
    """Two copies that lost their hidden files: one describes its arrays, one can't."""
    opened = t5x.open_tensors(REAL / "tiny_t5" / "checkpoint_1")
    held = {name: tensor.read() for name, tensor in opened.items()}
    prefix = "optimizer/state/param_states"
    kernel = held[f"{prefix}/kernel"]
    assert {name: (v.shape, v.dtype.name) for name, v in held.items()} == {
        f"{prefix}/bias": ((5,), "float32"),
        f"{prefix}/kernel": ((10, 5), "float64"),
        f"{prefix}/step": ((), "int32"),
        "optimizer/state/step": ((), "int32"),
    }
    np.testing.assert_array_equal(held[f"{prefix}/bias"], 1.0)
    assert kernel.sum() == pytest.approx(26.513895884943818, abs=1e-12)
    with pytest.raises(
        ValueError, match=r"holds no T5 encoder\. Its arrays: optimizer"
    ):
        pretrained.load_encoder(REAL / "tiny_t5" / "checkpoint_1")
    other = REAL / "tiny_orbax" / "1"
    if not list(other.glob("*/.zarray")):
        with pytest.raises(
            FileNotFoundError, match=r"bias/.zarray is missing, without"
        ):
            t5x.open_tensors(other)
    # The same toy in the other layout: its shapes are known from the first.
    for array in other.iterdir():
        if not array.is_dir():
            (tmp_path / array.name).write_bytes(array.read_bytes())
            continue
        like = held[f"{prefix}/{array.name.rsplit('.', 1)[-1]}"]
        (tmp_path / array.name).mkdir()
        for chunk in array.iterdir():
            (tmp_path / array.name / chunk.name).write_bytes(chunk.read_bytes())
        metadata = {
            "zarr_format": 2, "shape": list(like.shape), "chunks": list(like.shape),
            "dtype": like.dtype.str, "compressor": {"id": "zstd", "level": 1},
            "fill_value": None, "filters": None, "order": "C",
        }  # fmt: skip
        (tmp_path / array.name / ".zarray").write_text(json.dumps(metadata))
    opened = t5x.open_tensors(tmp_path)
    assert {n.removeprefix("_") for n in opened} == set(held)
    for name, tensor in opened.items():
        np.testing.assert_array_equal(tensor.read(), held[name.removeprefix("_")])


# --- fitting a checkpoint to a model ------------------------------------------------


def test_missing_projection_is_an_error_until_it_is_allowed():
    raw = dataclasses.replace(ENCODER, projection_dim=None)
    opened = folders.as_source(raw, folders.random_params(raw))
    with pytest.raises(ValueError, match=r"missing: projection/kernel \[16 6\]"):
        fill(opened, ENCODER)
    with pytest.raises(
        ValueError, match=r"allow_missing pattern 'projektion.*' matches"
    ):
        fill(opened, ENCODER, allow_missing=["projektion.*"])
    params, report = fill(opened, ENCODER, allow_missing=["projection.*"])
    assert report.initialised == {"projection/kernel": (16, 6)}
    assert 0.15 < params["projection"]["kernel"].std() < 0.35  # 1/sqrt(16)
    again, second = fill(opened, ENCODER, allow_missing=["projection.*"])
    assert str(second) == str(report)
    assert "initialised: 1 arrays, 96 values\n    projection/kernel [16 6]" in str(
        report
    )
    np.testing.assert_array_equal(
        again["projection"]["kernel"], params["projection"]["kernel"]
    )


def test_decoder_is_left_over_until_it_is_ignored():
    full = dataclasses.replace(ENCODER, pooling="decoder_first")
    opened = folders.as_source(full, folders.random_params(full))
    with pytest.raises(ValueError, match=r"left over: decoder/final_norm/scale \[16\]"):
        fill(opened, ENCODER)
    _, report = fill(opened, ENCODER, ignore=["decoder/.*"])
    assert all(name.startswith("decoder/") for name in report.ignored)
    assert len(report.ignored) == 2 + 2 * 13
    with pytest.raises(ValueError, match=r"ignore pattern 'decodr/.*' matches no name"):
        fill(opened, ENCODER, ignore=["decodr/.*"])


@pytest.mark.parametrize(
    "t5, message",
    [
        (
            {"num_layers": 3},
            r"missing: encoder/layers_2/attention/key/kernel \[16 12\]",
        ),
        ({"num_layers": 1}, r"left over: encoder/layers_1/attention/key/kernel"),
        (
            {"d_ff": 25},
            r"shape: encoder/layers_0/mlp/wi/kernel is \[16 24\], the model",
        ),
        (
            {"vocab_size": 61},
            r"token_embedder/embedding is \[60 16\], .* has \[61 16\]",
        ),
        (
            {"mlp_activations": ("gelu", "linear")},
            r"missing: encoder/layers_0/mlp/wi_0",
        ),
    ],
)
def test_another_size_is_an_error(t5, message):
    opened = folders.as_source(ENCODER, folders.random_params(ENCODER))
    other = dataclasses.replace(ENCODER, t5=dataclasses.replace(ENCODER.t5, **t5))
    with pytest.raises(ValueError, match=message):
        fill(opened, other)


def test_a_stacked_leaf_is_never_half_fresh():
    opened = folders.as_source(ENCODER, folders.random_params(ENCODER))
    held = dict(opened.tensors)
    del held["encoder/layers_1/mlp/wo/kernel"]
    opened = dataclasses.replace(opened, tensors=held)
    with pytest.raises(ValueError, match=r"missing: encoder/layers_1/mlp/wo/kernel"):
        fill(opened, ENCODER, allow_missing=["encoder/.*"])


def test_settings_without_weights_are_compared():
    opened = folders.as_source(ENCODER, folders.random_params(ENCODER))
    t5 = dataclasses.replace(ENCODER.t5, relpos_max_distance=64)
    _, report = fill(opened, dataclasses.replace(ENCODER, t5=t5))
    assert report.differences == (
        "T5Config.relpos_max_distance is 128 in the checkpoint, 64 in the model",
    )


def test_one_pattern_is_not_a_list():
    opened = folders.as_source(ENCODER, folders.random_params(ENCODER))
    with pytest.raises(
        ValueError, match="ignore: got the text 'decoder', expected a li"
    ):
        fill(opened, ENCODER, ignore="decoder")


def test_a_glob_is_no_pattern():
    opened = folders.as_source(ENCODER, folders.random_params(ENCODER))
    with pytest.raises(ValueError, match=r"pattern '\*' is no regular expression"):
        fill(opened, ENCODER, ignore=["*"])


def test_devices_read_their_own_parts():
    params = folders.random_params(ENCODER)
    largest = {}

    def recorded(name, tensor):
        def read(index):
            part = tensor.read(index)
            largest[name] = max(largest.get(name, 0), part.size)
            return part

        return tensors.Tensor(tensor.shape, tensor.dtype, read)

    opened = folders.as_source(ENCODER, params)
    opened = dataclasses.replace(
        opened, tensors={k: recorded(k, t) for k, t in opened.tensors.items()}
    )
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"))

    def place(path, leaf):
        shape = tuple(leaf.shape)
        spec = [None] * len(shape)
        if shape[-2:] in ((16, 12), (16, 24)):
            spec[-2:] = "fsdp", "model"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    shapes = jax.tree_util.tree_map_with_path(
        place, pretrained.abstract_params(ENCODER)
    )
    restored, _ = matching.restore(opened, shapes, ENCODER)
    for name, value in flat(restored).items():
        np.testing.assert_array_equal(value, params[name])
    assert flat(restored)[
        "encoder/layers/mlp/wi/kernel"
    ].sharding.spec == PartitionSpec(None, "fsdp", "model")
    assert largest["encoder/layers_0/mlp/wi/kernel"] == 16 * 24 // 8
    assert largest["encoder/layers_0/attention/query/kernel"] == 16 * 12 // 8


# --- our own checkpoints ------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model_dir whose checkpoint was written from eight devices, and its weights."""
    model_dir = tmp_path_factory.mktemp("saved")
    params = folders.random_params(ENCODER, seed=3)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))

    def place(value):
        split = value.ndim > 1 and value.shape[-2] % 2 == 0
        spec = [None] * value.ndim
        if split:
            spec[-2] = "fsdp"
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    tree = flax.traverse_util.unflatten_dict(
        {k: place(v) for k, v in params.items()}, sep="/"
    )
    with checkpoints.Checkpointer(checkpoints.CheckpointConfig(), model_dir) as writer:
        writer.save(
            5, params=tree, train={"step": np.zeros((), np.int32)}, meta={"step": 5}
        )
    return model_dir, params


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/5",
                                   "checkpoints/5/params"])  # fmt: skip
def test_own_checkpoint_by_root_step_or_item(saved, place):
    model_dir, params = saved
    opened = pretrained.open_checkpoint(model_dir / place)
    restored, _ = fill(opened, ENCODER)
    assert_same(flat(restored), params)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_own_checkpoint_on_fewer_devices_and_unrolled(saved, num_devices):
    model_dir, params = saved
    t5 = dataclasses.replace(ENCODER.t5, scan_layers=False)
    config = dataclasses.replace(ENCODER, t5=t5)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))

    def place(leaf):
        split = len(leaf.shape) > 1 and leaf.shape[-2] % 2 == 0
        spec = PartitionSpec("fsdp") if split else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.tree.map(place, pretrained.abstract_params(config))
    restored, _ = pretrained.restore(model_dir, shapes, config)
    table = restored["token_embedder"]["embedding"]
    assert len(table.sharding.device_set) == num_devices
    assert_same(flat(restored), folders.unrolled(params))


def test_own_checkpoint_with_a_leaf_deleted_or_a_file_cut(saved, tmp_path):
    model_dir, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    item = copy / "checkpoints" / "5" / "params"
    metadata = json.loads((item / "_METADATA").read_text())
    gone = "('projection', 'kernel')"
    del metadata["tree_metadata"][gone]
    (item / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"missing: projection/kernel \[16 6\]"):
        fill(pretrained.open_checkpoint(copy), ENCODER)
    shutil.rmtree(copy)
    shutil.copytree(model_dir, copy)
    largest = max(item.glob("**/d/*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoints/5/params .*: \w+/"):
        fill(pretrained.open_checkpoint(copy), ENCODER)


def test_fresh_projection_on_own_weights(saved):
    model_dir, params = saved
    wide = dataclasses.replace(ENCODER, projection_dim=8)
    options = {"ignore": ["projection/.*"], "allow_missing": ["projection/.*"]}
    restored, report = fill(pretrained.open_checkpoint(model_dir), wide, **options)
    assert restored["projection"]["kernel"].shape == (16, 8)
    assert report.ignored == {"projection/kernel": (16, 6)}
    np.testing.assert_array_equal(
        restored["token_embedder"]["embedding"], params["token_embedder/embedding"]
    )


# --- vocabularies -------------------------------------------------------------------


LINES = [
    "", " ", "the dog runs.", "  two  spaces  ", "tab\tand\nline", "naïve café",
    "🙂 emoji", "日本語", "ﬁ ligature １２", "a" * 300, "▁marks", "x\u00a0y",
]  # fmt: skip


def test_vocabulary_through_tokenizer_json(tmp_path):
    original = source.Vocabulary(folders.VOCABULARY.read_bytes(), 100)
    content = vocabulary_files.to_tokenizer_json(original)
    assert content["model"]["vocab"]["<extra_id_0>"] == 1379
    assert [t["content"] for t in content["added_tokens"]][:3] == [
        "<pad>",
        "</s>",
        "<unk>",
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    back = vocabulary_files.read_vocabulary(tmp_path)
    assert back.extra_ids == 100
    ours, theirs = (
        tokenizer_lib.Tokenizer(v.model_bytes, v.extra_ids) for v in (original, back)
    )
    assert ours.vocab_size == theirs.vocab_size
    assert ours.encode(LINES) == theirs.encode(LINES)


def test_vocabulary_beside_weights(tmp_path):
    assert vocabulary_files.read_vocabulary(tmp_path) is None
    (tmp_path / "spiece.model").write_bytes(folders.VOCABULARY.read_bytes())
    assert vocabulary_files.read_vocabulary(tmp_path).extra_ids == 100
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 0}))
    assert vocabulary_files.read_vocabulary(tmp_path).extra_ids == 0
    words = {"model": {"type": "WordPiece"}, "added_tokens": []}
    with pytest.raises(ValueError, match="holds a WordPiece model, expected Unigram"):
        vocabulary_files.from_tokenizer_json(words)


# --- finding a checkpoint, and the verbs --------------------------------------------


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        pretrained.open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no checkpoint of .*it holds: notes.txt"):
        pretrained.open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a file of no known format"):
        pretrained.open_checkpoint(tmp_path / "notes.txt")
    write_msgpack(tmp_path / "checkpoint_1" / "checkpoint", {})
    write_msgpack(tmp_path / "checkpoint_2" / "checkpoint", {})
    with pytest.raises(ValueError, match="name one: checkpoint_1, checkpoint_2"):
        pretrained.open_checkpoint(tmp_path)
    (tmp_path / "tf").mkdir()
    (tmp_path / "tf" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ValueError, match="a TensorFlow SavedModel, which is not read"):
        pretrained.open_checkpoint(tmp_path / "tf")


def test_bucket_that_cannot_be_reached(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match=r"gs://b/x can't be reached"):
        pretrained.open_checkpoint("gs://b/x")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A local folder that epath and TensorStore find at ``gs://b``."""

    def local(path):
        return str(path).replace("gs://b", str(tmp_path), 1)

    def there(function, path, *args):
        return function(local(path), *args)

    kvstore = remote.kvstore
    monkeypatch.setattr(remote, "kvstore", lambda folder: kvstore(local(folder)))
    monkeypatch.setattr(epath.gpath, "_is_tf_installed", lambda: False)
    # Behind a proxy nobody asks whether the bucket can be reached.
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid")
    calls = dict.fromkeys(("exists", "isdir", "listdir", "open"), there)
    with epath.testing.mock_epath(**calls):
        yield tmp_path


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/5",
                                   "checkpoints/5/params"])  # fmt: skip
def test_own_checkpoint_in_a_bucket(saved, bucket, place):
    model_dir, params = saved
    shutil.copytree(model_dir, bucket / "run")
    shapes = pretrained.abstract_params(ENCODER)
    restored, _ = pretrained.restore(f"gs://b/run/{place}".rstrip("/"), shapes, ENCODER)
    assert_same(flat(restored), params)


def test_own_vocabulary_and_t5x_in_a_bucket(importable, bucket):
    import_weights.import_weights(importable, bucket / "run")
    loaded = pretrained.load_encoder("gs://b/run")
    expected = pretrained.load_encoder(importable)
    assert loaded.max_length == 48
    assert_same(flat(loaded.read_params()), flat(expected.read_params()))
    ours = tokenizer_lib.Tokenizer(folders.VOCABULARY)
    pretrained.check_vocabulary("gs://b/run", ours)
    proto = sentencepiece_model_pb2.ModelProto.FromString(ours.model_bytes)
    proto.pieces[50].piece = "another"
    other = tokenizer_lib.Tokenizer(proto.SerializeToString())
    with pytest.raises(ValueError, match=r"gs://b/run are for another vocab.*: id 50"):
        pretrained.check_vocabulary("gs://b/run", other)
    config = dataclasses.replace(ENCODER, projection_dim=None)
    params = folders.unrolled(folders.random_params(config))
    write_msgpack(bucket / "t5x" / "checkpoint", t5x_tree(params))
    shapes = pretrained.abstract_params(config)
    restored, _ = pretrained.restore("gs://b/t5x", shapes, config)
    assert_same(folders.unrolled(flat(restored)), params)
    with pytest.raises(FileNotFoundError, match=r"gs://b/none holds no checkpoint of "):
        pretrained.open_checkpoint("gs://b/none")


def test_hub_id_is_fetched_or_explained(tmp_path, monkeypatch):
    folder = folders.write_huggingface(tmp_path, folders.golden_weights(decoder=False))
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, allow_patterns: str(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert pretrained.open_checkpoint("someone/t5").config.t5.d_model == 16

    def offline(name, allow_patterns):
        raise ConnectionError("offline\nand more")

    hub.snapshot_download = offline
    with pytest.raises(
        FileNotFoundError, match=r"hub or its cache \(Conn.*: offline\)"
    ):
        pretrained.open_checkpoint("someone/t5")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'sentence-t5\[hub\]'"):
        pretrained.open_checkpoint("someone/t5")


@pytest.fixture(scope="module")
def importable(tmp_path_factory):
    """A sentence-transformers folder whose table fits the shipped vocabulary."""
    tokenizer = tokenizer_lib.Tokenizer(folders.VOCABULARY)
    folder = tmp_path_factory.mktemp("importable") / "st"
    weights = folders.golden_weights(decoder=False)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(tokenizer.vocab_size, 16)).astype(np.float32)
    weights["shared.weight"] = table
    projection = rng.normal(size=(6, 16)).astype(np.float32)
    folders.write_sentence_transformers(folder, weights, projection)
    (folder / "spiece.model").write_bytes(tokenizer.model_bytes)
    return folder


def test_import_makes_a_model_that_encodes(importable, tmp_path, capsys, caplog):
    model_dir = tmp_path / "model"
    command = [str(importable), "--model_dir", str(model_dir)]
    assert import_weights.main(command) == 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "loaded: 12 arrays" in capsys.readouterr().out
    model = inference.SentenceT5.load(model_dir)
    assert model.max_length == 48
    embeddings = model.encode(["The dog runs.", ""], batch_size=2)
    # A numpy mean over what the encoder computes, through the frozen Dense.
    assert embeddings.shape == (2, 6)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=-1), 1.0, atol=1e-5)
    again = pretrained.load_encoder(model_dir)
    assert again.prompts == {"query": "query: "}
    assert_same(
        flat(again.read_params()),
        flat(pretrained.load_encoder(importable).read_params()),
    )
    assert import_weights.main(command) == 1
    assert "holds checkpoints" in capsys.readouterr().err


def test_import_starts_fresh_what_it_may(importable, tmp_path):
    report = import_weights.import_weights(
        importable,
        tmp_path / "model",
        pooling="attention",
        allow_missing=["attention_pooling/.*"],
    )
    assert report.initialised == {"attention_pooling/query": (16,)}
    made = pretrained.load_encoder(tmp_path / "model")
    assert made.config.pooling == "attention"
    params = flat(made.read_params())
    np.testing.assert_array_equal(params.pop("attention_pooling/query"), np.zeros(16))
    assert_same(params, flat(pretrained.load_encoder(importable).read_params()))


def test_import_needs_a_vocabulary_that_fits(tmp_path, capsys):
    weights = folders.golden_weights(decoder=False)
    folder = folders.write_huggingface(tmp_path / "hf", weights)
    command = [str(folder), "--model_dir", str(tmp_path / "model")]
    assert import_weights.main(command) == 1
    assert "has no vocabulary. Name its SentencePiece model" in capsys.readouterr().err
    assert import_weights.main([*command, "--vocabulary", str(folders.VOCABULARY)]) == 1
    assert "T5Config.vocab_size is 60, but the vocabulary" in capsys.readouterr().err


def test_inspect(importable, capsys):
    assert inspect_weights.main([str(importable), "--names"]) == 0
    out = capsys.readouterr().out
    assert "sentence-transformers" in out
    assert "d_model=16, num_heads=4, head_dim=3, d_ff=24, num_layers=2" in out
    assert "pooling=mean, projection_dim=6, normalize=True" in out
    assert "prompt query: 'query: '" in out
    assert "projection/kernel [16 6] float32" in out
    assert inspect_weights.main(["/nowhere/at/all"]) == 1
    assert "There is no checkpoint" in capsys.readouterr().err


def test_orbax_reader_reads_what_load_params_reads(saved):
    model_dir, _ = saved
    params, step = checkpoints.load_params(model_dir)
    assert step == 5
    item = model_dir / "checkpoints" / "5" / "params"
    opened = orbax_files.open_tensors(checkpoints.files.absolute(item))
    assert_same({k: t.read() for k, t in opened.items()}, flat(params))
