"""Optimizers and learning-rate schedules, composed from optax.

Adafactor is the papers' optimizer. Scanned layers keep their parameters stacked on a
leading axis, over which Adafactor's clipping and parameter scale must not average: they
run per layer here, so that scanned and unrolled models take the same steps.

Source: Shazeer & Stern 2018 (arXiv 1804.04235); defaults as in T5X's ``adafactor.py``.
"""

from typing import NamedTuple

import jax
import optax

from sentence_t5 import names


class Optimizer(NamedTuple):
    """A gradient transformation and the schedule inside it, kept for the log.

    Attributes:
        transform: what updates parameters.
        learning_rate: step (from 0) → learning rate.
    """

    transform: optax.GradientTransformation
    learning_rate: optax.Schedule


def constant(value: float) -> optax.Schedule:
    """Returns a schedule that stays at ``value``.

    Raises:
        ValueError: it is negative or not finite.
    """
    _check_rate("constant: value", value)
    return optax.constant_schedule(value)


def linear_decay(
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    hold_fraction: float = 0.1,
) -> optax.Schedule:
    """Returns warm-up, a hold, then a straight line to 0 at ``total_steps``.

    Args:
        peak: the highest learning rate.
        total_steps: the step at which the rate reaches 0.
        warmup_steps: steps of linear growth from 0 to ``peak``.
        hold_fraction: the decay starts after this share of ``total_steps`` (or after
            the warm-up, if that is longer).

    Raises:
        ValueError: the peak is negative or not finite, or the parts don't fit into
            ``total_steps``.

    Source: Sentence-T5 and GTR train at 1e-3 with linear decay; that it starts after a
    tenth of the steps is recalled from the paper, not verified.
    """
    _check_rate("linear_decay: peak", peak)
    decay_start = max(int(hold_fraction * total_steps), warmup_steps)
    if not 0 <= hold_fraction <= 1 or warmup_steps < 0 or decay_start > total_steps:
        raise ValueError(
            f"linear_decay: got warmup_steps={warmup_steps} and hold_fraction="
            f"{hold_fraction} for total_steps={total_steps}; expected "
            "0 <= warmup_steps <= total_steps and hold_fraction in [0, 1]."
        )
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    hold = optax.constant_schedule(peak)
    decay = optax.linear_schedule(peak, 0.0, max(total_steps - decay_start, 1))
    return optax.join_schedules(
        [warmup, hold, decay] if warmup_steps else [hold, decay],
        [warmup_steps, decay_start] if warmup_steps else [decay_start],
    )


def _check_rate(what: str, rate: float) -> None:
    if not 0 <= rate < float("inf"):
        raise ValueError(
            f"{what}: got a learning rate of {rate}, expected 0 or more, and finite."
        )


def adafactor(
    learning_rate: optax.Schedule,
    decay_rate: float = 0.8,
    clipping_threshold: float = 1.0,
    min_dim_size_to_factor: int = 128,
    multiply_by_parameter_scale: bool = True,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Returns Adafactor without momentum.

    Args:
        learning_rate: relative to each parameter's scale if
            ``multiply_by_parameter_scale``.
        decay_rate: exponent of the second moment's decay ``1 - t ** -decay_rate``.
        clipping_threshold: largest root mean square of an update.
        min_dim_size_to_factor: matrices with a smaller side keep full second moments.
        multiply_by_parameter_scale: scale steps by the parameters' root mean square.
        weight_decay: times the learning rate, subtracted from matrices.
    """
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
        ),
        _per_layer(optax.clip_by_block_rms(clipping_threshold)),
    ]
    if multiply_by_parameter_scale:
        parts.append(_per_layer(optax.scale_by_param_block_rms()))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay, mask=_matrices))
    parts.append(optax.scale_by_learning_rate(learning_rate))
    return Optimizer(optax.chain(*parts), learning_rate)


def adamw(
    learning_rate: optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
) -> Optimizer:
    """Returns AdamW.

    Args:
        learning_rate: the step size.
        b1: decay of the mean.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: times the learning rate, subtracted from matrices (norm scales are
            left alone).
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
    """
    transform = optax.adamw(
        learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=_matrices
    )
    if max_grad_norm is not None:
        clip = optax.clip_by_global_norm(max_grad_norm)
        transform = optax.chain(clip, transform)
    return Optimizer(transform, learning_rate)


def sgd(learning_rate: optax.Schedule) -> Optimizer:
    """Returns plain gradient descent: no state, and updates linear in the gradient."""
    return Optimizer(optax.sgd(learning_rate), learning_rate)


def is_stacked(path: jax.tree_util.KeyPath) -> bool:
    """Says whether a parameter's leading axis counts scanned layers."""
    return any(getattr(key, "key", None) == names.LAYERS for key in path)


def _per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a stateless block transformation to each layer of a stacked parameter."""

    def update(updates, state, params=None):
        def one(path, update, param):
            def apply(u, p):
                return transform.update(u, state, p)[0]

            return (jax.vmap(apply) if is_stacked(path) else apply)(update, param)

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformation(transform.init, update)


def _matrices(params):
    """Marks parameters that are matrices, stacked or not; norm scales are vectors."""

    def is_matrix(path, leaf):
        return leaf.ndim - is_stacked(path) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)
