"""Descriptions: what the weights in a model_dir mean, written beside them.

    encoder.json    {"format_version", "encoder", "vocabulary", "max_length",
                     "prompts"?, "default_prompt"?}
    spiece.model    the vocabulary, whose hash encoder.json holds

With these, a folder of checkpoints needs nothing else to be used.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from sentence_t5 import checkpoint_files, whole_files
from sentence_t5 import encoder as encoder_lib
from sentence_t5 import tokenizer as tokenizer_lib

_logger = logging.getLogger(__name__)

DESCRIPTION_FILE = "encoder.json"
VOCABULARY_FILE = "spiece.model"
_FORMAT_VERSION = 1
# What may differ when a run goes on: how it computes, not what it computes.
_FREE_T5_FIELDS = ("dtype", "grad_dtype", "dropout_rate", "remat")


@dataclasses.dataclass(frozen=True)
class Description:
    """What the weights in a model_dir mean.

    Attributes:
        encoder: the model's config.
        tokenizer: its vocabulary.
        max_length: tokens a text was trimmed to in training, EOS included.
        model_dir: where this was read.
        prompts: instructions by name.
        default_prompt: name of the one to use when none is asked for, or None.
    """

    encoder: encoder_lib.EncoderConfig
    tokenizer: tokenizer_lib.Tokenizer
    max_length: int
    model_dir: epath.Path
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None


def write_description(
    model_dir: str | os.PathLike,
    encoder_config: encoder_lib.EncoderConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_length: int,
    *,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """Writes ``encoder.json`` and the vocabulary beside the checkpoints.

    Args:
        model_dir: the folder; made if need be.
        encoder_config: what the weights are of.
        tokenizer: the vocabulary.
        max_length: tokens a text is trimmed to, EOS included.
        prompts: instructions by name; None leaves those that the folder has, with their
            default.
        default_prompt: which of ``prompts`` to use when none is asked for.

    Raises:
        ValueError: the folder holds checkpoints of another encoder or vocabulary, the
            embedding table is smaller than the vocabulary, or the default prompt isn't
            among the prompts.
    """
    before = check_same_encoder(model_dir, encoder_config, tokenizer)
    if before is not None and before["max_length"] != max_length:
        _logger.warning(
            "Texts in %s were trimmed to %d tokens until now, from here on to %d.",
            model_dir,
            before["max_length"],
            max_length,
        )
    if prompts is None and before is not None:
        prompts, default_prompt = before.get("prompts"), before.get("default_prompt")
    check_prompts(prompts or {}, default_prompt)
    check_table(encoder_config, tokenizer)
    directory = checkpoint_files.absolute(model_dir)
    path = directory / DESCRIPTION_FILE
    content = {
        **_identity(encoder_config, tokenizer),
        "max_length": max_length,
    }
    if prompts:
        content["prompts"] = dict(prompts)
    if default_prompt is not None:
        content["default_prompt"] = default_prompt
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        whole_files.write(directory / VOCABULARY_FILE, tokenizer.model_bytes)
        whole_files.write(path, (json.dumps(content, indent=2) + "\n").encode())


def read_description(path: str | os.PathLike) -> Description:
    """Reads ``encoder.json`` and the vocabulary it names.

    Args:
        path: a model_dir, or a checkpoint in it.

    Raises:
        FileNotFoundError: no ``encoder.json`` there or above, or no vocabulary.
        ValueError: of another format, or the vocabulary is not the one trained with.
    """
    model_dir = checkpoint_files.find_model_dir(path, DESCRIPTION_FILE)
    content = json.loads((model_dir / DESCRIPTION_FILE).read_text())
    version = content.get("format_version")
    if version != _FORMAT_VERSION:
        raise ValueError(
            f"{model_dir / DESCRIPTION_FILE} has format_version {version}, this "
            f"release reads {_FORMAT_VERSION}."
        )
    vocabulary = content["vocabulary"]
    tokenizer = tokenizer_lib.Tokenizer(
        model_dir / vocabulary["file"], vocabulary["extra_ids"]
    )
    if tokenizer.sha256 != vocabulary["sha256"]:
        raise ValueError(
            f"{model_dir / vocabulary['file']} is not the vocabulary this model was "
            f"trained with: its sha256 is {tokenizer.sha256}, {DESCRIPTION_FILE} says "
            f"{vocabulary['sha256']}."
        )
    encoder_config = encoder_lib.EncoderConfig.from_dict(content["encoder"])
    check_table(encoder_config, tokenizer)
    return Description(
        encoder_config,
        tokenizer,
        content["max_length"],
        model_dir,
        content.get("prompts", {}),
        content.get("default_prompt"),
    )


def check_prompts(prompts: Mapping[str, str], default_prompt: str | None) -> None:
    """Refuses a default prompt that isn't there.

    Raises:
        ValueError: it isn't.
    """
    if default_prompt is not None and default_prompt not in prompts:
        raise ValueError(
            f"The default prompt is {default_prompt!r}, but the model's prompts are "
            f"{', '.join(map(repr, prompts)) or 'none'}."
        )


def check_table(
    encoder_config: encoder_lib.EncoderConfig, tokenizer: tokenizer_lib.Tokenizer
) -> None:
    """Refuses an embedding table that has no row for the largest id.

    JAX would not notice: an id out of range reads NaN, or another row.

    Raises:
        ValueError: it is too small.
    """
    if encoder_config.t5.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"T5Config.vocab_size is {encoder_config.t5.vocab_size}, but the "
            f"vocabulary has ids up to {tokenizer.vocab_size - 1}: "
            f"{tokenizer.vocab_size} pieces, {tokenizer.extra_ids} of them sentinels. "
            "T5's table has 32128 rows."
        )


def check_same_encoder(
    model_dir: str | os.PathLike,
    encoder_config: encoder_lib.EncoderConfig,
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, Any] | None:
    """Refuses to go on with weights that meant something else. Writes nothing.

    Returns:
        What ``encoder.json`` holds, if there are checkpoints beside it.

    Raises:
        ValueError: these are of another encoder or vocabulary.
    """
    directory = checkpoint_files.absolute(model_dir)
    path = directory / DESCRIPTION_FILE
    if not path.exists() or not (
        checkpoint_files.list_steps(directory / checkpoint_files.CHECKPOINTS_DIR)
        or checkpoint_files.list_t5x_steps(directory)
    ):
        return None

    def fixed(content):
        # Through the config: fields younger than the file get their defaults.
        config = encoder_lib.EncoderConfig.from_dict(content["encoder"])
        encoder = json.loads(json.dumps(config.to_dict()))
        t5 = {k: v for k, v in encoder.pop("t5").items() if k not in _FREE_T5_FIELDS}
        vocabulary = {k: content["vocabulary"][k] for k in ("sha256", "extra_ids")}
        return {**encoder, **t5, **vocabulary}

    content = json.loads(path.read_text())
    before, after = fixed(content), fixed(_identity(encoder_config, tokenizer))
    different = [
        f"{name} was {before.get(name)!r}, now {after.get(name)!r}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    if different:
        raise ValueError(
            f"The checkpoints beside {path} are of another encoder: "
            f"{'; '.join(different)}. Use another model_dir, or the config they were "
            "made with."
        )
    return content


def _identity(
    encoder_config: encoder_lib.EncoderConfig, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, Any]:
    """Returns what ``encoder.json`` says of an encoder and its vocabulary."""
    return {
        "format_version": _FORMAT_VERSION,
        "encoder": encoder_config.to_dict(),
        "vocabulary": {"file": VOCABULARY_FILE, **tokenizer.describe()},
    }
