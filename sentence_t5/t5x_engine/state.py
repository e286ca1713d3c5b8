"""Where T5X saves, and where the first weights come from.

Going on from ``model_dir`` is T5X's own doing. The first weights of a new run may come
from any format that ``pretrained`` reads, with a fresh optimizer, as in this package's
trainer: T5X's own restoring reads T5X checkpoints of the same tree only.
"""

import functools
import logging
from typing import Any

import flax
import jax
from jax.sharding import NamedSharding
from t5x import checkpoints as t5x_checkpoints
from t5x import utils

from sentence_t5 import checkpoints, pretrained

_logger = logging.getLogger(__name__)


class CheckpointConfig(checkpoints.CheckpointConfig):
    """``checkpoints.CheckpointConfig`` as T5X's: ``save`` and ``restore``.

    Attributes:
        restore: None: the first weights don't go through T5X, see ``StateInitializer``.
    """

    restore = None

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range, or ``keep_best``, which T5X has not.
        """
        super().__post_init__()
        if self.keep_best:
            raise ValueError(
                f"CheckpointConfig.keep_best is {self.keep_best}: T5X evaluates after "
                "it saves, so that it can't keep checkpoints by their scores. Set it "
                "to 0 and keep or keep_period higher, or train by sentence_t5.train."
            )

    @functools.cached_property
    def save(self) -> utils.SaveCheckpointConfig:
        """How T5X saves."""
        return utils.SaveCheckpointConfig(
            period=self.save_period,
            keep=self.keep,
            save_dataset=True,
            # The one way by which T5X hands a keep_period on to Orbax.
            checkpointer_cls=functools.partial(
                t5x_checkpoints.SaveBestCheckpointer,
                metric_name_to_monitor=None,
                force_keep_period=self.keep_period,
            ),
        )


class StateInitializer(utils.TrainStateInitializer):
    """Starts from random weights, or from those of ``restore_path``."""

    def __init__(self, config: checkpoints.CheckpointConfig, seed: int, **kwargs: Any):
        """Works out shapes and shardings.

        Args:
            config: has ``restore_path``, ``allow_missing`` and ``ignore``.
            seed: of the weights that may be missing.
            **kwargs: see ``t5x.utils.TrainStateInitializer``.
        """
        self._config = config
        self._seed = seed
        self._encoder = kwargs["init_fn"].__self__.encoder
        self._mesh = kwargs["partitioner"].mesh
        super().__init__(**kwargs)

    def from_scratch(self, init_rng: jax.Array) -> Any:
        """Makes the state of step 0."""
        state = super().from_scratch(init_rng)
        config = self._config
        if config.restore_path is None:
            return state
        params, report = pretrained.restore(
            config.restore_path,
            self._abstract_params(),
            self._encoder,
            allow_missing=config.allow_missing,
            ignore=config.ignore,
            rng=jax.random.key(self._seed),
        )
        _logger.info("%s", report)
        _logger.info(
            "Starting from the weights of %s: step 0, fresh optimizer.",
            config.restore_path,
        )
        return state.replace_params(flax.core.freeze(params))

    def _abstract_params(self) -> dict[str, Any]:
        abstract = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(self._mesh, spec)
            ),
            self.global_train_state_shape.params,
            self.train_state_axes.params,
        )
        return flax.core.unfreeze(abstract)
