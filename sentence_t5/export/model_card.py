"""The model card: what a model was trained on, how it scores, and its limits.

Everything in it comes from the model's own folder: the resolved gin file, the last
evaluations up to the exported step, the description of the data in the checkpoint.
"""

import json
import os
import pathlib

from etils import epath

from sentence_t5 import checkpoint_files, metrics_file
from sentence_t5 import encoder as encoder_lib
from sentence_t5.pretrained import source as source_lib

_FRONT = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- sentence-similarity
- feature-extraction
- t5
---
"""


def make_card(source: source_lib.Source, path: str | os.PathLike) -> str:
    """Writes the card's text.

    Args:
        source: the model.
        path: its folder, where config and scores may lie.

    Returns:
        Markdown with a YAML head.
    """
    model_dir = _model_dir(path)
    sections = [
        _FRONT,
        f"# {pathlib.Path(path).absolute().name}\n",
        _what(source),
        _USE,
        "## Scores\n\n" + (_scores(model_dir, source.step) or "None recorded."),
        "## Data\n\n" + (_data(source) or "Not recorded."),
        "## Recipe\n\n" + (_recipe(model_dir) or "Not recorded."),
        _limits(source),
    ]
    return "\n".join(section.rstrip() + "\n" for section in sections)


_USE = """\
## Use

```python
from sentence_transformers import SentenceTransformer

embeddings = SentenceTransformer("path/of/this/folder").encode(["A text.", "Another."])
```
"""


_COMPARED_BY = {encoder_lib.COSINE: "cosine", encoder_lib.DOT: "dot product"}


def _what(source: source_lib.Source) -> str:
    config, t5 = source.config, source.config.t5
    generation = "1.0 (relu)" if t5.mlp_activations == ("relu",) else "1.1 (gated gelu)"
    projection = config.projection_dim or "none"
    compared_by = _COMPARED_BY[config.similarity]
    trained = "" if source.step is None else f"- weights of step {source.step}\n"
    return (
        f"A sentence encoder: one vector per text, compared by {compared_by}.\n\n"
        f"- T5 {generation}, encoder of {t5.num_layers} layers, width {t5.d_model}, "
        f"{t5.num_heads} heads of {t5.head_dim}, MLP {t5.d_ff}\n"
        f"- pooling: {config.pooling}; projection: {projection}; "
        f"unit length: {'yes' if config.normalize else 'no'}\n"
        f"- {config.num_params():,} parameters, {config.embedding_dim} dimensions\n"
        + trained
        + "".join(f"- prompt `{k}`: `{v}`\n" for k, v in source.prompts.items())
    )


def _model_dir(path: str | os.PathLike) -> pathlib.Path | None:
    try:
        return pathlib.Path(checkpoint_files.find_model_dir(path, "encoder.json"))
    except FileNotFoundError:
        return None


def _scores(model_dir: pathlib.Path | None, step: int | None) -> str:
    """The last value of every evaluation metric up to a step, as a table."""
    if model_dir is None:
        return ""
    last: dict[str, tuple[int, float | None]] = {}
    for line in metrics_file.read(epath.Path(model_dir) / metrics_file.NAME, step):
        found = metrics_file.evaluations(line)
        last |= {name: (line["step"], value) for name, value in found.items()}
    if not last:
        return ""
    rows = [
        f"| {name} | {'undefined' if value is None else f'{value:.2f}'} | {step} |"
        for name, (step, value) in sorted(last.items())
    ]
    return "| metric | value | step |\n|---|---|---|\n" + "\n".join(rows)


def _data(source: source_lib.Source) -> str:
    """What the checkpoint says about its training data."""
    item = pathlib.Path(source.path)
    file = item.parent / checkpoint_files.META / "metadata"
    if item.name != checkpoint_files.PARAMS or not file.exists():
        return ""
    data = json.loads(file.read_text()).get("data")
    return "\n".join(f"- {key}: {value}" for key, value in (data or {}).items())


def _recipe(model_dir: pathlib.Path | None) -> str:
    file = model_dir / "config.gin" if model_dir else None
    if file is None or not file.exists():
        return ""
    return f"The whole configuration:\n\n```\n{file.read_text().rstrip()}\n```"


def _limits(source: source_lib.Source) -> str:
    limit = source.max_length
    compared_by = _COMPARED_BY[source.config.similarity].capitalize()
    cut = f"Texts are cut to {limit} tokens. " if limit else ""
    return (
        "## Limits\n\n"
        f"{cut}Vectors of other models, or of other checkpoints of this one, are not "
        f"comparable with these. {compared_by}s rank texts; their size is not a "
        "probability. T5 overflows in float16: use float32 or bfloat16. Texts of other "
        "languages or kinds than the training data's were not tested."
    )
