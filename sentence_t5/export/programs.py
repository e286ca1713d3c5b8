"""The encoder as a program of its own: StableHLO with its weights, or ONNX.

    token ids [batch length] ─► unit embeddings [batch E]

An encoder that leaves instructions out of its pooling also takes how many of each row's
first tokens are an instruction's [batch]; 0 for a plain text.

Both hold the whole encoder, pooling and projection included, take any batch and length,
and run without this package. Padding is id 0, on the right; texts end with id 1.

The bias of relative positions is computed otherwise here: a table over all offsets up
to the largest distance, since a program of any length can't hold one matrix.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import loading, matching, vocabulary_files
from sentence_t5.pretrained import source as source_lib
from sentence_t5.t5 import relative_positions

PROGRAM_FILE = "model.stablehlo"
WEIGHTS_FILE = "weights.npz"
DESCRIPTION_FILE = "program.json"
ONNX_FILE = "model.onnx"
PLATFORMS = ("cpu", "cuda", "tpu")
_ONNX_OPSET = 18
# From here on ONNX keeps weights in a file beside the graph.
_ONNX_INLINE_BYTES = 1_500_000_000


def write_stablehlo(source: source_lib.Source, folder: str | os.PathLike) -> None:
    """Writes a serialized ``jax.export`` program and its weights.

    Reading it takes jax and numpy alone::

        program = jax.export.deserialize(open("model.stablehlo", "rb").read())
        embeddings = program.call(dict(np.load("weights.npz")), token_ids)

    Args:
        source: an opened checkpoint with a config.
        folder: where to write; made if need be.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _for_export(source.config, scan_layers=True)
    params = flax.traverse_util.flatten_dict(_read_params(source, config), sep="/")
    embed = _make_embed(config)

    def call(weights, *inputs):
        return embed(flax.traverse_util.unflatten_dict(weights, sep="/"), *inputs)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    batch, length = jax.export.symbolic_shape("batch, length")
    inputs = [jax.ShapeDtypeStruct((batch, length), jnp.int32)]
    if not config.pool_instruction:
        inputs.append(jax.ShapeDtypeStruct((batch,), jnp.int32))
    with _positions_of_any_length():
        program = jax.export.export(jax.jit(call), platforms=PLATFORMS)(shapes, *inputs)
    np.savez(folder / WEIGHTS_FILE, **params)
    _write_description(source, folder)
    (folder / PROGRAM_FILE).write_bytes(program.serialize())


def write_onnx(source: source_lib.Source, folder: str | os.PathLike) -> None:
    """Writes ``model.onnx``: int64 ``input_ids`` → float32 ``sentence_embedding``.

    If the encoder leaves instructions out of its pooling, int64 ``instruction_lengths``
    is an input too.

    Args:
        source: an opened checkpoint with a config.
        folder: where to write; made if need be.

    Raises:
        ImportError: jax2onnx is not installed.
    """
    try:
        import jax2onnx
        import onnx
    except ImportError as error:
        raise ImportError(
            "Writing ONNX takes jax2onnx: pip install 'sentence-t5[onnx]'."
        ) from error
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The converter can't follow flax's scan.
    config = _for_export(source.config, scan_layers=False)
    params = _read_params(source, config)
    embed = _make_embed(config)
    inputs = {"input_ids": ("batch", "length")}
    if not config.pool_instruction:
        inputs["instruction_lengths"] = ("batch",)
    # It warns of every symbolic shape, harmlessly.
    logging.getLogger("onnx_ir.serde").setLevel(logging.ERROR)
    with _positions_of_any_length():
        model = jax2onnx.to_onnx(
            lambda *given: embed(params, *given),
            [
                types.SimpleNamespace(shape=shape, dtype=jnp.int32)
                for shape in inputs.values()
            ],
            opset=_ONNX_OPSET,
            return_mode="proto",
            input_names=list(inputs),
            output_names=["sentence_embedding"],
        )
    _take_int64(model, onnx)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    onnx.save_model(
        model,
        str(folder / ONNX_FILE),
        save_as_external_data=size > _ONNX_INLINE_BYTES,
        location=f"{ONNX_FILE}.data",
    )
    onnx.checker.check_model(str(folder / ONNX_FILE), full_check=True)
    _write_description(source, folder)


def _for_export(
    config: encoder_lib.EncoderConfig, *, scan_layers: bool
) -> encoder_lib.EncoderConfig:
    """The same encoder in float32, laid out for a converter."""
    t5 = dataclasses.replace(
        config.t5, scan_layers=scan_layers, dtype="float32", remat="none"
    )
    return dataclasses.replace(config, t5=t5)


def _read_params(
    source: source_lib.Source, config: encoder_lib.EncoderConfig
) -> dict[str, Any]:
    unused = any(name.startswith("decoder/") for name in source.tensors)
    ignore = ("decoder/.*",) if unused and not config.has_decoder else ()
    shapes = loading.abstract_params(config)
    return matching.restore(source, shapes, config, ignore=ignore)[0]


def _make_embed(config: encoder_lib.EncoderConfig) -> Callable[..., jax.Array]:
    module = encoder_lib.SentenceEncoder(config)

    def embed(params, tokens, instruction_lengths=None):
        return module.apply(
            {"params": params}, tokens, instruction_lengths=instruction_lengths
        )

    return embed


@contextlib.contextmanager
def _positions_of_any_length() -> Iterator[None]:
    """Lets position biases be traced with lengths that are not numbers yet."""

    def intercept(call, args, kwargs, context):
        module = context.module
        if isinstance(module, relative_positions.RelativePositionBias):
            return position_bias(module, *args, **kwargs)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def position_bias(
    module: relative_positions.RelativePositionBias,
    query_length: int,
    memory_length: int,
) -> Float[Array, "H Q M"]:
    """Computes what the module does, for lengths that may be symbols.

    Args:
        module: bound to its parameters.
        query_length: number of query positions.
        memory_length: number of memory positions.

    Returns:
        The bias to add to attention logits.
    """
    config = module.config
    reach = config.relpos_max_distance
    find = functools.partial(
        relative_positions.relative_position_buckets,
        bidirectional=module.bidirectional,
        num_buckets=config.relpos_num_buckets,
        max_distance=reach,
    )
    later, earlier = find(1, reach + 1)[0], find(reach + 1, 1)[:, 0]
    # Entry reach + k is the bucket of offset k, memory minus query.
    buckets = np.concatenate([earlier[:0:-1], later])
    table = module.get_variable("params", "embedding")
    shape = (query_length, memory_length)
    offset = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    offset -= jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    index = jnp.clip(offset, -reach, reach) + reach
    bias = jnp.take(jnp.take(table, buckets, axis=0), index, axis=0)
    return jnp.transpose(bias, (2, 0, 1))


def _take_int64(model: Any, onnx: Any) -> None:
    """Makes an ONNX model's int32 inputs int64, as tokenizers give them."""
    for entry in model.graph.input:
        inner = f"{entry.name}_int32"
        for node in model.graph.node:
            node.input[:] = [inner if x == entry.name else x for x in node.input]
        entry.type.tensor_type.elem_type = onnx.TensorProto.INT64
        cast = onnx.helper.make_node(
            "Cast", [entry.name], [inner], to=onnx.TensorProto.INT32
        )
        model.graph.node.insert(0, cast)


def _write_description(source: source_lib.Source, folder: pathlib.Path) -> None:
    """Writes what a user of the program must know, and the vocabulary."""
    content = {
        "input": "token ids [batch length], padded with 0 on the right, closed by 1",
        "output": "float32 embeddings [batch, embedding_dim]",
        "embedding_dim": source.config.embedding_dim,
        "unit_length": source.config.normalize,
        "max_length": source.max_length,
        "prompts": dict(source.prompts),
        "default_prompt": source.default_prompt,
    }
    if not source.config.pool_instruction:
        content["instruction_lengths"] = (
            "tokens of a row's instruction [batch]; they come first and end with no id"
        )
    if source.vocabulary is not None:
        content["vocabulary"] = {
            "file": vocabulary_files.SPIECE_FILE,
            "extra_ids": source.vocabulary.extra_ids,
        }
        file = folder / vocabulary_files.SPIECE_FILE
        file.write_bytes(source.vocabulary.model_bytes)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")
