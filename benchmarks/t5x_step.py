"""Times a T5X step to compare ``step_time.py`` with: its T5 encoder, its Adafactor.

    python benchmarks/t5x_step.py [--one_hot] [--batch_size=32] [--max_length=32]

T5 1.1 small in float32, unrolled as T5X has it, mean pooling, projection to 768, both
sides of a batch in one call, softmax over the batch in both directions. Needs T5X
(docs/t5x.md). ``--one_hot`` looks tokens up by a product, T5X's default.
"""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import measuring
import numpy as np
from t5x import adafactor
from t5x.examples.t5 import layers, network

CONFIG = network.T5Config(
    vocab_size=32128, emb_dim=512, num_heads=6, num_encoder_layers=8, head_dim=64,
    mlp_dim=1024, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
)  # fmt: skip


class DualEncoder(nn.Module):
    """Embeds token rows."""

    one_hot: bool

    @nn.compact
    def __call__(self, tokens):
        """Returns one unit vector per row."""
        table = layers.Embed(
            CONFIG.vocab_size, CONFIG.emb_dim, one_hot=self.one_hot,
            embedding_init=nn.initializers.normal(1.0), name="token_embedder",
        )  # fmt: skip
        mask = layers.make_attention_mask(tokens > 0, tokens > 0)
        encoder = network.Encoder(CONFIG, table, name="encoder")
        hidden = encoder(tokens, mask, deterministic=True)
        real = (tokens > 0).astype(jnp.float32)[..., None]
        pooled = jnp.sum(hidden * real, 1) / jnp.sum(real, 1)
        projected = nn.Dense(768, use_bias=False, name="projection")(pooled)
        return projected / jnp.linalg.norm(projected, axis=-1, keepdims=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one_hot", action="store_true")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    size = args.batch_size
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 32100, (2 * size, args.max_length), np.int32)
    module = DualEncoder(args.one_hot)
    optimizer_def = adafactor.Adafactor(learning_rate=1e-3)

    @jax.jit
    def init(key):
        params = module.init(key, tokens)["params"]
        return params, optimizer_def.init_state(params)

    def loss_of(params, tokens):
        unit = module.apply({"params": params}, tokens)
        logits = 100.0 * unit[:size] @ unit[size:].T
        normalizers = jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1)
        return jnp.mean(normalizers - 2 * jnp.diagonal(logits))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        params, state = optimizer_def.apply_gradient(
            optimizer_def.hyper_params, params, state, grads
        )
        return params, state, loss

    held = init(jax.random.key(0))
    tokens = jnp.asarray(tokens)

    def run():
        nonlocal held
        *held, loss = step(*held, tokens)
        jax.block_until_ready((held, loss))

    took = measuring.summary(measuring.seconds_of(run, warmup=2, times=args.steps))
    measuring.report("t5x_step", **took, one_hot=args.one_hot, pairs=size)


if __name__ == "__main__":
    main()
