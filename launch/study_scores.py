"""Reads a study's numbers: of a model's report, and of its training's metrics."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import study_plan
import sweep_table

from sentence_t5 import checkpoint_files, evaluate_instructions, metrics_file

STS, TRANSFER, RETRIEVAL = "STS", "transfer", "nDCG@10"


@dataclasses.dataclass(frozen=True)
class Scored:
    """A model of the study and what is known of it.

    Attributes:
        model: how it is trained and scored.
        report: of `sentence-t5 evaluate`, or None.
        progress: of its training, read from its folder.
        failure: what went wrong, or "".
    """

    model: study_plan.Model
    report: Mapping[str, Any] | None
    progress: sweep_table.Progress
    failure: str = ""

    @property
    def state(self) -> str:
        """What is missing, or "done"."""
        total = self.model.run.total_steps
        state = self.failure or sweep_table.state_of(self.progress.step, total)
        if state == sweep_table.DONE and self.report is None:
            return "not scored"
        return state


def find(rows: Sequence[Scored], **wanted: str) -> Scored | None:
    """Returns the model with these attributes, or None.

    Args:
        rows: all models.
        **wanted: names of attributes of ``study_plan.Model``, and values.
    """
    for row in rows:
        if all(getattr(row.model, key) == value for key, value in wanted.items()):
            return row
    return None


def average(row: Scored | None, metric: str) -> float | None:
    """Returns a model's mean over sets, × 100; None if it is unknown or undefined.

    Args:
        row: the model, or None.
        metric: STS, TRANSFER or RETRIEVAL.
    """
    if row is None or row.report is None:
        return None
    values = list(by_set(row, metric).values())
    if not values or None in values:
        return None
    return statistics.fmean(values)


def by_set(row: Scored, metric: str) -> dict[str, float | None]:
    """Returns a model's score of each set, × 100.

    STS: Spearman over all pairs. Transfer: accuracy.
    """
    report = row.report
    if metric == STS:
        return {entry["name"]: entry["all"]["spearman"] for entry in report["sts"]}
    if metric == TRANSFER:
        return {entry["name"]: entry["accuracy"] for entry in report["transfer"]}
    return {
        entry["name"]: 100 * entry["scores"]["ndcg@10"] for entry in report["retrieval"]
    }


def instructed(
    row: Scored | None, held_out: str, tasks: Sequence[str]
) -> dict[str, float | None]:
    """Returns a model's scores over the held-out rows of some tasks, × 100.

    Args:
        row: the model, or None.
        held_out: name of a file of held-out rows, without folder and ending.
        tasks: their task_ids.

    Returns:
        "pairs" and "retrieval"; None where unknown.
    """
    if row is not None and row.report is not None:
        for entry in row.report["instructions"]:
            if entry["name"] == held_out:
                found = {t: entry["tasks"][t] for t in tasks if t in entry["tasks"]}
                return evaluate_instructions.mean(found)
    return {"pairs": None, "retrieval": None}


def curve(row: Scored, key: str) -> tuple[list[int], list[float]]:
    """Returns pairs seen so far and a value of the training's reports.

    Args:
        row: the model.
        key: such as "train/loss".
    """
    folder = checkpoint_files.absolute(row.model.run.model_dir)
    lines = [
        line for line in metrics_file.read(folder / metrics_file.NAME) if key in line
    ]
    batch = study_plan.batch_size(row.model.run)
    return [line["step"] * batch for line in lines], [line[key] for line in lines]


def cell(value: float | None, digits: int = 2) -> str:
    """Returns a number as a table shows it; nothing for None."""
    return "" if value is None else f"{value:.{digits}f}"
