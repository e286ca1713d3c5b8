"""sentence-transformers folders: a T5, its pooling, a projection and prompts.

    modules.json ─► Transformer ─► Pooling ─► [Dense] ─► [Normalize]

Both layouts are read: the old module names and those that release 6 writes. What this
model can't compute the same way (a bias, a Tanh, another module) is an error.

Source: files of sentence-transformers 6.2 and of the public ``sentence-t5``, ``gtr-t5``
and ``instructor`` models.
"""

import dataclasses
import json
import logging
import os
import pathlib
from typing import Any

from sentence_t5.pretrained import huggingface, tensors, vocabulary_files
from sentence_t5.pretrained import source as source_lib

_logger = logging.getLogger(__name__)

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
DENSE_KEY = "linear.weight"
IDENTITY = "torch.nn.modules.linear.Identity"
# Larger limits mean that there is none.
_NO_LIMIT = 1_000_000

_POOLINGS = {"mean": "mean", "cls": "first", "max": "max"}
_OLD_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}


def open_folder(path: str | os.PathLike) -> source_lib.Source:
    """Opens a folder that sentence-transformers wrote, or one like it.

    Args:
        path: of a local folder with ``modules.json``.

    Returns:
        The opened checkpoint, with the whole encoder's config.

    Raises:
        FileNotFoundError: a file that ``modules.json`` names is missing.
        ValueError: a module that this model can't be.
    """
    folder = pathlib.Path(path)
    modules = json.loads((folder / MODULES_FILE).read_text())
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    # INSTRUCTOR's own transformer module is the plain one with another tokenization.
    is_instructor = any(kind.startswith("INSTRUCTOR_") for kind in kinds)
    kinds = [kind.removeprefix("INSTRUCTOR_") for kind in kinds]
    _check_order(kinds, folder)
    folders = {
        kind: folder / module["path"]
        for kind, module in zip(kinds, modules, strict=True)
    }
    base = huggingface.open_folder(folders["Transformer"])
    pooling = _read_json(folders["Pooling"] / "config.json")
    opened = dict(base.tensors)
    projection_dim = None
    if "Dense" in folders:
        opened["projection/kernel"] = _open_dense(folders["Dense"])
        projection_dim = opened["projection/kernel"].shape[1]
    settings = _read_json(folder / SETTINGS_FILE)
    # Release 6 fills in empty prompts for both sides.
    prompts = {k: v for k, v in (settings.get("prompts") or {}).items() if v.strip()}
    default = settings.get("default_prompt_name")
    for name, prompt in prompts.items():
        if not prompt[-1].isspace():
            _logger.warning(
                "%s: the prompt %s (%r) doesn't end in white space: there its last "
                "word runs on into the text, here the text begins a word of its own.",
                folder, name, prompt,
            )  # fmt: skip
    return dataclasses.replace(
        base,
        path=str(folder),
        family="sentence-transformers",
        tensors=opened,
        config=dataclasses.replace(
            base.config,
            pooling=_POOLINGS[_pooling_mode(pooling, folders["Pooling"])],
            projection_dim=projection_dim,
            normalize="Normalize" in folders,
            pool_instruction=pooling.get("include_prompt", not is_instructor),
        ),
        max_length=_max_length(folder, folders["Transformer"]),
        prompts=prompts,
        # An empty one, as release 6 may name, is none.
        default_prompt=default if default in prompts else None,
    )


def _check_order(kinds: list[str], folder: pathlib.Path) -> None:
    rest = kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or rest not in (
        [], ["Dense"], ["Normalize"], ["Dense", "Normalize"],
    ):  # fmt: skip
        raise ValueError(
            f"{folder / MODULES_FILE} lists {', '.join(kinds)}; expected Transformer, "
            "Pooling, then at most one Dense, then at most one Normalize."
        )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _pooling_mode(config: dict[str, Any], folder: pathlib.Path) -> str:
    """Returns the one mode of either layout."""
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        modes = [modes] if isinstance(modes, str) else list(modes)
    else:
        modes = [
            _OLD_POOLINGS.get(key, key)
            for key, on in config.items()
            if key.startswith("pooling_mode_") and on
        ] or ["mean"]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(
            f"{folder / 'config.json'} pools by {' and '.join(modes)}; expected "
            f"exactly one of {', '.join(_POOLINGS)}."
        )
    return modes[0]


def _open_dense(folder: pathlib.Path) -> tensors.Tensor:
    """Opens the projection, which must be one: no bias, no activation."""
    config = _read_json(folder / "config.json")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation != IDENTITY or config.get("bias", True):
        raise ValueError(
            f"{folder / 'config.json'} has bias {config.get('bias', True)} and "
            f"activation {activation}; this model's projection has no bias and no "
            f"activation ({IDENTITY})."
        )
    opened = huggingface.open_weights(folder)
    if DENSE_KEY not in opened:
        raise ValueError(
            f"The weights in {folder} are {', '.join(opened)}; expected {DENSE_KEY}."
        )
    return opened[DENSE_KEY].T


def _max_length(folder: pathlib.Path, transformer: pathlib.Path) -> int | None:
    """Reads the limit on tokens; the old place wins over the new one."""
    places = (
        (folder / LENGTH_FILE, "max_seq_length"),
        (transformer / LENGTH_FILE, "max_seq_length"),
        (transformer / vocabulary_files.TOKENIZER_CONFIG_FILE, "model_max_length"),
    )
    for path, key in places:
        limit = _read_json(path).get(key)
        if limit is not None and limit < _NO_LIMIT:
            return int(limit)
    return None
