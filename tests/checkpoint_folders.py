"""Tiny checkpoints of other projects, written to disk for tests; no tests here."""

import json
import pathlib

import flax.traverse_util
import numpy as np

from sentence_t5 import encoder as encoder_lib
from sentence_t5 import pretrained
from sentence_t5.pretrained import safetensors_io, tensors
from sentence_t5.t5 import config as t5_config

GOLDEN = pathlib.Path(__file__).parent / "golden"
VOCABULARY = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
# The shape of the golden models.
T5_1_0 = t5_config.T5Config(
    vocab_size=60,
    d_model=16,
    num_heads=4,
    head_dim=3,
    d_ff=24,
    num_layers=2,
    num_decoder_layers=2,
)
HF_CONFIG = {
    "model_type": "t5",
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 3,
    "num_heads": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}


def golden_weights(version="1_0", decoder=True):
    """Returns a Hugging Face T5's weights by its own names."""
    frozen = np.load(GOLDEN / f"hf_t5_{version}.npz")
    return {
        name.removeprefix("weights/"): frozen[name]
        for name in frozen.files
        if name.startswith("weights/")
        and (decoder or not name.startswith("weights/decoder."))
    }


def write_safetensors(path, weights, dtype=np.float32):
    safetensors_io.write_file(
        path,
        {k: tensors.from_array(np.asarray(v, dtype)) for k, v in weights.items()},
        {"format": "pt"},
    )


def write_huggingface(folder, weights, dtype=np.float32, **config):
    """Writes a folder as transformers does, with the given weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", weights, dtype)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **config}))
    return folder


def write_sentence_transformers(folder, weights, projection, *, new=True):
    """Writes a folder as sentence-transformers does, in its new or its old layout."""
    write_huggingface(folder, weights)
    for name in ("1_Pooling", "2_Dense", "3_Normalize"):
        (folder / name).mkdir()
    dense = {
        "in_features": projection.shape[1],
        "out_features": projection.shape[0],
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    if new:
        types = [
            "sentence_transformers.base.modules.transformer.Transformer",
            "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
            "sentence_transformers.base.modules.dense.Dense",
            "sentence_transformers.base.modules.normalize.Normalize",
        ]
        pooling = {"embedding_dimension": 16, "pooling_mode": "mean"}
        length = {"transformer_task": "feature-extraction"}
        tokenizer = {"model_max_length": 48}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    else:
        kinds = ("Transformer", "Pooling", "Dense", "Normalize")
        types = [f"sentence_transformers.models.{kind}" for kind in kinds]
        pooling = {
            "word_embedding_dimension": 16,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
        }
        length = {"max_seq_length": 48, "do_lower_case": False}
    paths = ("", "1_Pooling", "2_Dense", "3_Normalize")
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": kind}
            for i, (path, kind) in enumerate(zip(paths, types, strict=True))
        ],
        "1_Pooling/config.json": {**pooling, "include_prompt": True},
        "2_Dense/config.json": dense,
        "sentence_bert_config.json": length,
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": None,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    write_safetensors(
        folder / "2_Dense/model.safetensors", {"linear.weight": projection}
    )
    return folder


def random_params(config: encoder_lib.EncoderConfig, seed=0):
    """Returns random numpy parameters, flat by name."""
    rng = np.random.default_rng(seed)
    shapes = flax.traverse_util.flatten_dict(
        pretrained.abstract_params(config), sep="/"
    )
    return {
        name: rng.normal(0.2, 0.4, leaf.shape).astype(np.float32)
        for name, leaf in shapes.items()
    }


def unrolled(params):
    """Cuts stacked leaves into layers; flat names in, flat names out."""
    out = {}
    for name, value in params.items():
        stack, layers, rest = name.partition("/layers/")
        if layers:
            out |= {f"{stack}/layers_{i}/{rest}": v for i, v in enumerate(value)}
        else:
            out[name] = value
    return out


def as_source(config, params, **more):
    """Returns an opened checkpoint held in memory."""
    held = {k: tensors.from_array(v) for k, v in unrolled(params).items()}
    return pretrained.Source("memory", "test", held, config=config, **more)
