"""What runs on the devices: the train, evaluation and encoding steps, each one jit.

    batch ─► both towers in one encoder call ─► loss over the global batch
          ─► gradients ─► optimizer ─► new state (the old one is donated), metrics

Nothing here waits for a device or reads from one.
"""

import dataclasses
import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from sentence_t5 import encoder, losses, metrics, names, optim, partitioning

Batch = dict[str, Array]
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained: an encoder, a loss, an optimizer.

    Attributes:
        encoder: tokens → embedding.
        loss: how pairs are contrasted.
        optimizer: from ``optim``.
    """

    encoder: encoder.EncoderConfig
    loss: losses.LossConfig
    optimizer: optim.Optimizer


class TrainState(flax.struct.PyTreeNode):
    """All that changes while training.

    Attributes:
        step: updates done, int32.
        params: the encoder's parameters, float32.
        opt_state: the optimizer's state.
        rng: typed key from which each step's dropout key is folded.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    rng: Array


class Trainer:
    """The jitted steps of one model on one mesh."""

    def __init__(self, model: Model, partitioner: partitioning.Partitioner):
        """Works out shapes and shardings; runs nothing.

        Args:
            model: what to train.
            partitioner: where to.
        """
        self.model = model
        self.partitioner = partitioner
        self._module = encoder.SentenceEncoder(model.encoder)
        boxed = jax.eval_shape(self._init_params, jax.random.key(0))
        param_shardings = partitioner.param_shardings(boxed)
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        replicated = partitioner.replicated
        shardings = TrainState(
            step=replicated,
            params=param_shardings,
            opt_state=partitioner.opt_state_shardings(
                shapes.opt_state, shapes.params, param_shardings
            ),
            rng=replicated,
        )
        self.state_shardings = shardings
        self.param_names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes.params)
        ]
        batch = partitioner.batch_sharding
        self.train_step = jax.jit(
            self._train_step,
            in_shardings=(shardings, batch),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        self.eval_step = jax.jit(
            self._eval_step,
            in_shardings=(param_shardings, batch),
            out_shardings=replicated,
        )
        self.encode_step = jax.jit(
            self._encode_step,
            in_shardings=(param_shardings, batch),
            out_shardings=replicated,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            jax.eval_shape(self._init, jax.random.key(0)),
            self.state_shardings,
        )

    def init_state(self, seed: int) -> TrainState:
        """Initialises the state straight into its shards.

        The values don't depend on the mesh.
        """
        init = jax.jit(self._init, out_shardings=self.state_shardings)
        return init(jax.random.key(seed))

    def state_from_params(self, params: Any, seed: int) -> TrainState:
        """Starts training from given weights: step 0, a fresh optimizer.

        Args:
            params: parameters; arrays already in their shards are not moved. They are
                donated.
            seed: of the dropout keys.
        """

        def start(params, key):
            return self._fresh(params, jax.random.split(key)[1])

        start = jax.jit(
            start,
            in_shardings=(self.state_shardings.params, None),
            out_shardings=self.state_shardings,
            donate_argnums=0,
        )
        return start(params, jax.random.key(seed))

    def _init_params(self, key: Array) -> Any:
        tokens = jnp.ones((1, 8), jnp.int32)
        return self._module.init(key, tokens)["params"]

    def _init(self, key: Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        return self._fresh(nn.unbox(self._init_params(params_key)), dropout_key)

    def _fresh(self, params: Any, rng: Array) -> TrainState:
        opt_state = self.model.optimizer.transform.init(params)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, rng)

    def _train_step(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        with self.partitioner.scope():
            rng = jax.random.fold_in(state.rng, state.step)
            (_, values), grads = jax.value_and_grad(self._loss, has_aux=True)(
                state.params, batch, rng
            )
            updates, opt_state = self.model.optimizer.transform.update(
                grads, state.opt_state, state.params
            )
            params = optax.apply_updates(state.params, updates)
        grad_norms = metrics.tree_norms(grads)
        values |= {
            "grad_norm": jnp.linalg.norm(grad_norms),
            "grad_norm_by_param": grad_norms,
            "update_norm": jnp.linalg.norm(metrics.tree_norms(updates)),
            "param_norm": jnp.linalg.norm(metrics.tree_norms(params)),
        }
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, values

    def _eval_step(self, params: Any, batch: Batch) -> Metrics:
        with self.partitioner.scope():
            return self._loss(params, batch, None)[1]

    def _encode_step(
        self, params: Any, tokens: Int[Array, "B L"]
    ) -> Float[Array, "B E"]:
        with self.partitioner.scope():
            return self._module.apply({"params": params}, tokens)

    def _loss(
        self, params: Any, batch: Batch, rng: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        config = self.model.loss
        embed = functools.partial(self._embed, params, rng)
        left, right, negatives = embed_pairs(embed, batch)
        mask = losses.candidate_mask(
            batch[names.LEFT_TOKENS],
            batch[names.RIGHT_TOKENS],
            batch.get(names.NEGATIVE_TOKENS),
            negative_mask=batch.get(names.NEGATIVE_MASK),
            row_mask=batch.get(names.ROW_MASK),
            mask_duplicates=config.mask_duplicates,
        )
        output = losses.contrastive_loss(
            left,
            right,
            negatives,
            mask,
            logit_scale=config.logit_scale,
            bidirectional=config.bidirectional,
        )
        values = metrics.contrastive_metrics(output, mask, right)
        return output.loss, {"loss": output.loss} | values

    def _embed(
        self, params: Any, rng: Array | None, tokens: Int[Array, "B L"], call: int
    ) -> Float[Array, "B E"]:
        if rng is None or not self.model.encoder.t5.dropout_rate:
            return self._module.apply({"params": params}, tokens)
        key = jax.random.fold_in(rng, call)
        return self._module.apply(
            {"params": params}, tokens, deterministic=False, rngs={"dropout": key}
        )


def embed_pairs(
    embed, batch: Batch
) -> tuple[Float[Array, "B E"], Float[Array, "B E"], Float[Array, "B N E"] | None]:
    """Embeds both sides and the hard negatives in as few encoder calls as possible.

    Texts of one length go through the encoder together, each pair's texts side by side
    so that a device's rows stay its own. Weights are then gathered once a step and
    their gradients reduced once.

    Args:
        embed: (tokens [M L], call number) → embeddings [M E].
        batch: left and right tokens, and negative tokens where there are any.

    Returns:
        Left, right and negative embeddings.
    """
    left = batch[names.LEFT_TOKENS]
    rights = batch[names.RIGHT_TOKENS][:, None]
    if names.NEGATIVE_TOKENS in batch:
        rights = jnp.concatenate([rights, batch[names.NEGATIVE_TOKENS]], axis=1)
    if left.shape[-1] == rights.shape[-1]:
        texts = jnp.concatenate([left[:, None], rights], axis=1)
        embedded = _embed_grouped(embed, texts, 0)
        left, rights = embedded[:, 0], embedded[:, 1:]
    else:
        left, rights = embed(left, 0), _embed_grouped(embed, rights, 1)
    negatives = rights[:, 1:] if names.NEGATIVE_TOKENS in batch else None
    return left, rights[:, 0], negatives


def _embed_grouped(
    embed, texts: Int[Array, "B G L"], call: int
) -> Float[Array, "B G E"]:
    rows = embed(texts.reshape(-1, texts.shape[-1]), call)
    return rows.reshape(*texts.shape[:2], -1)
