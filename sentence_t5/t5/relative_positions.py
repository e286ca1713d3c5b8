"""T5's relative positions: an offset's bucket, and the bias that is learned for it.

    bias [H Q M] = table [R H] at bucket(memory position - query position)

Source: Raffel et al. 2020 (arXiv 1910.10683); initialiser and bucket function as in T5X
``examples/t5/layers.py``.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sentence_t5 import names
from sentence_t5.t5 import config as t5_config

_relpos_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


def relative_position_buckets(
    query_length: int,
    memory_length: int,
    *,
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
) -> Int[np.ndarray, "Q M"]:
    """Maps every (query, memory) offset to its bucket.

    Half of the buckets hold one offset each, the other half grow logarithmically up to
    ``max_distance``. Bidirectional tables give positive offsets (memory after the
    query) their own half; causal ones put every offset >= 0 into bucket 0.

    Args:
        query_length: number of query positions, which start at 0.
        memory_length: number of memory positions, which start at 0.
        bidirectional: True in the encoder, False in the decoder.
        num_buckets: buckets in all.
        max_distance: offsets from here on share the last bucket.

    Returns:
        int32 bucket numbers in [0, num_buckets).

    Source: Raffel et al. 2020, section 2.1; ``_relative_position_bucket`` of T5X.
    """
    offset = np.arange(memory_length)[None, :] - np.arange(query_length)[:, None]
    base = np.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        base = np.where(offset > 0, num_buckets, 0)
        distance = np.abs(offset)
    else:
        distance = np.maximum(-offset, 0)
    num_exact = num_buckets // 2
    # The epsilon keeps the exact powers (16, 32, 64) on the upper side of their border.
    ratio = np.maximum(distance, 1).astype(np.float32) / num_exact
    log_ratio = np.log(ratio + np.finfo(np.float32).eps)
    log_ratio /= np.float32(math.log(max_distance / num_exact))
    coarse = num_exact + (log_ratio * (num_buckets - num_exact)).astype(np.int32)
    coarse = np.minimum(coarse, num_buckets - 1)
    bucket = base + np.where(distance < num_exact, distance, coarse)
    return bucket.astype(np.int32)


class RelativePositionBias(nn.Module):
    """A learned bias per head and bucket, shared by all layers of a stack."""

    config: t5_config.T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, query_length: int, memory_length: int) -> Float[Array, "H Q M"]:
        """Returns the bias to add to attention logits."""
        cfg = self.config
        table = self.param(
            "embedding",
            nn.with_logical_partitioning(
                _relpos_init, (names.RELPOS_BUCKETS, names.AFFINITY)
            ),
            (cfg.relpos_num_buckets, cfg.num_heads),
            jnp.float32,
        )
        buckets = relative_position_buckets(
            query_length,
            memory_length,
            bidirectional=self.bidirectional,
            num_buckets=cfg.relpos_num_buckets,
            max_distance=cfg.relpos_max_distance,
        )
        # A product with one-hot rows: exact, and its gradient is a product too.
        one_hot = jax.nn.one_hot(buckets, cfg.relpos_num_buckets, dtype=jnp.float32)
        return jnp.einsum("qmr,rh->hqm", one_hot, table, precision="highest")
