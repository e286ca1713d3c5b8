"""Opens a checkpoint of any format, and makes an encoder that fits it.

path, hub id ─► which format? ─► Source ─┬─► restore: into a model that is there
                                         └─► load_encoder: config, weights, vocabulary
"""

import dataclasses
import functools
import logging
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
from etils import epath

from sentence_t5 import buckets, checkpoint_files, descriptions
from sentence_t5 import encoder as encoder_lib
from sentence_t5 import tokenizer as tokenizer_lib
from sentence_t5.pretrained import (
    huggingface,
    matching,
    orbax_files,
    remote,
    st_folder,
    t5x,
    tensors,
)
from sentence_t5.pretrained import source as source_lib

PyTree = Any
_logger = logging.getLogger(__name__)

_EMBEDDING = "token_embedder/embedding"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What is fetched of a hub repository: other frameworks' weights are large. The second
# list is for repositories without safetensors.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "[0-9]_*/pytorch_model.bin")
_OLD_HUB_FILES = ("pytorch_model*.bin", "pytorch_model*.json")


@dataclasses.dataclass(frozen=True)
class PretrainedEncoder:
    """A checkpoint as one of our encoders.

    Attributes:
        config: the encoder.
        parts: parameter -> float32 tensor, not read yet.
        vocabulary: None if the checkpoint has none.
        max_length: tokens that texts are trimmed to; None where nothing says it.
        prompts: texts to put before an input, by name.
        default_prompt: name of the prompt used when none is asked for.
        report: what became of every name.
    """

    config: encoder_lib.EncoderConfig
    parts: Mapping[str, tensors.Tensor]
    vocabulary: source_lib.Vocabulary | None
    max_length: int | None
    prompts: Mapping[str, str]
    default_prompt: str | None
    report: matching.Report

    def read_params(self) -> PyTree:
        """Reads the parameters: a nested dict of numpy arrays."""
        by_size = sorted(self.parts, key=lambda name: -self.parts[name].size)
        read = {name: self.parts[name].read() for name in by_size}
        in_order = {name: read[name] for name in self.parts}
        return flax.traverse_util.unflatten_dict(in_order, sep="/")


def open_checkpoint(
    path: str | os.PathLike, step: int | None = None
) -> source_lib.Source:
    """Opens a checkpoint; its format is found by looking.

    Args:
        path: a folder or file of ours, of Hugging Face, of sentence-transformers or of
            T5X; a ``gs://`` folder of ours or of T5X; or a model's id on the Hugging
            Face hub.
        step: the step, where a folder of ours holds several; the newest by default.

    Raises:
        FileNotFoundError: nothing there, or it can't be reached.
        ValueError: no format that is read here.
    """
    if remote.is_remote(path):
        buckets.check_reachable(str(path))
        folder = epath.Path(path)
        if _is_ours(folder):
            return orbax_files.open_checkpoint(folder, step)
        if not (folder / t5x.INDEX_FILE).exists():
            raise FileNotFoundError(
                f"{path} holds no checkpoint of ours ({descriptions.DESCRIPTION_FILE}) "
                f"or of T5X ({t5x.INDEX_FILE}). Other formats are read from a local "
                "folder (gcloud storage cp -r)."
            )
        return t5x.open_checkpoint(path)
    local = pathlib.Path(path).expanduser()
    if not local.exists() and _HUB_ID.fullmatch(str(path)):
        local = _download(str(path))
    if not local.exists():
        raise FileNotFoundError(f"There is no checkpoint at {local.absolute()}.")
    if (local / st_folder.MODULES_FILE).exists():
        return st_folder.open_folder(local)
    if (local / huggingface.CONFIG_FILE).exists():
        return huggingface.open_folder(local)
    if t5x.is_checkpoint(local):
        return t5x.open_checkpoint(local)
    if local.is_dir() and _is_ours(epath.Path(local)):
        return orbax_files.open_checkpoint(local, step)
    raise ValueError(_unknown(local))


def restore(
    path: str | os.PathLike,
    abstract_params: PyTree,
    config: encoder_lib.EncoderConfig,
    *,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rng: jax.Array | None = None,
    step: int | None = None,
) -> tuple[PyTree, matching.Report]:
    """Fills a model's parameters from a checkpoint; see ``matching.restore``.

    Weights alone are read: neither step nor optimizer state.

    Args:
        path: as in ``open_checkpoint``.
        abstract_params: nested dict of arrays or ``jax.ShapeDtypeStruct``.
        config: the model's.
        allow_missing: patterns of parameters that may start fresh (``projection/.*``).
        ignore: patterns of tensors to leave out (``decoder/.*``).
        rng: key for what starts fresh.
        step: the step, where a folder of ours holds several.

    Returns:
        The parameters, each in its leaf's sharding (numpy without one), and the report.
    """
    params, report = matching.restore(
        open_checkpoint(path, step),
        abstract_params,
        config,
        allow_missing=allow_missing,
        ignore=ignore,
        rng=rng,
    )
    for line in report.differences:
        _logger.warning("%s: %s", path, line)
    return params, report


def check_vocabulary(
    path: str | os.PathLike,
    tokenizer: tokenizer_lib.Tokenizer,
    ignore: Sequence[str] = (),
) -> None:
    """Checks that weights to start from are for the ids of the data.

    A checkpoint without a vocabulary passes, and so does one whose embedding table is
    left out.

    Args:
        path: as in ``open_checkpoint``.
        tokenizer: what the ids are of.
        ignore: patterns of tensors that are left out.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: an id is another piece in the checkpoint's own vocabulary; a pattern
            is no regular expression.
    """
    matching.check_patterns("ignore", ignore)
    vocabulary = open_checkpoint(path).vocabulary
    if vocabulary is None or matching.matches(_EMBEDDING, ignore):
        return
    theirs = tokenizer_lib.Tokenizer(vocabulary.model_bytes, vocabulary.extra_ids)
    if difference := tokenizer.first_difference(theirs):
        number, ours, their = difference
        raise ValueError(
            f"The weights in {path} are for another vocabulary: id {number} is "
            f"{their!r} there and {ours!r} in the data's. Train with the vocabulary of "
            "these weights (--vocabulary), or leave their table out "
            f"(--ignore={_EMBEDDING} --allow_missing={_EMBEDDING})."
        )


def load_encoder(
    path: str | os.PathLike,
    *,
    pooling: str | None = None,
    pool_instruction: bool | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    step: int | None = None,
) -> PretrainedEncoder:
    """Makes the encoder that fits a checkpoint.

    A plain T5 has no projection and no pooling of its own: it is read without the one,
    and with the mean unless ``pooling`` says otherwise. A decoder is left out unless
    the pooling needs it.

    Args:
        path: as in ``open_checkpoint``.
        pooling: instead of the checkpoint's own.
        pool_instruction: instead of what the checkpoint says, if it says anything; the
            published INSTRUCTOR models don't, and need False.
        allow_missing: patterns of parameters that may start fresh.
        ignore: patterns of tensors to leave out.
        step: the step, where a folder of ours holds several.

    Returns:
        The encoder; its weights are matched but not read.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: not a T5 encoder; its vocabulary is larger than its table.
    """
    source = open_checkpoint(path, step)
    if source.config is None:
        names = sorted({**source.tensors, **source.foreign})
        raise ValueError(
            f"The {source.family} checkpoint {path} holds no T5 encoder. Its arrays: "
            f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
        )
    config = source.config
    if pooling is not None:
        config = dataclasses.replace(config, pooling=pooling)
    if pool_instruction is not None:
        config = dataclasses.replace(config, pool_instruction=pool_instruction)
    if not config.has_decoder and source_lib.count_layers(source.tensors, "decoder"):
        ignore = (*ignore, "decoder/.*")
    shapes = flax.traverse_util.flatten_dict(abstract_params(config), sep="/")
    parts, report = matching.match(
        source, shapes, config, allow_missing=allow_missing, ignore=ignore
    )
    fresh = [name for name in shapes if name not in parts]
    if fresh:
        drawn = matching.initialise(fresh, shapes, config)
        parts |= {name: tensors.from_array(value) for name, value in drawn.items()}
    return PretrainedEncoder(
        config=config,
        parts={name: parts[name] for name in shapes},
        vocabulary=source.vocabulary,
        max_length=source.max_length,
        prompts=source.prompts,
        default_prompt=source.default_prompt,
        report=report,
    )


def abstract_params(config: encoder_lib.EncoderConfig) -> PyTree:
    """Returns an encoder's parameters as shapes, without shardings."""
    return jax.tree.map(lambda leaf: leaf, _shapes(config))


@functools.lru_cache(maxsize=16)
def _shapes(config: encoder_lib.EncoderConfig) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        nn.meta.unbox(encoder_lib.boxed_params(config)),
    )


def _is_ours(folder: epath.Path) -> bool:
    """Whether this package's weights lie in a folder, local or in a bucket."""
    return (
        (folder / descriptions.DESCRIPTION_FILE).exists()
        or (folder / checkpoint_files.CHECKPOINTS_DIR).exists()
        or (folder / checkpoint_files.PARAMS).exists()
        or _is_ours_by_t5x(folder)
        or (folder / checkpoint_files.TREE_METADATA).exists()
        or _is_checkpoints_dir(folder)
    )


def _is_ours_by_t5x(step_dir: epath.Path) -> bool:
    """Whether T5X's train.py saved a step of one of our models there."""
    return (step_dir / checkpoint_files.T5X_STATE).exists() and (
        step_dir.parent / descriptions.DESCRIPTION_FILE
    ).exists()


def _is_checkpoints_dir(folder: epath.Path) -> bool:
    """Whether steps lie in a folder; other folders in it are not looked into."""
    return any(
        (folder / str(step) / checkpoint_files.PARAMS).exists()
        for step in checkpoint_files.list_steps(folder)
    )


def _download(hub_id: str) -> pathlib.Path:
    """Fetches a model from the hub, or finds it in the hub's cache."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise FileNotFoundError(
            f"There is no folder {hub_id}. If it is the id of a model on the Hugging "
            "Face hub: pip install 'sentence-t5[hub]', or download it and name the "
            "folder."
        ) from error
    try:
        fetch = huggingface_hub.snapshot_download
        folder = pathlib.Path(fetch(hub_id, allow_patterns=list(_HUB_FILES)))
        if not list(folder.glob("*.safetensors")):
            fetch(hub_id, allow_patterns=list(_OLD_HUB_FILES))
        return folder
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"There is no folder {hub_id}, and no such model could be had from the "
            f"Hugging Face hub or its cache ({type(error).__name__}: {reason}). "
            "Download it where there is a network and name the folder."
        ) from error


def _unknown(local: pathlib.Path) -> str:
    """Says what was expected where nothing known was found."""
    if local.is_file():
        return (
            f"{local} is a file of no known format. Name a folder of Hugging Face, "
            "sentence-transformers, T5X or ours, or a T5X msgpack file."
        )
    steps = sorted(p.name for p in local.glob("checkpoint_*") if t5x.is_checkpoint(p))
    if steps:
        return f"{local} holds several T5X checkpoints, name one: {', '.join(steps)}."
    if (local / "saved_model.pb").exists():
        return (
            f"{local} is a TensorFlow SavedModel, which is not read here. Take the "
            "same model as a sentence-transformers folder or as a T5X checkpoint."
        )
    held = ", ".join(sorted(p.name for p in local.iterdir())[:10]) or "nothing"
    return (
        f"{local} is no checkpoint of Hugging Face ({huggingface.CONFIG_FILE}), of "
        f"sentence-transformers ({st_folder.MODULES_FILE}), of T5X ({t5x.INDEX_FILE}) "
        f"or ours ({descriptions.DESCRIPTION_FILE}); it holds: {held}."
    )
