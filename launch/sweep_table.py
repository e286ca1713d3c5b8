"""What the runs of a sweep have left on disk, as one table: CSV and Markdown.

Whether a run is done is read from its checkpoints, never from notes of the sweep's own;
scores and speed from its ``metrics.jsonl``.
"""

import csv
import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence

import sweep_plan

from sentence_t5 import checkpoint_files, metrics_file

DONE = "done"
NOT_STARTED = "not started"
_CONFIG_FILE = "config.gin"
_RATE = "train/pairs_per_second"
_LOSS = "train/loss"


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has left on disk.

    Attributes:
        step: of the newest whole checkpoint; None without one.
        loss: of the last report.
        pairs_per_second: median over the reports.
        scores: evaluation name -> last value; None where undefined.
        config: text of its ``config.gin``, or None.
    """

    step: int | None = None
    loss: float | None = None
    pairs_per_second: float | None = None
    scores: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    config: str | None = None


def read_progress(model_dir: str) -> Progress:
    """Reads a run's folder, which need not be there."""
    folder = checkpoint_files.absolute(model_dir)
    whole = checkpoint_files.whole_steps(folder)
    rates, losses, scores = [], [], {}
    for line in metrics_file.read(folder / metrics_file.NAME):
        rates += [line[_RATE]] if _RATE in line else []
        losses += [line[_LOSS]] if _LOSS in line else []
        scores |= metrics_file.evaluations(line)
    config = folder / _CONFIG_FILE
    return Progress(
        step=max(whole, default=None),
        loss=losses[-1] if losses else None,
        pairs_per_second=statistics.median(rates) if rates else None,
        scores=scores,
        config=config.read_text() if config.exists() else None,
    )


def state_of(step: int | None, total_steps: int) -> str:
    """Says in words how far a run is."""
    if step is None:
        return NOT_STARTED
    return DONE if step == total_steps else f"step {step} of {total_steps}"


def make_rows(
    runs: Sequence[sweep_plan.Run],
    progress: Sequence[Progress],
    failures: Mapping[str, str],
) -> list[dict[str, str]]:
    """Makes one row per run: its axes, state, size, speed and scores.

    Args:
        runs: the sweep's.
        progress: what is on disk of each.
        failures: run name -> what went wrong, of those that failed.
    """
    scores = list(dict.fromkeys(key for each in progress for key in each.scores))
    rows = []
    for run, found in zip(runs, progress, strict=True):
        state = state_of(found.step, run.total_steps)
        rows.append(
            {"run": run.name}
            | dict(run.values)
            | {
                "state": failures.get(run.name, state),
                "steps": str(found.step or 0),
                "parameters": str(run.num_params),
                "pairs/s": _rate(found.pairs_per_second),
                _LOSS: _number(found.loss, ".4f"),
            }
            | {key: _score(found.scores, key) for key in scores}
            | {"model_dir": run.model_dir}
        )
    return rows


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    """Writes a rate; a large model on a CPU may be below one pair a second."""
    return _number(value, ".0f" if value is None or value >= 10 else ".2g")


def _score(scores: Mapping[str, float | None], key: str) -> str:
    if key not in scores:
        return ""
    return "undefined" if scores[key] is None else f"{scores[key]:.2f}"


def to_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """Writes rows as CSV with a header line."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Writes rows as a Markdown table, numbers to the right, without the folders."""
    columns = [column for column in rows[0] if column != "model_dir"]
    cells = [[row[column].replace("|", r"\|") for column in columns] for row in rows]
    widths = [
        max(len(text) for text in texts)
        for texts in zip(columns, *cells, ["---"] * len(columns), strict=True)
    ]
    to_right = [all(_is_number(row[i]) for row in cells) for i in range(len(columns))]

    def line(texts):
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, to_right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - right) + ":" * right
        for width, right in zip(widths, to_right, strict=True)
    ]
    return "\n".join([line(columns), line(rule), *map(line, cells)]) + "\n"


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True
