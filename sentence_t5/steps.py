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

from sentence_t5 import (
    cached_gradients,
    candidate_masks,
    encoder,
    losses,
    metrics,
    names,
    optim,
    partitioning,
    text_groups,
)

Batch = text_groups.Batch
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

    def __post_init__(self):
        """Checks the parts against each other; see ``LossConfig.check_encoder``."""
        self.loss.check_encoder(self.encoder)


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
    """The jitted steps of one model on one mesh.

    Attributes:
        model: what is trained.
        partitioner: the mesh.
        microbatch_size: pairs of the global batch that are encoded at once, or None.
        state_shardings: shardings of the state, a tree like it.
        abstract_state: shapes, dtypes and shardings of the state.
        param_names: path of each parameter, "encoder/final_norm/scale", in the order of
            ``jax.tree.leaves`` and of the metric ``grad_norm_by_param``.
        train_step: (state, batch) → (state, metrics); the state given is donated.
        eval_step: (parameters, batch) → metrics, without dropout.
        encode_step: (parameters, tokens int32 [B L], lengths of their instructions
            int32 [B] or None) → embeddings [B E] on every device.
    """

    def __init__(
        self,
        model: Model,
        partitioner: partitioning.Partitioner,
        microbatch_size: int | None = None,
    ):
        """Works out shapes and shardings; runs nothing.

        Args:
            model: what to train.
            partitioner: where to.
            microbatch_size: pairs of the global batch to encode at once, for batches
                whose activations don't fit; the gradients stay those of the whole
                batch, for one more forward pass (see ``cached_gradients``). None
                encodes all.
        """
        self.model = model
        self.partitioner = partitioner
        self.microbatch_size = microbatch_size
        self._module = encoder.SentenceEncoder(model.encoder)
        param_shardings, params = partitioner.encoder_params(model.encoder)
        shapes = jax.eval_shape(self._fresh, params, jax.random.key(0))
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
        self.abstract_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            shapes,
            shardings,
        )
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
            in_shardings=(param_shardings, batch, batch),
            out_shardings=replicated,
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

    def _init(self, key: Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        tokens = jnp.ones((1, 8), jnp.int32)
        params = self._module.init(params_key, tokens)["params"]
        return self._fresh(nn.unbox(params), dropout_key)

    def _fresh(self, params: Any, rng: Array) -> TrainState:
        opt_state = self.model.optimizer.transform.init(params)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, rng)

    def _train_step(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        if self.model.loss.guide is not None and names.LEFT_GUIDE not in batch:
            raise ValueError(
                f"LossConfig.guide is {self.model.loss.guide}, but the batch has no "
                "vectors of a guide: `sentence-t5 train` adds them. Leave it out here."
            )
        rng = jax.random.fold_in(state.rng, state.step)
        (_, values), grads = self._value_and_grad(state.params, batch, rng)
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

    def _value_and_grad(
        self, params: Any, batch: Batch, rng: Array
    ) -> tuple[tuple[Float[Array, ""], Metrics], Any]:
        groups = text_groups.make_groups(batch)
        loss = functools.partial(self._loss, batch)
        if self.microbatch_size is None:

            def of_params(params):
                return loss(text_groups.embed_all(self._module, params, groups, rng))

            with self.partitioner.scope():
                return jax.value_and_grad(of_params, has_aux=True)(params)

        def embed(params, texts):
            with self.partitioner.scope(manual=names.DATA):
                return text_groups.embed(self._module, params, texts, rng)

        return cached_gradients.value_and_grad(
            embed,
            loss,
            params,
            groups,
            num_chunks=self._check_chunks(batch, groups),
            partitioner=self.partitioner,
            reduction_dtype=self.model.encoder.t5.reduction_dtype,
        )

    def num_chunks(self, batch_size: int) -> int:
        """Returns how many chunks a batch is encoded in.

        Raises:
            ValueError: a chunk can't take the same number of rows from every device.
        """
        if self.microbatch_size is None:
            return 1
        size, shards = self.microbatch_size, self.partitioner.num_batch_shards
        if size % shards or batch_size % size:
            raise ValueError(
                f"Trainer.microbatch_size is {size}: it must be a multiple of the "
                f"{shards} devices (data × fsdp) that share it, and divide the global "
                f"batch of {batch_size}."
            )
        return batch_size // size

    def _check_chunks(self, batch: Batch, groups: list[text_groups.Group]) -> int:
        """Returns the number of chunks, which packed rows must be made for."""
        chunks = self.num_chunks(text_groups.batch_size(batch))
        rows, shards = groups[0].numbers.shape[0], self.partitioner.num_batch_shards
        if rows % (shards * chunks):
            raise ValueError(
                f"{rows} packed rows can't be encoded in {chunks} chunks on {shards} "
                "devices: make the rows a multiple of their product."
            )
        return chunks

    def _eval_step(self, params: Any, batch: Batch) -> Metrics:
        with self.partitioner.scope():
            groups = text_groups.make_groups(batch)
            embedded = text_groups.embed_all(self._module, params, groups, None)
            return self._loss(batch, embedded)[1]

    def _encode_step(
        self,
        params: Any,
        tokens: Int[Array, "B L"],
        instruction_lengths: Int[Array, " B"] | None,
    ) -> Float[Array, "B E"]:
        with self.partitioner.scope():
            return self._module.apply(
                {"params": params}, tokens, instruction_lengths=instruction_lengths
            )

    def _loss(
        self, batch: Batch, embedded: text_groups.Embedded
    ) -> tuple[Float[Array, ""], Metrics]:
        return contrast(self.model.loss, batch, embedded)


def contrast(
    config: losses.LossConfig, batch: Batch, embedded: text_groups.Embedded
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the loss of a batch and what is reported beside it.

    Args:
        config: how pairs are contrasted.
        batch: the tokens, and masks where there are any.
        embedded: the embeddings of ``text_groups.make_groups(batch)``.
    """
    left, right, negatives = text_groups.ungroup(batch, embedded)
    negative_mask = batch.get(names.NEGATIVE_MASK)
    if negatives is not None and negative_mask is None:
        negative_mask = jnp.ones(negatives.shape[:2], bool)
    guide = None
    if names.LEFT_GUIDE in batch:
        sides = (names.LEFT_GUIDE, names.RIGHT_GUIDE, names.NEGATIVE_GUIDE)
        guide = tuple(batch.get(side) for side in sides)
    candidates = candidate_masks.make_candidates(
        left.shape[0],
        negative_mask,
        text_groups.text_ids(batch) if config.mask_duplicates else None,
        row_mask=batch.get(names.ROW_MASK),
        in_batch=batch.get(names.IN_BATCH),
        own_right_only=config.own_right_only,
        guide=guide,
        guide_margin=config.guide_margin,
    )
    output = losses.nested_loss(
        left,
        right,
        negatives,
        candidates,
        prefix_widths=config.prefix_widths,
        logit_scale=config.logit_scale,
        bidirectional=config.bidirectional,
        block_rows=config.block_rows,
    )
    values = metrics.contrastive_metrics(
        output, candidates.rows, right, block_rows=config.block_rows
    )
    return output.loss, {"loss": output.loss} | values
