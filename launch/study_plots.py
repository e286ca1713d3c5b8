"""A study's plots of size and of training; geometry has the package's own."""

import pathlib
from collections.abc import Mapping, Sequence

import study_scores

from sentence_t5.evals import geometry_plots

_MARKERS = "os^Dv*"


def scaling(
    path: pathlib.Path,
    lines: Mapping[str, Sequence[study_scores.Scored]],
    metric: str,
) -> bool:
    """Draws scores against parameters.

    Args:
        path: the PNG.
        lines: name in the legend -> models of several sizes.
        metric: of ``study_scores.average``.

    Returns:
        Whether there was anything to draw.
    """
    figure_class = geometry_plots.figure_class()
    plot = figure_class(figsize=(8.5, 4.5), layout="constrained")
    axes = plot.subplots()
    sizes: dict[str, int] = {}
    for i, (label, rows) in enumerate(lines.items()):
        points = [
            (row.model, score)
            for row in rows
            if (score := study_scores.average(row, metric)) is not None
        ]
        if not points:
            continue
        points.sort(key=lambda point: point[0].run.num_params)
        # Raw models lack the projection: one tick for a size, at its largest model.
        for model, _ in points:
            sizes[model.size] = max(sizes.get(model.size, 0), model.run.num_params)
        pairs = " / ".join(f"{model.num_pairs:,}" for model, _ in points)
        axes.plot(
            [model.run.num_params for model, _ in points],
            [score for _, score in points],
            _MARKERS[i % len(_MARKERS)] + "-",
            label=f"{label}\n({pairs} pairs)",
        )
    if not sizes:
        return False
    axes.set(xscale="log", xlabel="parameters", ylabel=f"{metric}, mean over sets")
    axes.set_xticks(
        list(sizes.values()), [f"{size}\n{n / 1e6:.1f} M" for size, n in sizes.items()]
    )
    axes.minorticks_off()
    axes.margins(x=0.15, y=0.1)
    axes.grid(alpha=0.3)
    plot.legend(loc="outside right upper")
    plot.savefig(path, dpi=120)
    return True


def curves(
    path: pathlib.Path,
    panels: Mapping[str, Sequence[tuple[str, study_scores.Scored]]],
    key: str,
    label: str,
) -> bool:
    """Draws a value of training against the pairs seen, a panel for each stage.

    Args:
        path: the PNG.
        panels: title -> lines: a label and a model each. Models of no steps are left
            out.
        key: the value's name in ``metrics.jsonl``.
        label: its name on the plot.

    Returns:
        Whether there was anything to draw.
    """
    found = {}
    for title, lines in panels.items():
        values = [(name, study_scores.curve(row, key)) for name, row in lines]
        values = [(name, curve) for name, curve in values if curve[0]]
        if values:
            found[title] = values
    if not found:
        return False
    columns = min(3, len(found))
    num_rows = -(-len(found) // columns)
    figure_class = geometry_plots.figure_class()
    size = (4.6 * columns, 4.4 * num_rows)
    plot = figure_class(figsize=size, layout="constrained")
    grid = list(plot.subplots(num_rows, columns, squeeze=False).flat)
    for axes, (title, lines) in zip(grid, found.items(), strict=False):
        for name, (pairs, values) in lines:
            axes.plot(pairs, values, label=name)
        axes.set(title=title, xlabel="pairs seen", ylabel=label)
        axes.locator_params(axis="x", nbins=5)
        # Below the panel: nine lines leave no room inside.
        axes.legend(
            fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2
        )
        axes.grid(alpha=0.3)
    for axes in grid[len(found) :]:
        axes.remove()
    plot.savefig(path, dpi=110)
    return True
