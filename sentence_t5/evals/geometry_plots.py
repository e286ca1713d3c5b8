"""Geometry as a picture: alignment against uniformity, and singular values.

Draws entries of ``evaluate_geometry``, of one model and several files or of several
models and one file. Needs matplotlib: ``pip install 'sentence-t5[study]'``.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

_MARKERS = "os^Dv*Ph<>"
_LINES = ("-", "--", ":", "-.")
# Below it, singular values are float32's noise.
_SMALLEST = 1e-4


def check_installed() -> None:
    """Raises an ImportError that says what to install, where matplotlib is not."""
    figure_class()


def draw(
    path: str | os.PathLike,
    entries: Sequence[Mapping[str, Any]],
    hues: Sequence[str],
    shapes: Sequence[str] | None = None,
) -> None:
    """Writes a PNG of two panels.

    Args:
        path: the file.
        entries: what ``evaluate_geometry.make_entry`` returns; what is undefined in
            one is left out of its panel.
        hues: a word for each entry; equal words have one colour.
        shapes: the same for markers and kinds of line.
    """
    shapes = [""] * len(entries) if shapes is None else shapes
    colours = {word: f"C{i % 10}" for i, word in enumerate(dict.fromkeys(hues))}
    kinds = {word: i for i, word in enumerate(dict.fromkeys(shapes))}
    figure = figure_class()(figsize=(12, 4.8), layout="constrained")
    points, lines = figure.subplots(1, 2)
    for entry, hue, shape in zip(entries, hues, shapes, strict=True):
        colour, kind = colours[hue], kinds[shape]
        if entry["alignment"] is not None and entry["uniformity"] is not None:
            points.plot(
                entry["alignment"],
                entry["uniformity"],
                _MARKERS[kind % len(_MARKERS)],
                color=colour,
                markersize=8,
            )
        if entry["singular_values"] is not None:
            values = [v for v in entry["singular_values"] if v > _SMALLEST]
            style = _LINES[kind % len(_LINES)]
            lines.plot(range(1, len(values) + 1), values, style, color=colour)
    points.set(
        xlabel="alignment (less: pairs are nearer)",
        ylabel="uniformity (less: more even)",
        title="Alignment and uniformity",
    )
    lines.set(
        xscale="log",
        yscale="log",
        xlabel="principal axis",
        ylabel="standard deviation",
        title="Singular values",
    )
    for axes in (points, lines):
        axes.grid(alpha=0.3)
    figure.legend(handles=_keys(colours, kinds), loc="outside right upper")
    figure.savefig(path, dpi=120)


def _keys(colours: Mapping[str, str], kinds: Mapping[str, int]) -> list[Any]:
    """Returns the legend: a patch for each colour, a marker and line for each shape."""
    from matplotlib import lines

    keys = [
        lines.Line2D([], [], color=colour, linewidth=6, label=word)
        for word, colour in colours.items()
    ]
    if len(kinds) > 1:
        keys += [
            lines.Line2D(
                [],
                [],
                color="black",
                marker=_MARKERS[kind % len(_MARKERS)],
                linestyle=_LINES[kind % len(_LINES)],
                label=word,
            )
            for word, kind in kinds.items()
        ]
    return keys


def figure_class() -> type:
    """Returns matplotlib's figure, which draws without a display or global state.

    Raises:
        ImportError: matplotlib is not installed; the message says what to do.
    """
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError(
            "Plots take matplotlib: pip install 'sentence-t5[study]'."
        ) from error
    return figure.Figure
