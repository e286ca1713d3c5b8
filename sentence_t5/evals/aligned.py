"""Tables for a terminal: cells padded to columns, two spaces between them."""

from collections.abc import Collection, Sequence


def lines(rows: Sequence[Sequence[str]], to_left: Collection[int] = (0,)) -> list[str]:
    """Returns one line for each row.

    Args:
        rows: cells, the same number in each row, the headings among them.
        to_left: columns of words; the others, of numbers, end where the widest does.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in to_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
