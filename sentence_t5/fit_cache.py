"""What the classifier fits of a transfer task have shown, kept on disk one by one.

    <cache_dir>/<hash of features, labels, classifier>/fits.json   {name: [numbers]}

An interrupted evaluation goes on with the fit it was at. Like the vectors of
``embedding_cache``, a folder is named by all that its contents depend on.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from sentence_t5 import whole_files

_FILE = "fits.json"


def kept_fits(
    cache_dir: str | os.PathLike | None,
    data: Sequence[tuple[np.ndarray, np.ndarray]],
    classifier: Mapping[str, Any],
) -> MutableMapping[str, Sequence[float]]:
    """Returns a mapping that writes itself to disk whenever something is added.

    Args:
        cache_dir: a local folder; None keeps nothing.
        data: features [n F] and labels [n] of each split.
        classifier: a JSON-able description of what is fitted.
    """
    if cache_dir is None:
        return {}
    digest = hashlib.sha256(json.dumps(classifier, sort_keys=True).encode())
    for features, labels in data:
        digest.update(json.dumps([features.shape, labels.tolist()]).encode())
        digest.update(np.ascontiguousarray(features).tobytes())
    folder = pathlib.Path(cache_dir) / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return _Kept(folder / _FILE)


class _Kept(dict):
    """A dict beside a file; one that a kill has cut off counts as empty."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        try:
            super().__init__(json.loads(path.read_text()))
        except (FileNotFoundError, ValueError):
            super().__init__()

    def __setitem__(self, name: str, numbers: Sequence[float]) -> None:
        super().__setitem__(name, numbers)
        whole_files.write(self._path, json.dumps(self).encode())
