"""Questions with their answers from TFDS: the first stage of Sentence-T5 and GTR.

Their corpus (about two billion pairs of community forums) is not public;
docs/reproduce.md names public ones. Pairs in local TSV or JSONL files are what
`tasks.files` reads: `gin/recipes/st5_stage1_cqa.gin` starts from those.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import seqio

from sentence_t5 import names
from sentence_t5.tasks import prepared, text_pairs


def task(
    data_set: str,
    vocabulary: seqio.Vocabulary,
    left: str = "question",
    right: str = "answer",
    data_dir: str | None = None,
    name: str = "community_qa",
) -> seqio.Task:
    """Makes the task of the pairs in a prepared TFDS data set.

    Args:
      data_set: a TFDS name with its version, such as `my_forum:1.0.0`.
      vocabulary: turns texts into ids.
      left: the feature that holds the question.
      right: the feature that holds the answer.
      data_dir: where TFDS keeps its data sets; its own default by default.
      name: the task's name.

    Returns:
      A SeqIO task with the splits of the data set, and inputs and targets.

    Raises:
      FileNotFoundError: the data set is not prepared; the command that does is named.
      ValueError: it lacks a feature (those that it has are listed).
    """
    builder = prepared.builder(data_set, data_dir)
    prepared.check_features(builder, (left, right))

    def rows(split: str) -> Iterator[Mapping[str, Any]]:
        for row in prepared.rows(builder, split):
            yield {
                names.INPUTS: row[left].decode(),
                names.TARGETS: row[right].decode(),
            }

    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: {
            **prepared.identity([builder], __file__),
            "columns": [left, right],
        },
        splits=tuple(builder.info.splits),
    )
    return text_pairs.task(name, source, vocabulary)
