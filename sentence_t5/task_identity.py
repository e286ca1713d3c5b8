"""Says what the token ids of a SeqIO task depend on, as one hash.

The source's contents (file hashes, TFDS version, or what the source itself declares),
the code of the preprocessors with their arguments, the features and the vocabulary.
Where the contents cannot be known there is no identity, and nothing is cached.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import sentencepiece
import seqio
import tensorflow as tf

from sentence_t5 import vocabularies
from sentence_t5.tasks import text_pairs


def cache_key(task: seqio.Task, split: str, file_format: int) -> str | None:
    """Returns a hash of what the ids of `task` depend on, or None if that is unknown.

    Args:
      task: any SeqIO task.
      split: one of its splits.
      file_format: the version of the files to be named by the key.
    """
    source = source_identity(task.source, split)
    if source is None:
        return None
    features = {
        key: {
            "vocabulary": vocabularies.sha256(feature.vocabulary),
            "add_eos": feature.add_eos,
            "dtype": str(feature.dtype),
            "rank": feature.rank,
        }
        for key, feature in task.output_features.items()
    }
    identity = {
        "format": file_format,
        "seqio": seqio.__version__,
        "sentencepiece": sentencepiece.__version__,
        "encoder": text_pairs.source_sha256(text_pairs.__file__),
        "task": task.name,
        "split": split,
        "source": source,
        "preprocessors": [describe(step) for step in task.preprocessors],
        "features": features,
        "in_batch_negatives": getattr(task.source, "in_batch_negatives", True),
    }
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def source_identity(source: seqio.DataSource, split: str) -> Any:
    """Returns what the rows of a source depend on, JSON-able; None if unknown."""
    if isinstance(source, text_pairs.RowSource):
        return dict(source.identity(split))
    if isinstance(source, seqio.TfdsDataSource):
        builder = source.tfds_dataset.builder
        return {"tfds": builder.info.full_name, "files": str(builder.data_path)}
    if isinstance(source, seqio.FileDataSource):
        patterns = source._split_to_filepattern[split]
        if isinstance(patterns, str):
            patterns = [patterns]
        paths = sorted(path for p in patterns for path in tf.io.gfile.glob(p))
        return {
            "kind": type(source).__name__,
            "options": repr(source),
            "files": [(path, text_pairs.file_sha256(path)) for path in paths],
        }
    return None


def describe(function: Callable) -> Any:
    """Describes a preprocessor: its code, its arguments and what it closes over."""
    if isinstance(function, functools.partial):
        return {
            "partial": describe(function.func),
            "args": [_value(arg) for arg in function.args],
            "keywords": {k: _value(v) for k, v in sorted(function.keywords.items())},
        }
    if not inspect.isroutine(function):
        state = vars(function) if hasattr(function, "__dict__") else {}
        return {
            "object": _code(type(function)),
            "state": {key: _value(value) for key, value in sorted(state.items())},
        }
    closure = inspect.getclosurevars(function).nonlocals if _is_python(function) else {}
    return {
        "function": f"{function.__module__}.{function.__qualname__}",
        "code": _code(function),
        "closure": {key: _value(value) for key, value in sorted(closure.items())},
    }


def _is_python(function: Callable) -> bool:
    return hasattr(inspect.unwrap(function), "__code__")


def _value(value: Any) -> Any:
    """Describes an argument; an unknown object by its type only."""
    if callable(value):
        return describe(value)
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return repr(value)
    if isinstance(value, seqio.Vocabulary):
        return vocabularies.sha256(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _code(thing: Any) -> str:
    """Returns a hash of the source text, or of the name where there is none."""
    try:
        text = inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        text = repr((code.co_code, code.co_consts)) if code else repr(thing)
    return hashlib.sha256(text.encode()).hexdigest()
