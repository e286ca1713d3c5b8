"""Writes a sentence-transformers folder, tensor by tensor, without torch.

    Transformer (T5EncoderModel) ─► Pooling ─► Dense (no bias, identity) ─► Normalize

The old module names and settings are written: every release since 2.2 reads them, the
current one without a warning.
"""

import json
import os
import pathlib
from typing import Any

import numpy as np

from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import (
    name_tables,
    safetensors_io,
    tensors,
    vocabulary_files,
)
from sentence_t5.pretrained import source as source_lib
from sentence_t5.pretrained import st_folder as reader
from sentence_t5.t5 import config as t5_config

# Our pooling -> the flag that turns it on.
_POOLING_FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
}
_FEED_FORWARD = {("relu",): "relu", ("gelu", "linear"): "gated-gelu"}
_MODULES = "sentence_transformers.models"


def check_pooling(config: encoder_lib.EncoderConfig) -> None:
    """Checks that sentence-transformers can compute this encoder.

    Raises:
        ValueError: it can't; the message says what can be written instead.
    """
    if config.pooling not in _POOLING_FLAGS:
        what = "runs a decoder" if config.has_decoder else f"pools by {config.pooling}"
        raise ValueError(
            f"sentence-transformers has no module that {what}, as "
            f"EncoderConfig.pooling={config.pooling!r} does; it can hold "
            f"{', '.join(_POOLING_FLAGS)}. Export this model with --format=stablehlo "
            "or --format=onnx, which hold any encoder, or keep the model_dir."
        )


def write_folder(
    source: source_lib.Source, folder: str | os.PathLike, card: str = ""
) -> None:
    """Writes the folder.

    Args:
        source: an opened checkpoint with config and vocabulary.
        folder: where to write; made if need be.
        card: content of ``README.md``.

    Raises:
        ValueError: an encoder that sentence-transformers can't compute, or no
            vocabulary.
    """
    config = source.config
    check_pooling(config)
    if source.vocabulary is None:
        raise ValueError(
            f"{source.path} has no vocabulary, and the folder needs one. Import it "
            "with --vocabulary first."
        )
    tokenizer = vocabulary_files.to_tokenizer_json(source.vocabulary)
    folder = pathlib.Path(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if config.projection_dim is not None:
        modules.append(("2_Dense", "Dense"))
    if config.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    for path, _ in modules:
        (folder / path).mkdir(parents=True, exist_ok=True)
    _write_weights(source, folder)
    _write_tokenizer(source, tokenizer, folder)
    files = {
        "config.json": transformer_config(config.t5),
        "1_Pooling/config.json": _pooling_config(config),
        reader.LENGTH_FILE: {
            "max_seq_length": source.max_length,
            "do_lower_case": False,
        },
        reader.SETTINGS_FILE: {
            "prompts": {k: _closed(v) for k, v in source.prompts.items()},
            "default_prompt_name": source.default_prompt,
            "similarity_fn_name": config.similarity,
        },
    }
    if config.projection_dim is not None:
        files["2_Dense/config.json"] = {
            "in_features": config.t5.d_model,
            "out_features": config.projection_dim,
            "bias": False,
            "activation_function": reader.IDENTITY,
        }
    for name, content in files.items():
        _write_json(folder / name, content)
    (folder / "README.md").write_text(card)
    # Last, because it makes the folder a model.
    _write_json(
        folder / reader.MODULES_FILE,
        [
            {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    )


def huggingface_tensors(source: source_lib.Source) -> dict[str, tensors.Tensor]:
    """Returns the encoder's float32 tensors under transformers' names."""
    renamed = {}
    for name, tensor in source.tensors.items():
        theirs = name_tables.HUGGINGFACE.to_theirs(name)
        if theirs is not None and not name.startswith("decoder/"):
            tensor = tensor.astype(np.float32)
            renamed[theirs[0]] = tensor.T if theirs[1] else tensor
    return dict(sorted(renamed.items()))


def transformer_config(t5: t5_config.T5Config) -> dict[str, Any]:
    """Returns transformers' ``config.json`` of an encoder."""
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "vocab_size": t5.vocab_size,
        "d_model": t5.d_model,
        "d_kv": t5.head_dim,
        "d_ff": t5.d_ff,
        "num_layers": t5.num_layers,
        "num_heads": t5.num_heads,
        "feed_forward_proj": _FEED_FORWARD[t5.mlp_activations],
        "relative_attention_num_buckets": t5.relpos_num_buckets,
        "relative_attention_max_distance": t5.relpos_max_distance,
        "layer_norm_epsilon": t5.layer_norm_epsilon,
        "dropout_rate": t5.dropout_rate,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "is_encoder_decoder": False,
        "use_cache": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def _write_weights(source: source_lib.Source, folder: pathlib.Path) -> None:
    safetensors_io.write_file(
        folder / "model.safetensors", huggingface_tensors(source), {"format": "pt"}
    )
    if source.config.projection_dim is not None:
        kernel = source.tensors["projection/kernel"].astype(np.float32)
        safetensors_io.write_file(
            folder / "2_Dense" / "model.safetensors",
            {reader.DENSE_KEY: kernel.T},
            {"format": "pt"},
        )


def _write_tokenizer(
    source: source_lib.Source, tokenizer: dict[str, Any], folder: pathlib.Path
) -> None:
    """Writes what both old and new tokenizer classes look for."""
    vocabulary = source.vocabulary
    sentinels = [f"<extra_id_{i}>" for i in range(vocabulary.extra_ids)]
    special = {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": sentinels,
    }
    (folder / vocabulary_files.SPIECE_FILE).write_bytes(vocabulary.model_bytes)
    _write_json(folder / vocabulary_files.TOKENIZER_FILE, tokenizer)
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / vocabulary_files.TOKENIZER_CONFIG_FILE,
        {
            "tokenizer_class": vocabulary_files.tokenizer_class(vocabulary),
            "model_max_length": source.max_length,
            "extra_ids": vocabulary.extra_ids,
            **special,
        },
    )


def _closed(prompt: str) -> str:
    """Ends a prompt in white space, so that its last word ends before the text."""
    return f"{prompt.rstrip()} "


def _pooling_config(config: encoder_lib.EncoderConfig) -> dict[str, Any]:
    flags = dict.fromkeys(
        (
            "pooling_mode_cls_token",
            "pooling_mode_mean_tokens",
            "pooling_mode_max_tokens",
            "pooling_mode_mean_sqrt_len_tokens",
        ),
        False,
    )
    flags[_POOLING_FLAGS[config.pooling]] = True
    return {
        "word_embedding_dimension": config.t5.d_model,
        **flags,
        "include_prompt": config.pool_instruction,
    }


def _write_json(path: pathlib.Path, content: Any) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
