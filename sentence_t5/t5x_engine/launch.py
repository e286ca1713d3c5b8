"""What happens when T5X's train.py reads one of our gin files.

    t5x/train.py: gin parses the first file ─► engine.train is mentioned ─► train()
      ─► the whole command line read again by our reader: strict checks, our messages
      ─► the arguments built once, so that a missing file is found here
      ─► T5X's hooks (data, first weights, evaluation) bound to our functions
    and gin goes on parsing, to the same values.

The hooks are parameters of T5X's ``train`` that our own ``train`` has not, which is why
they are bound here and not in the gin files.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
from absl import flags as absl_flags
from t5x import checkpoints as t5x_checkpoints

from sentence_t5 import (
    checkpoint_files,
    checkpoints,
    data_record,
    datasets,
    gin_files,
    gin_flags,
    preflight,
    pretrained,
)
from sentence_t5.gin_reader import ConfigError
from sentence_t5.t5x_engine import data, evaluation, state, trainer

_USAGE_ERROR = 2
_prepared = False


def train() -> Callable[..., Any]:
    """Returns the running script's ``train``; its first mention starts the checks."""
    global _prepared
    found = sys.modules["__main__"].train
    if not _prepared:
        _prepared = True  # What is read next mentions it too.
        try:
            prepare(command_line())
        except ConfigError as error:
            print(f"t5x/train.py: error: {error}", file=sys.stderr)
            raise SystemExit(_USAGE_ERROR) from None
    return found


def command_line() -> list[str]:
    """Returns T5X's flags as this package's command line has them."""
    flags = absl_flags.FLAGS
    return [
        *(f"--gin_file={name}" for name in flags.gin_file or ()),
        f"--gin_search_paths={','.join(flags.gin_search_paths)}",
        *(f"--gin.{binding}" for binding in flags.gin_bindings),
    ]


def prepare(argv: Sequence[str]) -> "Hooks":
    """Checks a configuration and binds T5X's hooks in it.

    Args:
        argv: gin files and bindings; see ``command_line``.

    Returns:
        What was bound; gin holds the configuration, unlocked.

    Raises:
        ConfigError: a mistake in the files or flags.
    """
    config = load(argv)
    with preflight.together("reading the configuration"):
        arguments = config.arguments(lock=False)
        _check(arguments)
    preflight.check_same("configuration", config.text())
    hooks = Hooks(arguments)
    with gin.config._parse_scope():  # Selectors are looked up in full, not as imports.
        for name, function in hooks.bindings().items():
            if ("", config.root, name) not in config.reader.bindings:
                gin.bind_parameter(("", config.root, name), function)
    return hooks


def load(argv: Sequence[str]) -> gin_files.Config:
    """Reads and checks gin files and bindings; nothing is built.

    Raises:
        ConfigError: a mistake in the files or flags.
    """
    _alias_train()
    parser = gin_files.make_parser("train")
    return gin_files.load(gin_flags.parse_flags(argv, parser))


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuses here what T5X would find, or not find, after minutes of loading.

    Raises:
        ConfigError: model, batch, mesh and folder don't fit together.
    """
    try:
        bound = gin.get_bindings("sentence_t5.engine.trainer")
        trainer.check_microbatches(
            bound.get("microbatch_size"), bound.get("num_microbatches")
        )
        arguments["partitioner"].ours.check(
            arguments["model"].encoder, arguments["train_dataset_cfg"].batch_size
        )
        checkpoint_files.check_engine(arguments["model_dir"], is_t5x=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _alias_train() -> None:
    """Lets ``--gin.engine.train.NAME`` find the function, which T5X named __main__."""
    registered = gin.config._INVERSE_REGISTRY[sys.modules["__main__"].train]
    gin.config._REGISTRY["sentence_t5.engine.train"] = registered


class Hooks:
    """The functions that T5X's ``train`` calls for data, first weights and scores."""

    def __init__(self, arguments: Mapping[str, Any]):
        """Keeps what the functions need to know of each other's arguments.

        Args:
            arguments: of T5X's ``train``.
        """
        self._encoder = arguments["model"].encoder
        self._model_dir: str = arguments["model_dir"]
        self._checkpoint_cfg: checkpoints.CheckpointConfig = arguments["checkpoint_cfg"]
        self._infer_eval_cfg = arguments.get("infer_eval_dataset_cfg")
        self._seed: int = arguments["random_seed"]

    def __deepcopy__(self, memo: Any) -> "Hooks":
        """Returns itself: gin copies what it passes on, and there is one run."""
        return self

    def bindings(self) -> dict[str, Any]:
        """Returns parameter of T5X's ``train`` -> value."""
        return {
            "get_dataset_fn": self.get_dataset,
            "train_eval_get_dataset_fn": self.get_eval_datasets,
            "inference_evaluator_cls": self.make_evaluator,
            "train_state_initializer_cls": self.make_initializer,
            # As this package's trainer: a new run starts with the score of step 0.
            "run_eval_before_training": self.first_step() == 0,
        }

    def first_step(self) -> int:
        """Returns the step that T5X goes on from."""
        steps = t5x_checkpoints.all_steps(self._model_dir)
        return steps[-1] if steps else 0

    def get_dataset(
        self, cfg: datasets.DatasetConfig, shard_id: int, num_shards: int, *_: Any
    ) -> data.TrainIterator:
        """Loads the training data, checks it, and describes the model beside it."""
        with preflight.together("loading the data"):
            examples = self._load(cfg)
            batches = datasets.make_batches(
                cfg, examples, process_index=shard_id, process_count=num_shards
            )
        preflight.check_same("training data", examples.fingerprint)
        preflight.check_shared(self._model_dir)
        tokenizer, start = datasets.tokenizer(cfg), self._checkpoint_cfg
        if self.first_step() == 0 and start.restore_path is not None:
            with preflight.together("reading the weights to start from"):
                pretrained.check_vocabulary(start.restore_path, tokenizer, start.ignore)
        checkpoints.write_description(
            self._model_dir,
            self._encoder,
            tokenizer,
            max(cfg.task_feature_lengths.values()),
        )
        record = data_record.describe(cfg, examples)
        return data.TrainIterator(batches, self.first_step(), record)

    def get_eval_datasets(
        self,
        cfg: datasets.DatasetConfig,
        shard_id: int,
        num_shards: int,
        eval_steps: int,
        *_: Any,
    ) -> dict[str, data.EvalBatches]:
        """Loads the held-out pairs."""
        with preflight.together("loading the held-out pairs"):
            examples = self._load(cfg)
        host = {"process_index": shard_id, "process_count": num_shards}
        batches = data.EvalBatches(cfg, examples, eval_steps, **host)
        return {examples.task_name: batches}

    def make_evaluator(self, **_: Any) -> evaluation.StsEvaluator:
        """Loads the judged pairs of ``infer_eval_dataset_cfg``."""
        with preflight.together("loading the judged pairs"):
            return evaluation.StsEvaluator(
                self._infer_eval_cfg, self._model_dir, self._encoder.t5.vocab_size
            )

    def make_initializer(self, **kwargs: Any) -> state.StateInitializer:
        """Makes what starts the state."""
        return state.StateInitializer(self._checkpoint_cfg, self._seed, **kwargs)

    def _load(self, cfg: datasets.DatasetConfig) -> datasets.Examples:
        examples = datasets.load_examples(cfg)
        datasets.check_token_ids(examples, self._encoder.t5.vocab_size)
        return examples
