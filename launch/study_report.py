"""From a study's models and reports to its page: what is compared with what."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import study_data
import study_instructed
import study_page
import study_papers
import study_plan
import study_plots
import study_record
import study_scores
import sweep_table
from study_scores import RETRIEVAL, STS, TRANSFER, Scored, cell

from sentence_t5.evals import geometry_plots

_STAGES = {
    study_plan.RAW: "raw",
    study_plan.NLI: "NLI",
    study_plan.CQA: "CQA",
    study_plan.CQA_NLI: "CQA, then NLI",
}
_ALL_STAGES = {
    **_STAGES,
    study_plan.EQUAL: "NLI, equal pairs",
    study_plan.INSTRUCTIONS: "instructions",
}
_WHAT = {
    STS: "Spearman × 100",
    TRANSFER: "accuracy",
    RETRIEVAL: "nDCG@10 × 100",
}
_Sections = list[study_page.Section]


def write(
    models: Sequence[study_plan.Model],
    reports: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
    files: study_data.Files | None,
    out: pathlib.Path,
) -> None:
    """Writes the page and its plots from what is on disk.

    Args:
        models: the study's.
        reports: name of a run -> its report, of those that have one.
        failures: name of a run -> what went wrong.
        files: of rows with instructions, or None.
        out: the study's folder.
    """
    rows = [
        Scored(
            model,
            reports.get(model.run.name),
            sweep_table.read_progress(model.run.model_dir),
            failures.get(model.run.name, ""),
        )
        for model in models
    ]
    sentence = [row for row in rows if row.model.stage != study_plan.INSTRUCTIONS]
    sections = [study_page.Section("What this is", _introduction(rows))]
    if sentence:
        sections += _poolings(sentence)
        sections += _stages(sentence)
        sections += _sizes(sentence, out)
        sections += _geometry(sentence, out)
    sections += _curves(rows, out)
    if files is not None:
        sections += study_instructed.sections(rows, files)
    if sentence:
        sections += _all_scores(sentence)
    trained, settings = study_record.trained(rows), study_record.settings(rows)
    sections.append(study_page.Section("What was trained", [trained]))
    sections.append(study_page.Section("Data and settings", settings))
    study_page.write("Sentence encoders: a study", sections, out)


def _introduction(rows: Sequence[Scored]) -> list[str]:
    given = rows[0].model.run.settings.get("INITIAL_CHECKPOINT_PATH", "None")
    start = "random weights" if given == "None" else f"the weights of {given}"
    missing = [row for row in rows if row.state != sweep_table.DONE]
    text = [
        f"{len(rows)} models, each trained here from {start} and scored by "
        "`sentence-t5 evaluate`. Scores are × 100. One seed each: on few pairs, "
        "differences of a point or two mean little. The papers' rows are there for "
        "their directions; their models began as T5 and saw up to billions of pairs. "
        + study_papers.LEGEND,
    ]
    is_raw_there = any(row.model.stage == study_plan.RAW for row in rows)
    if start == "random weights" and is_raw_there:
        text.append(
            "Raw models are random here, not T5: a row of `raw` says what pooling "
            "random features of the words gives."
        )
    if missing:
        names = ", ".join(f"{row.model.run.name} ({row.state})" for row in missing)
        text.append(f"*Incomplete*: {names}.")
    return text


def _poolings(rows: Sequence[Scored]) -> _Sections:
    """Compares the poolings at the first size."""
    size = rows[0].model.size
    names = list(dict.fromkeys(r.model.pooling for r in rows if r.model.size == size))
    blocks: list = []
    for metric in _metrics(rows):
        table = [
            {"pooling": name}
            | {
                label: cell(
                    study_scores.average(
                        study_scores.find(rows, stage=stage, size=size, pooling=name),
                        metric,
                    )
                )
                for stage, label in _present(rows).items()
            }
            for name in names
        ]
        blocks += [f"{metric}, {_WHAT[metric]}, mean over sets; size {size}.", table]
        blocks += _paper_table("pooling", "base", metric)
    return [study_page.Section("Which pooling?", blocks)]


def _paper_table(axis: str, size: str | None, metric: str) -> list:
    """Returns the papers' rows of one size, or of mean pooling, as a table."""
    if metric == RETRIEVAL:
        return []
    chosen = [
        row
        for row in study_papers.SENTENCE_T5
        if (row.size == size if size else row.pooling == "mean")
    ]
    table = []
    for name in dict.fromkeys(getattr(row, axis) for row in chosen):
        cells = {f"Ni et al., {axis}": name}
        for stage in (study_plan.RAW, study_plan.NLI, study_plan.CQA_NLI):
            found = [r for r in chosen if getattr(r, axis) == name and r.stage == stage]
            cells[_STAGES[stage]] = _paper_cell(found[0], metric) if found else ""
        table.append(cells)
    where = f"T5 {size}" if size else "mean pooling"
    return [f"In the paper, {where}, seven sets:", table]


def _paper_cell(row: study_papers.Row, metric: str) -> str:
    value, evidence = row.sts, row.sts_evidence
    if metric == TRANSFER:
        value, evidence = row.transfer, row.transfer_evidence
    return "" if value is None else f"{value} ({evidence})"


def _stages(rows: Sequence[Scored]) -> _Sections:
    """Compares the stages of each size and pooling."""
    blocks: list = []
    for metric in _metrics(rows):
        table = []
        for size, pooling in _columns(rows):
            raw, nli, both = (
                study_scores.average(
                    study_scores.find(rows, stage=stage, size=size, pooling=pooling),
                    metric,
                )
                for stage in (study_plan.RAW, study_plan.NLI, study_plan.CQA_NLI)
            )
            table.append(
                {
                    "size": size,
                    "pooling": pooling,
                    "raw": cell(raw),
                    "NLI": cell(nli),
                    "NLI − raw": _difference(nli, raw),
                    "CQA, then NLI": cell(both),
                    "CQA, then NLI − NLI": _difference(both, nli),
                }
            )
        blocks += [f"{metric}, {_WHAT[metric]}, mean over sets.", table]
    blocks.append(
        "In the paper (T5 base, mean): tuning on NLI raises STS from 55.97 to 81.92 "
        "(recalled) and lowers transfer from 88.96 to 88.66 (quoted); CQA, then NLI "
        "reaches 83.3 and 89.5 (authors)."
    )
    return [study_page.Section("Raw against tuned; NLI against CQA, then NLI", blocks)]


def _sizes(rows: Sequence[Scored], out: pathlib.Path) -> _Sections:
    """Compares the sizes at the first pooling."""
    pooling = rows[0].model.pooling
    rows = [row for row in rows if row.model.pooling == pooling]
    sizes = list(dict.fromkeys(row.model.size for row in rows))
    lines = {
        label: [row for row in rows if row.model.stage == stage]
        for stage, label in _present(rows).items()
    }
    if equal := _equal(rows):
        lines[_ALL_STAGES[study_plan.EQUAL]] = equal
    blocks: list = []
    for metric in _metrics(rows):
        table = []
        for size in sizes:
            first = study_scores.find(rows, size=size)
            cells = {"size": size, "parameters": f"{first.model.run.num_params:,}"}
            for label, of_stage in lines.items():
                row = study_scores.find(of_stage, size=size)
                score = study_scores.average(row, metric)
                known = score is not None
                cells[label] = f"{score:.2f} ({row.model.num_pairs:,})" if known else ""
            table.append(cells)
        blocks += [
            f"{metric}, {_WHAT[metric]}, mean over sets, and pairs seen; pooling "
            f"{pooling}. *Equal pairs*: NLI with as many pairs at every size.",
            table,
        ]
        name = f"scaling_{metric.split('@')[0].lower()}.png"
        if study_plots.scaling(out / name, lines, metric):
            blocks.append(study_page.Plot(name, f"{metric} against parameters"))
        blocks += _paper_table("size", None, metric)
    return [study_page.Section("What does size bring?", blocks)]


def _equal(rows: Sequence[Scored]) -> list[Scored]:
    """Returns the NLI models that saw as many pairs as the one that saw fewest."""
    nli = [row for row in rows if row.model.stage == study_plan.NLI]
    if len(nli) < 2:
        return []
    fewest = min(row.model.num_pairs for row in nli)
    again = [row for row in rows if row.model.stage == study_plan.EQUAL]
    return again + [row for row in nli if row.model.num_pairs == fewest]


def _geometry(rows: Sequence[Scored], out: pathlib.Path) -> _Sections:
    """Shows how the vectors of each model lie."""
    scored = [row for row in rows if row.report is not None]
    if not scored:
        return []
    entries = [row.report["geometry"][0] for row in scored]
    name = "geometry.png"
    geometry_plots.draw(
        out / name,
        entries,
        [_ALL_STAGES[row.model.stage] for row in scored],
        [f"{row.model.size} {row.model.pooling}" for row in scored],
    )
    table = [
        _name_cells(row)
        | {
            "alignment": cell(entry["alignment"], 3),
            "uniformity": cell(entry["uniformity"], 3),
            "mean cosine": cell(entry["average_cosine"], 3),
            "effective rank": cell(entry["effective_rank"], 1),
            "of": str(entry["embedding_dim"]),
        }
        for row, entry in zip(scored, entries, strict=True)
    ]
    first = entries[0]
    text = (
        f"Of the {first['texts']:,} distinct texts of {first['name']}, alignment over "
        f"its {first['positive_pairs']:,} pairs scored above "
        f"{first['positive_score']}. Less is better for both, together: a collapsed "
        "model is perfectly aligned."
    )
    plot = study_page.Plot(name, "Alignment, uniformity and singular values")
    blocks = [text, plot, table, study_papers.GEOMETRY]
    return [study_page.Section("How do the vectors lie?", blocks)]


def _curves(rows: Sequence[Scored], out: pathlib.Path) -> _Sections:
    """Shows loss and accuracy within the batch while training."""
    panels: dict[str, list] = {}
    for row in rows:
        model = row.model
        label = f"{model.size} {model.pooling}"
        if model.stage == study_plan.INSTRUCTIONS:
            label = f"{model.data}, {model.wording}"
        panels.setdefault(_ALL_STAGES[model.stage], []).append((label, row))
    blocks: list = [
        "Each point is a mean since the one before. Sizes with other batches have "
        "other losses: a larger batch is harder."
    ]
    for key, label in (
        ("train/loss", "loss"),
        ("train/accuracy", "accuracy in the batch"),
    ):
        name = f"curves_{label.split()[0]}.png"
        if study_plots.curves(out / name, panels, key, label):
            blocks.append(study_page.Plot(name, f"Training: {label}"))
    return [study_page.Section("Training curves", blocks)]


def _all_scores(rows: Sequence[Scored]) -> _Sections:
    """Lists every score of every set."""
    scored = [row for row in rows if row.report is not None]
    blocks: list = []
    for metric in _metrics(rows):
        table = [
            _name_cells(row)
            | {
                name: cell(value)
                for name, value in study_scores.by_set(row, metric).items()
            }
            | {"mean": cell(study_scores.average(row, metric))}
            for row in scored
        ]
        blocks += [f"{metric}, {_WHAT[metric]}.", table] if table else []
    notes = sorted(
        {
            f"{entry['name']}: {note}"
            for row in scored
            for part in ("sts", "transfer", "retrieval")
            for entry in row.report[part]
            for note in entry["notes"]
        }
    )
    blocks += [f"Notes: {' '.join(notes)}"] if notes else []
    return [study_page.Section("All scores", blocks)] if blocks else []


def _metrics(rows: Sequence[Scored]) -> list[str]:
    """Returns the metrics that any report has."""
    parts = {STS: "sts", TRANSFER: "transfer", RETRIEVAL: "retrieval"}
    return [
        metric
        for metric, part in parts.items()
        if any(row.report is not None and row.report[part] for row in rows)
    ]


def _present(rows: Sequence[Scored]) -> dict[str, str]:
    """Returns the stages that there are, with their names."""
    there = {row.model.stage for row in rows}
    return {stage: label for stage, label in _STAGES.items() if stage in there}


def _columns(rows: Sequence[Scored]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.model.size, row.model.pooling) for row in rows))


def _name_cells(row: Scored) -> dict[str, str]:
    model = row.model
    return {
        "trained on": _ALL_STAGES[model.stage],
        "size": model.size,
        "pooling": model.pooling,
    }


def _difference(value: float | None, before: float | None) -> str:
    if value is None or before is None:
        return ""
    return f"{value - before:+.2f}"
