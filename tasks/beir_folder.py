"""Retrieval sets in BEIR's folder layout: a corpus, queries and judgements.

    corpus.jsonl      {"_id": "d1", "title": "...", "text": "..."}
    queries.jsonl     {"_id": "q1", "text": "..."}
    qrels/test.tsv    query-id  corpus-id  score

The JSONL files may be gzipped. A passage is its title, a space and its text, without
white space around, as BEIR's dense retrievers read it. TensorFlow is not imported here.

Source: Thakur et al. 2021 (arXiv 2104.08663).
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sentence_t5 import whole_files
from sentence_t5.tasks import records

_QRELS_COLUMNS = ("query-id", "corpus-id", "score")


@dataclasses.dataclass(frozen=True)
class Collection:
    """A retrieval set with the judgements of one split.

    Attributes:
        name: the folder's name.
        split: the name of the file of judgements.
        passage_ids: ids, in the order of the file.
        passages: their texts.
        query_ids: ids of the queries that have judgements, in the order of the file.
        queries: their texts.
        judgements: query id -> passage id -> grade; above 0 is relevant.
        sha256: file name -> hex digest.
    """

    name: str
    split: str
    passage_ids: Sequence[str]
    passages: Sequence[str]
    query_ids: Sequence[str]
    queries: Sequence[str]
    judgements: Mapping[str, Mapping[str, int]]
    sha256: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query with a passage that is relevant to it."""

    query: str
    passage: str
    query_id: str
    passage_id: str


def load(folder: str | os.PathLike, split: str = "test") -> Collection:
    """Reads a folder, checking every row.

    Args:
        folder: has corpus.jsonl, queries.jsonl (or .jsonl.gz) and qrels/.
        split: which file of qrels/.

    Returns:
        The set. Queries without a judgement in this split are left out.

    Raises:
        FileNotFoundError: a file is missing; the splits that are there are named.
        ValueError: a bad row, with file and line; an id twice; a judged query that is
            not among the queries.
    """
    folder = pathlib.Path(folder)
    corpus, queries, qrels = _find_all(folder, split)
    judgements = read_judgements(qrels)
    query_texts = _read_texts(queries)
    unknown = [query for query in judgements if query not in query_texts]
    if unknown:
        raise ValueError(
            f"{qrels}: {len(unknown)} of {len(judgements)} judged queries are not in "
            f"{queries.name}, first {unknown[0]!r}. The files are of different sets."
        )
    passages = _read_texts(corpus)
    judged = [query for query in query_texts if query in judgements]
    return Collection(
        name=folder.resolve().name,
        split=split,
        passage_ids=list(passages),
        passages=list(passages.values()),
        query_ids=judged,
        queries=[query_texts[query] for query in judged],
        judgements=judgements,
        sha256=sha256(folder, split),
    )


def relevant_pairs(collection: Collection) -> Iterator[Pair]:
    """Yields each query with each of its relevant passages that the corpus has.

    Queries come in the order of their file, a query's passages in that of the
    judgements.
    """
    texts = dict(zip(collection.passage_ids, collection.passages, strict=True))
    for query_id, query in zip(collection.query_ids, collection.queries, strict=True):
        for passage_id, grade in collection.judgements[query_id].items():
            if grade > 0 and passage_id in texts:
                yield Pair(query, texts[passage_id], query_id, passage_id)


def sha256(folder: str | os.PathLike, split: str) -> dict[str, str]:
    """Returns file name -> hex digest of the files that ``load`` reads."""
    return {
        path.relative_to(folder).as_posix(): whole_files.sha256(path)
        for path in _find_all(pathlib.Path(folder), split)
    }


def splits(folder: str | os.PathLike) -> list[str]:
    """Returns the splits that a folder has judgements for."""
    return sorted(path.stem for path in pathlib.Path(folder, "qrels").glob("*.tsv"))


def read_judgements(path: str | os.PathLike) -> dict[str, dict[str, int]]:
    """Reads a file of judgements: query id -> passage id -> grade.

    Raises:
        ValueError: another header, a grade that is no whole number, a pair twice.
    """
    reader = records.Reader(str(path))
    header = reader.columns()
    if header != list(_QRELS_COLUMNS):
        raise ValueError(
            f"{path}, line 1: expected the header {' '.join(_QRELS_COLUMNS)} between "
            f"tabs, got {' '.join(header)}."
        )
    judgements: dict[str, dict[str, int]] = {}
    for where, row in reader:
        query, passage, grade = (row[name] for name in _QRELS_COLUMNS)
        try:
            number = int(grade)
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: the score is {grade!r}, expected a whole number."
            ) from None
        of_query = judgements.setdefault(query, {})
        if of_query.setdefault(passage, number) != number:
            raise ValueError(
                f"{where}: query {query!r} has passage {passage!r} judged twice, "
                f"{of_query[passage]} and {number}. Remove one."
            )
    if not judgements:
        raise ValueError(f"{path}: 0 judgements; expected a header and rows.")
    return judgements


def _find_all(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """Returns the files of the corpus, the queries and a split's judgements."""
    qrels = folder / "qrels" / f"{split}.tsv"
    texts = [_find(folder, name) for name in ("corpus", "queries")]
    if not qrels.is_file():
        raise FileNotFoundError(
            f"There is no {qrels}. Splits with judgements in {folder}: "
            f"{', '.join(splits(folder)) or 'none'}."
        )
    return [*texts, qrels]


def _find(folder: pathlib.Path, stem: str) -> pathlib.Path:
    for name in (f"{stem}.jsonl", f"{stem}.jsonl.gz"):
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}. Expected one in BEIR's layout, which is not "
            "downloaded by itself (docs/reproduce.md, Data)."
        )
    raise FileNotFoundError(
        f"There is no {stem}.jsonl in {folder}. Expected BEIR's layout: corpus.jsonl, "
        "queries.jsonl and qrels/<split>.tsv."
    )


def _read_texts(path: pathlib.Path) -> dict[str, str]:
    """Reads id -> text of a corpus or of queries."""
    texts: dict[str, str] = {}
    for where, row in records.Reader(str(path)):
        key = row.get("_id")
        if not isinstance(key, str | int) or key == "":
            raise ValueError(f"{where}: no '_id'; the fields are {list(row)}.")
        if str(key) in texts:
            raise ValueError(f"{where}: the id {key!r} occurs twice.")
        parts = [_part(where, row, name) for name in ("title", "text")]
        texts[str(key)] = " ".join(parts).strip()
    if not texts:
        raise ValueError(f"{path}: 0 rows.")
    return texts


def _part(where: str, row: Mapping[str, Any], name: str) -> str:
    """Returns a title, which may be missing or null, or a text."""
    value = row.get(name)
    if value is None and name == "title":
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name!r} must be a text, got {value!r}.")
    return value
