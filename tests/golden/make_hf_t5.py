"""Writes the golden files of test_t5_golden.py; run by hand where torch is installed.

    python tests/golden/make_hf_t5.py

Each ``hf_t5_<version>.npz`` holds the random weights of a tiny Hugging Face T5 under
their own names, one batch of four texts (1, 16, 200 and 512 tokens, padded to 512), the
encoder's hidden states at the real tokens and the decoder's output for one start
symbol. ``hf_buckets.npz`` holds relative position buckets for offsets from -600 to 600.
Attention is not square (heads * head width != model width), so that a reshape can't
pass for a transpose. Made with torch 2.13.0 and transformers 5.24.0.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.t5 import modeling_t5

FOLDER = pathlib.Path(__file__).parent
LENGTHS = (1, 16, 200, 512)
SHAPE = {
    "vocab_size": 60,
    "d_model": 16,
    "num_heads": 4,
    "d_kv": 3,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
PROJECTIONS = {"1_0": "relu", "1_1": "gated-gelu"}


def make_tokens(rng: np.random.Generator) -> np.ndarray:
    """Returns int64 [4, 512]: random ids closed by EOS, then padding."""
    tokens = np.zeros((len(LENGTHS), max(LENGTHS)), np.int64)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[:length] = rng.integers(2, SHAPE["vocab_size"], length)
        row[length - 1] = 1
    return tokens


def make_model(activation: str, seed: int) -> transformers.T5ForConditionalGeneration:
    """Builds a T5 whose every weight matters: biases and norms are random too."""
    torch.manual_seed(seed)
    config = transformers.T5Config(**SHAPE, feed_forward_proj=activation)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                weight.normal_(std=2.0)
            elif "shared" in name:
                weight.normal_(std=1.0)
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


def run(model: transformers.T5ForConditionalGeneration, tokens: np.ndarray):
    """Returns the encoder's hidden states and the decoder's first output."""
    ids = torch.from_numpy(tokens)
    mask = (ids != 0).long()
    start = torch.zeros((len(tokens), 1), dtype=torch.long)
    with torch.no_grad():
        hidden = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        decoded = model.decoder(
            input_ids=start,
            encoder_hidden_states=hidden,
            encoder_attention_mask=mask,
        ).last_hidden_state
    return hidden.numpy(), decoded[:, 0].numpy()


def write_models() -> None:
    """Writes one file per T5 version."""
    for seed, (version, activation) in enumerate(PROJECTIONS.items()):
        model = make_model(activation, seed)
        tokens = make_tokens(np.random.default_rng(seed))
        hidden, decoded = run(model, tokens)
        state = {k: v.numpy() for k, v in model.state_dict().items()}
        for alias in (
            "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
            "lm_head.weight",
        ):  # fmt: skip
            state.pop(alias, None)
        np.savez_compressed(
            FOLDER / f"hf_t5_{version}.npz",
            tokens=tokens.astype(np.int32),
            hidden=hidden[tokens != 0],
            decoder_first=decoded,
            **{f"weights/{name}": value for name, value in state.items()},
        )


def write_buckets() -> None:
    """Writes the buckets of every offset, memory minus query."""
    offsets = torch.arange(-600, 601)
    bucket = modeling_t5.T5Attention._relative_position_bucket
    np.savez_compressed(
        FOLDER / "hf_buckets.npz",
        offsets=offsets.numpy().astype(np.int32),
        **{
            f"{'bidirectional' if two_way else 'causal'}_{num}_{distance}": bucket(
                offsets, bidirectional=two_way, num_buckets=num, max_distance=distance
            )
            .numpy()
            .astype(np.int32)
            for two_way in (True, False)
            for num, distance in ((32, 128), (8, 20), (4, 128))
        },
    )


if __name__ == "__main__":
    write_models()
    write_buckets()
