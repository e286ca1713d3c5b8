"""Vectors of long lists of texts, kept on disk part by part.

    <cache_dir>/<hash of model, prompt, length, texts>/vectors.npy   float32 [n E]
                                                       progress.json {"done": rows}

A list is encoded in parts of one size, so that an interrupted run goes on where it was
and ends with the same bytes. The name of a folder is a hash of what its vectors depend
on: other weights under the same path are another folder. Of the code it holds the
release's number alone: after a change within a release, remove the folder.
"""

import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from sentence_t5 import inference, progress, vector_files, whole_files

_logger = logging.getLogger(__name__)

# Texts encoded between two notes of the progress: some minutes' work at most.
_PART_TEXTS = 16384
_FORMAT = 1


def encode(
    model: inference.SentenceT5,
    texts: Sequence[str],
    *,
    prompt: str = "",
    max_length: int | None = None,
    batch_size: int = 64,
    cache_dir: str | os.PathLike | None = None,
    part_texts: int = _PART_TEXTS,
    label: str = "encode",
) -> np.ndarray:
    """Encodes texts with a prompt before each, from the cache where it has them.

    Args:
        model: the model.
        texts: in any number.
        prompt: put before each text as it is, a space at its end included.
        max_length: tokens a text is trimmed to, the prompt's included; the model's own
            by default. How many are trimmed is for the caller to say.
        batch_size: texts computed at once.
        cache_dir: a local folder; None keeps nothing.
        part_texts: texts encoded between two notes of the progress.
        label: what the progress bar is called.

    Returns:
        float32 [n E], a memory map where it comes from a cache.

    Raises:
        OSError: the cache's disk has no room for the vectors.
    """
    max_length = model.max_length if max_length is None else max_length
    options = {
        "batch_size": batch_size,
        "max_length": max_length,
        "on_truncate": "ignore",
    }
    if cache_dir is None:
        shape = (len(texts), model.embedding_dim)
        vectors = np.empty(shape, np.float32)
        _fill(vectors, model, texts, prompt, options, 0, part_texts, label, None)
        return vectors
    folder = pathlib.Path(cache_dir) / _key(
        model, texts, prompt, max_length, part_texts
    )
    folder.mkdir(parents=True, exist_ok=True)
    vectors, done = _open(folder, (len(texts), model.embedding_dim))
    if done < len(texts):
        if done:
            _logger.info("%s: going on from text %d of %d.", label, done, len(texts))
        _fill(vectors, model, texts, prompt, options, done, part_texts, label, folder)
    return np.load(folder / "vectors.npy", mmap_mode="r")


def _fill(vectors, model, texts, prompt, options, done, part_texts, label, folder):
    """Encodes the texts from ``done`` on into ``vectors``, noting finished parts."""
    several = len(texts) > part_texts
    if several:
        options = options | {"show_progress": False}
    with progress.bar(label, len(texts), "text", shown=several, done=done) as bar:
        for start in range(done, len(texts), part_texts):
            part = texts[start : start + part_texts]
            vectors[start : start + len(part)] = model.encode(
                part, instruction=prompt, **options
            )
            if folder is not None:
                vectors.flush()
                _write_progress(folder, start + len(part))
            bar.update(len(part))


def _open(folder: pathlib.Path, shape: tuple[int, int]) -> tuple[np.memmap, int]:
    """Opens a list's vectors for writing, and says how many are done."""
    path, problem = folder / "vectors.npy", None
    try:
        done = int(json.loads((folder / "progress.json").read_text())["done"])
        # A run that was killed before its first part may not have taken all the room.
        if done:
            vectors = np.load(path, mmap_mode="r+")
            if vectors.shape == shape and vectors.dtype == np.float32:
                return vectors, min(done, shape[0])
            problem = f"it has {list(vectors.shape)}, expected {list(shape)}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError) as error:
        problem = str(error)
    if problem:
        _logger.warning("Cached vectors %s are damaged (%s): anew.", folder, problem)
    _write_progress(folder, 0)
    return vector_files.create(path, shape), 0


def _write_progress(folder: pathlib.Path, done: int) -> None:
    whole_files.write(folder / "progress.json", json.dumps({"done": done}).encode())


def _key(model, texts, prompt, max_length, part_texts) -> str:
    """Hashes what the vectors depend on, as far as ``fingerprint`` knows the code."""
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    described = {
        "format": _FORMAT,
        "model": model.fingerprint,
        "prompt": prompt,
        "max_length": max_length,
        "part_texts": part_texts,
        "texts": [len(texts), digest.hexdigest()],
    }
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
