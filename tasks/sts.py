"""Semantic textual similarity: sentence pairs with a score, from TSVs or from TFDS.

A task gives `inputs`, `targets` and float `scores`. Local files are what `tasks.files`
reads, with the columns of the common STS TSVs by default.
"""

from collections.abc import Iterator, Mapping

import seqio

from sentence_t5 import names
from sentence_t5.tasks import files, prepared, text_pairs

STSB = "glue/stsb:2.0.0"


def task(
    path: files.Paths | Mapping[str, files.Paths],
    vocabulary: seqio.Vocabulary,
    left: str = "sentence1",
    right: str = "sentence2",
    score: str = "score",
    subset_column: str | None = None,
    subset: str | None = None,
    on_missing: files.OnMissing = "error",
    errors: files.Errors = "strict",
    name: str | None = None,
) -> seqio.Task:
    """Makes a task of scored sentence pairs from local TSV or JSONL files.

    Args:
      path: a file, or several, for the split "validation"; or a mapping from split to
        files.
      vocabulary: turns texts into ids.
      left: the column of the left sentences.
      right: the column of the right sentences.
      score: the column of the scores.
      subset_column: the column that names a row's subset, if `subset` is given.
      subset: keeps only the rows of this subset.
      on_missing: see `files.task`.
      errors: see `files.task`.
      name: the task's name; from the file's name by default.

    Returns:
      A SeqIO task with inputs, targets and scores.
    """
    if (subset is None) != (subset_column is None):
        raise ValueError(
            f"subset and subset_column go together, got subset={subset!r} and "
            f"subset_column={subset_column!r}."
        )
    columns = files.Columns(
        left, right, score=score, subset=subset_column, only_subset=subset
    )
    source = files.make_source(path, columns, "validation", on_missing, errors)
    return text_pairs.task(name or files.default_name("sts", path), source, vocabulary)


def stsb(
    vocabulary: seqio.Vocabulary, data_dir: str | None = None, name: str = "stsb"
) -> seqio.Task:
    """Makes the STS benchmark's task from TFDS `glue/stsb:2.0.0`.

    Args:
      vocabulary: turns texts into ids.
      data_dir: where TFDS keeps its data sets; its own default by default.
      name: the task's name.

    Returns:
      A SeqIO task with splits train and validation (GLUE hides the test scores).

    Raises:
      FileNotFoundError: the data set is not prepared; the command that does is named.
    """
    builder = prepared.builder(STSB, data_dir)

    def rows(split: str) -> Iterator[Mapping[str, object]]:
        for row in prepared.rows(builder, split):
            yield {
                names.INPUTS: row["sentence1"].decode(),
                names.TARGETS: row["sentence2"].decode(),
                names.SCORES: float(row["label"]),
            }

    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: prepared.identity([builder], __file__),
        splits=("train", "validation"),
        scores=True,
    )
    return text_pairs.task(name, source, vocabulary)
