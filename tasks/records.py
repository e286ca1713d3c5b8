"""Reads TSV and JSONL files as records, each with the file and line it came from.

Files are read as bytes and decoded as UTF-8, whatever the machine's locale is. TSVs
have a header; their cells are taken as they are, without quoting or escapes, and an
empty cell is None. The lines of a JSONL are objects, or arrays, whose values are named
"0", "1" and so on.
"""

import contextlib
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

from etils import epath

Errors = Literal["strict", "replace"]
TSV = "tsv"
JSONL = "jsonl"


class Reader:
    """The records of one file.

    Attributes:
      path: the file.
      num_repaired: lines read so far that held bytes that are not UTF-8.
    """

    def __init__(
        self,
        path: str,
        errors: Errors = "strict",
        header: Sequence[str] | None = None,
    ):
        """Opens nothing yet.

        Args:
          path: ends in .tsv, .jsonl or .json, then optionally .gz; `tf.io.gfile` reads
            what is not local.
          errors: "strict", or "replace" bytes that are not UTF-8 by U+FFFD.
          header: names of the columns of a TSV whose first line is data.
        """
        self.path = path
        self._header = list(header or ())
        self.num_repaired = 0
        self._errors = errors

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields ("file, line n", {column: value}).

        Raises:
          ValueError: a line cannot be read, with file and line number.
        """
        if file_format(self.path) == TSV:
            return self._tsv()
        return self._jsonl()

    def columns(self) -> list[str]:
        """Returns the columns of the header, or the fields of the first object."""
        if self._header:
            return self._header
        if file_format(self.path) == TSV:
            for _, text in self._lines():
                return text.split("\t")
        for _, record in self._jsonl():
            return list(record)
        raise ValueError(f"{self.path}: the file is empty.")

    def places(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yields (line number, offset of the line, record), to be `picked` again.

        Raises:
          ValueError: a line cannot be read, or the file is no JSONL.
        """
        if file_format(self.path) != JSONL:
            raise ValueError(f"{self.path}: expected a JSONL file.")
        offset = 0
        with self._opened() as file:
            for number, line in enumerate(file, start=1):
                yield number, offset, self._record(self._where(number), line, offset)
                offset += len(line)

    def picked(
        self, places: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields ("file, line n", record) for some lines of a JSONL file.

        Args:
          places: (line number, offset) of lines, in the order of the file.
        """
        with self._opened() as file:
            for number, offset in places:
                file.seek(offset)
                where = self._where(number)
                yield where, self._record(where, file.readline(), offset)

    def _record(self, where: str, line: bytes, offset: int) -> Mapping[str, Any]:
        return _parse(where, self._decode(where, line, offset))

    def _tsv(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        header = self._header
        for where, text in self._lines():
            cells = text.split("\t")
            if not header:
                header = cells
                continue
            if not text and len(header) > 1:
                raise ValueError(f"{where}: the line is empty. Remove it.")
            if len(cells) != len(header):
                expected = "expected" if self._header else "but the header has"
                raise ValueError(
                    f"{where}: {len(cells)} cells, {expected} {len(header)} "
                    f"({', '.join(header)}). Look for a tab or a line break inside a "
                    "text."
                )
            values = (cell or None for cell in cells)
            yield where, dict(zip(header, values, strict=True))

    def _jsonl(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for where, text in self._lines():
            yield where, _parse(where, text)

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yields ("file, line n", text without its line end)."""
        offset = 0
        with self._opened() as file:
            for number, line in enumerate(file, start=1):
                where = self._where(number)
                yield where, self._decode(where, line, offset)
                offset += len(line)

    def _where(self, number: int) -> str:
        return f"{self.path}, line {number}"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """Opens the file, unpacked."""
        with _open(self.path) as raw:
            yield gzip.GzipFile(fileobj=raw) if self.path.endswith(".gz") else raw

    def _decode(self, where: str, line: bytes, offset: int) -> str:
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        mark = 3 if offset == 0 and body.startswith(b"\xef\xbb\xbf") else 0
        try:
            return body[mark:].decode("utf-8")
        except UnicodeDecodeError as error:
            if self._errors == "replace":
                self.num_repaired += 1
                return body[mark:].decode("utf-8", errors="replace")
            place = mark + error.start
            raise ValueError(
                f"{where}: byte {body[place]:#04x} at offset {offset + place} of the "
                f"file (byte {place + 1} of the line) is not UTF-8. Convert the file, "
                'or set errors="replace".'
            ) from None


def _parse(where: str, text: str) -> Mapping[str, Any]:
    """Reads a line of JSON as a record."""
    if not text.strip():
        raise ValueError(f"{where}: the line is empty. Remove it.")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None
    if isinstance(record, list):
        record = {str(i): value for i, value in enumerate(record)}
    if not isinstance(record, dict):
        raise ValueError(
            f"{where}: expected a JSON object or array, got {type(record).__name__}."
        )
    return record


def file_format(path: str) -> str:
    """Returns TSV or JSONL from a file's name."""
    name = path.removesuffix(".gz")
    if name.endswith(".tsv"):
        return TSV
    if name.endswith((".jsonl", ".json")):
        return JSONL
    raise ValueError(
        f"{path}: cannot tell the format. Its name must end in .tsv, .jsonl or .json, "
        "then optionally .gz."
    )


def _open(path: str) -> IO[bytes]:
    return epath.Path(path).open("rb") if "://" in path else open(path, "rb")
