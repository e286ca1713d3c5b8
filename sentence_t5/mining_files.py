"""The files of ``mine``: pairs and corpora to read, lines to write and to go on with.

OUTPUT.work/lines.jsonl     finished lines     ─► OUTPUT (.jsonl or .jsonl.gz)
OUTPUT.work/progress.json   how far they reach, and with what settings
"""

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from sentence_t5 import mining, whole_files
from sentence_t5.tasks import beir_folder, records


@dataclasses.dataclass(frozen=True)
class Source:
    """What to mine for and in, with what identifies it.

    Attributes:
        pairs: known positives.
        corpus: texts to search; None: the positives.
        corpus_ids: their ids, or None.
        sha256: file, with the columns read -> hex digest.
    """

    pairs: Sequence[mining.RawPair]
    corpus: Sequence[str] | None
    corpus_ids: Sequence[str] | None
    sha256: dict[str, str]


def load_source(args: argparse.Namespace) -> Source:
    """Reads the pairs and the corpus that the flags name."""
    if args.beir:
        found = beir_folder.load(args.beir, args.split)
        pairs = [
            mining.RawPair(pair.query, pair.passage, pair.query_id, pair.passage_id)
            for pair in beir_folder.relevant_pairs(found)
        ]
        names = {f"{found.name}/{name}": v for name, v in found.sha256.items()}
        return Source(pairs, found.passages, found.passage_ids, names)
    pairs = [
        mining.RawPair(left, right)
        for left, right in _columns(args.pairs, (args.left, args.right))
    ]
    columns = f"{args.left}, {args.right}"
    name = f"{os.path.basename(args.pairs)} ({columns})"
    hashes = {name: whole_files.sha256(args.pairs)}
    corpus = None
    if args.corpus:
        corpus = [text for (text,) in _columns(args.corpus, (args.corpus_column,))]
        name = f"{os.path.basename(args.corpus)} ({args.corpus_column})"
        hashes[name] = whole_files.sha256(args.corpus)
    return Source(pairs, corpus, None, hashes)


def _columns(path: str, columns: Sequence[str]) -> Iterable[list[str]]:
    """Yields the texts of some columns of a TSV or JSONL file."""
    for where, row in records.Reader(path):
        for column in columns:
            if not isinstance(row.get(column), str):
                there = ", ".join(row)
                raise ValueError(
                    f"{where}: no text in column {column!r}; the columns are {there}. "
                    "Name them with --left and --right (--corpus_column for --corpus)."
                )
        yield [row[column] for column in columns]


class Lines:
    """The finished lines of an unfinished output, and how far they reach.

    Attributes:
        num_queries: queries whose lines are written.
        counts: pairs, negatives, and pairs with fewer negatives than asked, or none.
    """

    def __init__(self, work: pathlib.Path, settings: dict[str, Any]):
        """Opens the lines that an interrupted run left, or begins.

        Args:
            work: a folder for them alone.
            settings: what the lines depend on.

        Raises:
            ValueError: they were begun with other settings.
        """
        self._path = work / "lines.jsonl"
        self._progress = work / "progress.json"
        self._settings = settings
        self._wanted = settings["rules"]["num_negatives"]
        self.num_queries = 0
        self.counts = dict.fromkeys(("pairs", "negatives", "short", "without"), 0)
        size = 0
        if self._progress.exists():
            progress = json.loads(self._progress.read_text())
            if progress["settings"] != settings:
                raise ValueError(
                    f"{work} holds a run with other settings: "
                    f"{differences(progress['settings'], settings)}. Repeat its "
                    "command, remove the folder, or name another --output."
                )
            # A run killed while it moved its lines to their place has none left here.
            if self._path.exists() and self._path.stat().st_size >= progress["bytes"]:
                self.num_queries = progress["queries"]
                self.counts = progress["counts"]
                size = progress["bytes"]
        with open(self._path, "ab") as file:
            file.truncate(size)
        self._note(size)

    def add(self, rows: Iterable[dict[str, Any]], num_queries: int) -> None:
        """Writes lines, and then that those of so many queries are complete."""
        with open(self._path, "ab") as file:
            for row in rows:
                found = len(row["negatives"])
                self.counts["pairs"] += 1
                self.counts["negatives"] += found
                self.counts["short"] += found < self._wanted
                self.counts["without"] += not found
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        self.num_queries = num_queries
        self._note(size)

    def _note(self, size: int) -> None:
        progress = {
            "settings": self._settings,
            "queries": self.num_queries,
            "bytes": size,
            "counts": self.counts,
        }
        whole_files.write(self._progress, json.dumps(progress).encode())

    def finish(self, *, packed: bool) -> pathlib.Path:
        """Returns the file of all lines, gzipped if asked, to be moved to its place."""
        if not packed:
            return self._path
        target = self._path.with_suffix(".gz")
        with (
            open(self._path, "rb") as lines,
            open(target, "wb") as raw,
            # Without a name and a time: the same lines give the same file.
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
        ):
            shutil.copyfileobj(lines, file)
        return target


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> str:
    """Lists the settings that differ, for a message."""
    found = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and old != new:
            found.append(differences(old, new, f"{prefix}{name}."))
        elif old != new:
            found.append(f"{prefix}{name} was {old!r}, now {new!r}")
    return ", ".join(found)
