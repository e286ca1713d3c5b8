"""MS MARCO passages: queries with relevant passages, the second stage of GTR.

    task      beir/msmarco from TFDS: pairs
    folder    a folder in BEIR's layout: pairs of every file of judgements
    triples   triples.train.*.tsv, without a header: query, relevant, other passage

GTR trains with hard negatives. The first two have none; `sentence-t5 mine` makes a file
of pairs with negatives out of a folder, which `tasks.files` reads.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import seqio

from sentence_t5 import names
from sentence_t5.tasks import beir_folder, files, prepared, records, text_pairs

BEIR_MSMARCO = "beir/msmarco:1.0.0"

# BEIR's names of splits -> SeqIO's.
_SPLITS = {"dev": "validation"}
_TRIPLE = ("query", "positive", "negative")


def task(
    vocabulary: seqio.Vocabulary,
    data_set: str = BEIR_MSMARCO,
    data_dir: str | None = None,
    name: str = "msmarco",
) -> seqio.Task:
    """Makes the task of the query-passage pairs in TFDS.

    TFDS joins by passage and keeps one query of each, so that it has fewer pairs than
    BEIR's own files.

    Args:
      vocabulary: turns texts into ids.
      data_set: another set of TFDS' `beir`, perhaps.
      data_dir: where TFDS keeps its data sets; its own default by default.
      name: the task's name.

    Returns:
      A SeqIO task with the set's splits of pairs, and inputs and targets.

    Raises:
      FileNotFoundError: the data set is not prepared; the command that does is named.
    """
    builder = prepared.builder(data_set, data_dir)

    def rows(split: str) -> Iterator[Mapping[str, Any]]:
        for row in prepared.rows(builder, split):
            # TFDS keeps judgements of 0, which say that a passage is not relevant.
            if row["score"] > 0:
                yield {
                    names.INPUTS: row["query"].decode(),
                    names.TARGETS: row["passage"].decode(),
                }

    # The splits `query` and `passage` hold one side only.
    pairs = [key for key in builder.info.splits if key not in ("query", "passage")]
    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: prepared.identity([builder], __file__),
        splits=tuple(pairs),
    )
    return text_pairs.task(name, source, vocabulary)


def folder(
    path: str, vocabulary: seqio.Vocabulary, name: str | None = None
) -> seqio.Task:
    """Makes the task of the relevant pairs in a folder of BEIR's layout.

    Args:
      path: the folder; see `beir_folder`.
      vocabulary: turns texts into ids.
      name: the task's name; from the folder's by default.

    Returns:
      A SeqIO task with a split for each file of judgements (`dev` is `validation`), and
      inputs and targets.

    Raises:
      FileNotFoundError: the folder has no judgements.
    """
    found = {_SPLITS.get(split, split): split for split in beir_folder.splits(path)}
    if not found:
        raise FileNotFoundError(
            f"There is no qrels/*.tsv in {path!r}. Set the task's `path` to a folder "
            "in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv."
        )

    def rows(split: str) -> Iterator[Mapping[str, Any]]:
        for pair in beir_folder.relevant_pairs(beir_folder.load(path, found[split])):
            yield {names.INPUTS: pair.query, names.TARGETS: pair.passage}

    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: {
            "source": "beir_folder",
            "contents": beir_folder.sha256(path, found[split]),
            "reader": text_pairs.source_sha256(__file__, beir_folder.__file__),
        },
        splits=tuple(found),
        streams=False,
    )
    return text_pairs.task(name or files.default_name("beir", path), source, vocabulary)


def triples(
    path: files.Paths, vocabulary: seqio.Vocabulary, name: str | None = None
) -> seqio.Task:
    """Makes the task of MS MARCO's own triples.

    Args:
      path: a TSV, or several, of a query, a relevant and another passage in each line,
        without a header.
      vocabulary: turns texts into ids.
      name: the task's name; from the file's by default.

    Returns:
      A SeqIO task with the split train, and inputs, targets and one negative each.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a bad line, with its number.
    """
    paths = [path] if isinstance(path, str) else list(path)
    for file in paths:
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"No file at {file!r}. Set the task's `path` to MS MARCO's triples."
            )

    def rows(split: str) -> Iterator[Mapping[str, Any]]:
        columns = files.Columns("query", "positive", ("negative",))
        for file in paths:
            yield from files.rows(records.Reader(file, header=_TRIPLE), columns)

    source = text_pairs.RowSource(
        rows=rows,
        identity=lambda split: {
            "source": "triples",
            "contents": [text_pairs.file_sha256(file) for file in paths],
            "reader": text_pairs.source_sha256(
                __file__, files.__file__, records.__file__
            ),
        },
        splits=("train",),
        negatives=True,
    )
    chosen = name or files.default_name("msmarco", path)
    return text_pairs.task(chosen, source, vocabulary)
