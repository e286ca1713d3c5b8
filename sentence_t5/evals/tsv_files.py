"""TSV files of texts with labels or scores: UTF-8, a header, no quoting."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """What one file holds.

    Attributes:
        path: the file, as errors name it.
        header: names of the columns.
        rows: their values, as many in each row; row ``i`` is line ``i + 2``.
        sha256: hex digest of the file.
    """

    path: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sha256: str

    def column(self, index: int) -> tuple[str, ...]:
        """Returns one column's values."""
        return tuple(row[index] for row in self.rows)

    def find(self, names: Sequence[str]) -> int | None:
        """Returns the first column with one of these lower-case names, or None."""
        lower = [cell.strip().lower() for cell in self.header]
        return next((lower.index(name) for name in names if name in lower), None)


def read(path: str | os.PathLike, row_name: str = "row") -> Table:
    """Reads a file.

    Args:
        path: the file; a byte order mark and Windows line ends are taken off.
        row_name: what errors call a row.

    Returns:
        Its rows.

    Raises:
        ValueError: no rows, a line that is not UTF-8 or with too few or too many
            fields; it is named.
    """
    with open(path, "rb") as file:
        content = file.read()
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    if len(rows) < 2:
        raise ValueError(
            f"{path}: 0 rows; expected a header and at least one {row_name}."
        )
    header = rows[0]
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {number}: got {len(row)} fields, the header has "
                f"{len(header)}."
            )
    return Table(
        os.fspath(path), header, tuple(rows[1:]), hashlib.sha256(content).hexdigest()
    )


def _decode(path: str | os.PathLike, number: int, line: bytes) -> tuple[str, ...]:
    """Splits one line into fields."""
    try:
        return tuple(line.removesuffix(b"\r").decode("utf-8").split("\t"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: byte {error.start} is not UTF-8 "
            f"(0x{line[error.start]:02x}). Convert the file to UTF-8."
        ) from error
