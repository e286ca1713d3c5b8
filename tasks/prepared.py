"""Opens TFDS data sets that are already on disk, and says how to put them there.

TFDS retries the network for minutes when a set is not prepared; nothing here downloads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from sentence_t5.tasks import text_pairs


def builder(name: str, data_dir: str | None = None) -> tfds.core.DatasetBuilder:
    """Opens a prepared data set.

    Args:
      name: with its version, such as `snli:1.1.0`.
      data_dir: where TFDS keeps its data sets; its own default by default.

    Returns:
      The builder, ready to read.

    Raises:
      FileNotFoundError: the set is not prepared.
    """
    found = tfds.builder(name, data_dir=data_dir)
    if found.is_prepared():
        return found
    where = "" if data_dir is None else f", data_dir={data_dir!r}"
    raise FileNotFoundError(
        f"The data set {name!r} is not prepared in {found.data_path}. Prepare it once "
        f'(this downloads it):\n  python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}'{where}).download_and_prepare()\"\n"
        "or set the task's data_dir to where it is."
    )


def check_features(source: tfds.core.DatasetBuilder, names: Sequence[str]) -> None:
    """Checks that a data set has features of these names.

    Raises:
      ValueError: it lacks one; those that it has are listed.
    """
    missing = [name for name in names if name not in source.info.features]
    if missing:
        raise ValueError(
            f"The data set {source.info.full_name!r} has no feature "
            f"{', '.join(map(repr, missing))}; it has {sorted(source.info.features)}. "
            "Name the features in the task."
        )


def rows(source: tfds.core.DatasetBuilder, split: str) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a split as numpy, always in the same order."""
    dataset = source.as_dataset(split=split, shuffle_files=False)
    for block in tfds.as_numpy(dataset.batch(text_pairs.BLOCK_ROWS)):
        for values in zip(*block.values(), strict=True):
            yield dict(zip(block, values, strict=True))


def identity(
    sources: Sequence[tfds.core.DatasetBuilder], *code: str
) -> Mapping[str, Any]:
    """Describes data sets, and the files of code that read them, for a `RowSource`."""
    return {
        "tfds": [source.info.full_name for source in sources],
        "sizes": [
            {name: split.num_examples for name, split in source.info.splits.items()}
            for source in sources
        ],
        "folders": [str(source.data_path) for source in sources],
        "code": text_pairs.source_sha256(*code),
    }
