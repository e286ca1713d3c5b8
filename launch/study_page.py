"""A study's page: sections of text, tables and plots, as Markdown and as HTML.

The HTML holds its plots itself: one file to open or to send. The Markdown names them.
"""

import base64
import dataclasses
import html
import pathlib
import re
from collections.abc import Mapping, Sequence

import sweep_table

Table = Sequence[Mapping[str, str]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
h2 { margin-top: 2.5rem; }
.wide { overflow-x: auto; }
"""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of the page.

    Attributes:
        file: its name, in the page's folder.
        caption: what it shows.
    """

    file: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what is below it.

    Attributes:
        title: the heading.
        blocks: paragraphs (``*emphasis*`` and ``code`` as in Markdown), tables (a
            mapping from column to cell for each row, all with the same columns) and
            plots, in order.
    """

    title: str
    blocks: Sequence[str | Table | Plot]


def write(title: str, sections: Sequence[Section], folder: pathlib.Path) -> None:
    """Writes ``study.md`` and ``study.html``.

    Args:
        title: of the page.
        sections: what is on it.
        folder: where its plots are.
    """
    (folder / "study.md").write_text(to_markdown(title, sections), encoding="utf-8")
    text = to_html(title, sections, folder)
    (folder / "study.html").write_text(text, encoding="utf-8")


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Returns the page as Markdown."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(block)
            elif isinstance(block, Plot):
                parts.append(f"![{block.caption}]({block.file})")
            else:
                parts.append(sweep_table.to_markdown(block).rstrip())
    return "\n\n".join(parts) + "\n"


def to_html(title: str, sections: Sequence[Section], folder: pathlib.Path) -> str:
    """Returns the page as HTML that needs no other file.

    Args:
        title: of the page.
        sections: what is on it.
        folder: where its plots are.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(f"<p>{_inline(block)}</p>")
            elif isinstance(block, Plot):
                data = base64.b64encode((folder / block.file).read_bytes()).decode()
                caption = html.escape(block.caption)
                image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
                parts.append(image)
            else:
                parts.append(_table(block))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(rows: Table) -> str:
    """Returns a table; cells that are numbers end at the right."""
    columns = list(rows[0])
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = [f"<tr>{heads}</tr>"]
    for row in rows:
        cells = (
            f"<td{_class(row[column])}>{_inline(row[column])}</td>"
            for column in columns
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _class(cell: str) -> str:
    is_number = re.fullmatch(r"[-+−±]?[\d.,]+( .*)?", cell) is not None
    return ' class="number"' if is_number else ""


def _inline(text: str) -> str:
    """Returns a line of text with Markdown's emphasis and code as HTML."""
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)
