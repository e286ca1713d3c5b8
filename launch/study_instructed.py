"""The part of a study's page about instructions: INSTRUCTOR's three ablations."""

from collections.abc import Sequence

import study_data
import study_page
import study_papers
import study_plan
import study_scores
import study_wordings
from study_scores import Scored, cell


def sections(
    rows: Sequence[Scored], files: study_data.Files
) -> list[study_page.Section]:
    """Shows INSTRUCTOR's three ablations."""
    rows = [row for row in rows if row.model.stage == study_plan.INSTRUCTIONS]
    kinds = [k for k in (study_data.SYMMETRIC, study_data.ASYMMETRIC) if files.tasks(k)]
    about = (
        "Held-out rows, scored within their tasks: *pairs*, the share of queries "
        "nearer to their right text than to their hard negative; *retrieval*, the mean "
        "reciprocal rank of the right text among the task's, for tasks with one right "
        "text. Means over rows, × 100. A task is asymmetric if most of its rows have "
        f"another instruction on each side. Size {rows[0].model.size}, mean pooling "
        "over the text alone. Models without instructions are scored without. "
    )
    about += "; ".join(_count(files, kind) for kind in kinds) + "."
    ablation = [
        {"trained on": row.model.data, "instructions": _yes(row.model.wording)}
        | _scores_by_kind(row, row.model.wording, files, kinds)
        for row in rows
        if row.model.wording in (study_data.NONE, study_data.DETAILED)
    ]
    detail = [
        {"instruction": wording}
        | _scores_by_kind(_mixed(rows, wording), wording, files, kinds)
        for wording in study_data.DETAILS
    ]
    blocks_of_detail = [
        "Trained on all data and scored with the same wording: *detailed* is the "
        "file's own, *short* names the kind of text alone, *tag* is the task's name.",
        detail,
        study_papers.INSTRUCTOR["detail"],
    ]
    return [
        study_page.Section(
            "With and without instructions",
            [
                about,
                ablation,
                study_papers.INSTRUCTOR["with"],
                study_papers.SIZES_OF_INSTRUCTOR,
            ],
        ),
        study_page.Section("How detailed an instruction?", blocks_of_detail),
        study_page.Section("Paraphrased instructions", _paraphrases(rows, files)),
    ]


def _count(files: study_data.Files, kind: str) -> str:
    """Says how many tasks and rows of a kind there are."""
    tasks = files.tasks(kind)
    train, held_out = (
        sum(rows.get(task, 0) for task in tasks)
        for rows in (files.train_rows, files.held_out_rows)
    )
    return (
        f"{kind}: {len(tasks)} of the tasks, {train:,} rows to train on, {held_out:,} "
        "held out"
    )


def _paraphrases(rows: Sequence[Scored], files: study_data.Files) -> list:
    """Compares models by how much the wording of instructions matters to them."""
    tasks = list(files.kinds)
    blocks: list = [
        "Two models trained on all data, one with the file's own instructions, one "
        f"with each row's in one of {1 + len(study_wordings.TRAINED_PARAPHRASES)} "
        "wordings; both scored with the file's own and with "
        f"{len(study_data.PARAPHRASED)} others that neither was trained on."
    ]
    for metric in ("pairs", "retrieval"):
        table = []
        for wording, label in (
            (study_data.DETAILED, "one wording"),
            (study_data.VARIED, "varied wordings"),
        ):
            row = _mixed(rows, wording)
            own, *others = (
                study_scores.instructed(row, f"held_out.{name}", tasks)[metric]
                for name in (study_data.DETAILED, *study_data.PARAPHRASED)
            )
            cells = {f"{metric}; trained on": label, "own wording": cell(own)}
            cells |= {str(i + 1): cell(value) for i, value in enumerate(others)}
            known = None not in others
            cells |= {
                "worst": cell(min(others) if known else None),
                "best": cell(max(others) if known else None),
                "gap": cell(max(others) - min(others) if known else None),
            }
            table.append(cells)
        blocks.append(table)
    forms = "; ".join(
        f"{i + 1} `{form}`" for i, form in enumerate(study_wordings.PARAPHRASES)
    )
    blocks.append(f"The paraphrases: {forms}.")
    if files.num_kept:
        blocks.append(
            f"{files.num_kept:,} of {files.num_instructions:,} instructions don't have "
            "the form `Represent the ... for ...:`; they stay as they are."
        )
    return [*blocks, study_papers.INSTRUCTOR["paraphrases"]]


def _mixed(rows: Sequence[Scored], wording: str) -> Scored | None:
    return study_scores.find(rows, data=study_data.MIXED, wording=wording)


def _yes(wording: str) -> str:
    return "without" if wording == study_data.NONE else "with"


def _scores_by_kind(
    row: Scored | None, wording: str, files: study_data.Files, kinds: Sequence[str]
) -> dict[str, str]:
    """Returns both scores on each kind of held-out rows and on all."""
    cells = {}
    for kind in (*kinds, study_data.MIXED):
        found = study_scores.instructed(row, f"held_out.{wording}", files.tasks(kind))
        where = "all" if kind == study_data.MIXED else kind
        cells |= {f"{where}: {key}": cell(value) for key, value in found.items()}
    return cells
