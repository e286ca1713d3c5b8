"""Hugging Face T5 folders: ``config.json`` and weights, whole or sharded.

T5 1.0 and 1.1, mT5, Flan-T5, and UMT5 where its layers share one position bias, with
or without a decoder. Nothing of transformers or torch is needed.

The table of input embeddings may be stored as ``shared.weight``, under each stack's
name, or as the output head alone; the encoder's own copy wins where there are several.

Source: files written by transformers 5.24 and what its loaders make of them.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import (
    name_tables,
    safetensors_io,
    tensors,
    torch_files,
    vocabulary_files,
)
from sentence_t5.pretrained import source as source_lib
from sentence_t5.t5 import config as t5_config

CONFIG_FILE = "config.json"
_WEIGHTS = {
    "model.safetensors": safetensors_io.open_file,
    "pytorch_model.bin": torch_files.open_file,
}
MODEL_TYPES = ("t5", "mt5", "umt5")

_SHARED = "shared.weight"
_ENCODER_TABLE = "encoder.embed_tokens.weight"
_DECODER_TABLE = "decoder.embed_tokens.weight"
_HEAD = "lm_head.weight"
# A name of our kind for a decoder's table that differs from the encoder's: our stacks
# share one, so it can be left out with the decoder but not loaded.
_OWN_TABLE = "decoder/token_embedder/embedding"
# Old files hold a position bias for cross-attention that no model has ever read.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_LAYER_BIAS = re.compile(
    r"((encoder|decoder)\.block\.)\d+"
    r"(\.layer\.0\.SelfAttention\.relative_attention_bias\.weight)"
)


def open_folder(path: str | os.PathLike) -> source_lib.Source:
    """Opens a folder that transformers' ``save_pretrained`` wrote, or one like it.

    Args:
        path: of a local folder with ``config.json`` and weights.

    Returns:
        The opened checkpoint. Its config is raw T5: mean pooling, no projection.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: not a T5, or a T5 this model can't be.
    """
    folder = pathlib.Path(path)
    fields = json.loads((folder / CONFIG_FILE).read_text())
    opened = dict(open_weights(folder))
    never_needed = _settle_tables(opened, fields, folder)
    never_needed += _settle_layer_biases(opened, folder)
    ours, foreign = source_lib.translate(opened, name_tables.HUGGINGFACE)
    if _DECODER_TABLE in foreign:
        ours[_OWN_TABLE] = foreign.pop(_DECODER_TABLE)
    return source_lib.Source(
        path=str(folder),
        family="Hugging Face",
        tensors=ours,
        foreign=foreign,
        never_needed=tuple(sorted(never_needed)),
        config=encoder_lib.EncoderConfig(
            t5=read_config(fields, ours, folder), projection_dim=None
        ),
        vocabulary=vocabulary_files.read_vocabulary(folder),
    )


def open_weights(folder: pathlib.Path) -> Mapping[str, tensors.Tensor]:
    """Opens the weights of a folder, whole or sharded; safetensors come first.

    Raises:
        FileNotFoundError: no weights there; a shard is missing.
        ValueError: a shard lacks a tensor that the index promises.
    """
    for name, open_file in _WEIGHTS.items():
        if (folder / name).exists():
            return open_file(folder / name)
        if (folder / f"{name}.index.json").exists():
            return _open_shards(folder, f"{name}.index.json", open_file)
    raise FileNotFoundError(
        f"{folder} holds no weights: expected one of {', '.join(_WEIGHTS)}, or its "
        ".index.json with all the shards."
    )


def _open_shards(
    folder: pathlib.Path, index: str, open_file: Callable
) -> dict[str, tensors.Tensor]:
    where = json.loads((folder / index).read_text())["weight_map"]
    opened = {}
    for shard in sorted(set(where.values())):
        if not (folder / shard).exists():
            raise FileNotFoundError(
                f"{folder / index} names {shard}, which is not there. Copy or download "
                "it."
            )
        held = open_file(folder / shard)
        missing = [name for name in where if where[name] == shard and name not in held]
        if missing:
            raise ValueError(
                f"{folder / shard} lacks {missing[0]}, which {index} says it holds."
            )
        opened.update(held)
    return opened


def _settle_tables(
    opened: dict[str, tensors.Tensor], fields: Mapping, folder: pathlib.Path
) -> list[str]:
    """Leaves the input table as ``shared.weight`` alone; returns names done with."""
    tables = {
        name: opened.pop(name)
        for name in (_ENCODER_TABLE, _SHARED, _DECODER_TABLE)
        if name in opened
    }
    head = opened.pop(_HEAD, None)
    has_decoder = any(name.startswith("decoder.") for name in opened)
    if not tables:
        if head is None or not fields.get("tie_word_embeddings", True):
            raise ValueError(
                f"{folder} holds no table of input embeddings: expected one of "
                f"{_SHARED}, {_ENCODER_TABLE}, {_DECODER_TABLE}"
                + (f" ({_HEAD} is another matrix here)." if head else ".")
            )
        tables = {_HEAD: head}
    chosen = next(iter(tables))
    opened[_SHARED] = tables[chosen]
    kept = {chosen}
    decoders = next((n for n in (_DECODER_TABLE, _SHARED) if n in tables), chosen)
    if has_decoder and not tensors.equal(tables[decoders], tables[chosen]):
        opened[_DECODER_TABLE] = tables[decoders]
        kept.add(decoders)
    done = [name for name in tables if name not in kept]
    if head is not None and chosen != _HEAD:
        done.append(_HEAD)
    if opened.pop(_UNUSED, None) is not None:
        done.append(_UNUSED)
    return done


def _settle_layer_biases(
    opened: dict[str, tensors.Tensor], folder: pathlib.Path
) -> list[str]:
    """Drops position biases of later layers if they equal the first layer's."""
    done = []
    for name in list(opened):
        match = _LAYER_BIAS.fullmatch(name)
        first = match and match[1] + "0" + match[3]
        if not match or name == first:
            continue
        if first not in opened or not tensors.equal(opened[first], opened[name]):
            raise ValueError(
                f"{folder}: {name} differs from the first layer's. Each layer has a "
                "position bias of its own, as in UMT5; this model shares one per "
                "stack, as T5 and mT5 do, and can't hold these weights."
            )
        opened.pop(name)
        done.append(name)
    return done


def read_config(
    fields: Mapping, ours: Mapping[str, tensors.Tensor], folder: pathlib.Path
) -> t5_config.T5Config:
    """Turns ``config.json`` into our config.

    Args:
        fields: the file's content.
        ours: the opened tensors, which say how many rows the table has and whether
            there is a decoder.
        folder: for messages.

    Raises:
        ValueError: another architecture or activation.
    """
    model_type = fields.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{folder / CONFIG_FILE} is of a {model_type!r} model, expected one of "
            f"{', '.join(MODEL_TYPES)}."
        )
    projections = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
    feed_forward = fields.get("feed_forward_proj", "relu")
    if feed_forward not in projections:
        raise ValueError(
            f"{folder / CONFIG_FILE}: feed_forward_proj is {feed_forward!r}, expected "
            "'relu' (T5 1.0) or 'gated-gelu' (T5 1.1)."
        )
    decoder_layers = source_lib.count_layers(set(ours), "decoder")
    return t5_config.T5Config(
        vocab_size=ours["token_embedder/embedding"].shape[0],
        d_model=fields["d_model"],
        num_heads=fields["num_heads"],
        head_dim=fields["d_kv"],
        d_ff=fields["d_ff"],
        num_layers=fields["num_layers"],
        num_decoder_layers=decoder_layers,
        mlp_activations=projections[feed_forward],
        relpos_num_buckets=fields.get("relative_attention_num_buckets", 32),
        relpos_max_distance=fields.get("relative_attention_max_distance", 128),
        layer_norm_epsilon=fields.get("layer_norm_epsilon", 1e-6),
    )
