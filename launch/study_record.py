"""The part of a study's page that makes it believable: what was trained, on what."""

import ast
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import study_page
from study_scores import Scored, cell

from sentence_t5 import whole_files
from sentence_t5.tasks import records


def trained(rows: Sequence[Scored]) -> study_page.Table:
    """Lists every model with what its training took."""
    return [
        {
            "model": row.model.run.name,
            "state": row.state,
            "parameters": f"{row.model.run.num_params:,}",
            "steps": str(row.progress.step or 0),
            "pairs seen": f"{row.model.num_pairs:,}",
            "pairs/s": cell(row.progress.pairs_per_second, 0),
            "last loss": cell(row.progress.loss, 3),
            "peak rate": row.model.run.settings.get("LEARNING_RATE", ""),
            "batch": row.model.run.settings["BATCH_SIZE"],
            "tokens": row.model.run.settings["MAX_LENGTH"],
        }
        for row in rows
    ]


def settings(rows: Sequence[Scored]) -> list:
    """Lists files with rows and hashes, and what all models were scored with."""
    files: dict[str, dict[str, str]] = {}
    for row in rows:
        for name in ("TRAIN_FILE", "MEDI_FILE"):
            paths = ast.literal_eval(row.model.run.settings.get(name, "()"))
            for path in (paths,) if isinstance(paths, str) else paths:
                if path not in files:
                    files[path] = _training_file(path)
    scored = [row.report for row in rows if row.report is not None]
    for report in scored:
        for path, num_rows, digest in _scored_files(report):
            files.setdefault(path, _cells(path, "scores", num_rows, digest))
    blocks: list = [list(files.values())] if files else []
    if scored:
        model, settings = scored[0]["model"], scored[0]["settings"]
        versions = ", ".join(f"{k} {v}" for k, v in model["versions"].items())
        prompt = f"`{settings['prompt']}`" if settings["prompt"] else "none"
        blocks.append(
            f"Scored in {model['dtype']} by {settings['similarity']}; prompt before "
            f"the texts of STS and geometry: {prompt}; at each model's own length. "
            f"Vocabulary sha256 {model['vocabulary']['sha256']}. {versions}. Each "
            "model's report is in `scores/`; `config.gin` in its folder repeats its "
            "training."
        )
    return blocks


def _training_file(path: str) -> dict[str, str]:
    """Describes a file that models were trained on."""
    digest = whole_files.sha256(path)
    return _cells(path, "training", sum(1 for _ in records.Reader(path)), digest)


def _scored_files(report: Mapping[str, Any]) -> Iterator[tuple[str, int | None, str]]:
    """Yields path, rows and hash of all that a report is about."""
    for entry in report["sts"]:
        yield entry["file"], entry["pairs"], entry["sha256"]
    for entry in report["instructions"]:
        yield entry["file"], entry["rows"], entry["sha256"]
    for entry in report["transfer"]:
        for split in entry["files"].values():
            yield split["file"], split["rows"], split["sha256"]
    for entry in report["retrieval"]:
        for name, digest in entry["sha256"].items():
            yield f"{entry['folder']}/{name}", None, digest


def _cells(path: str, use: str, num_rows: int | None, digest: str) -> dict[str, str]:
    return {
        "file": pathlib.Path(path).name,
        "for": use,
        "rows": "" if num_rows is None else f"{num_rows:,}",
        "sha256": digest,
    }
