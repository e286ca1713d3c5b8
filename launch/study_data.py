"""The study's files of rows with instructions, made from one file of MEDI's form.

    medi.jsonl ─► train.<wording>.jsonl     detailed, short, tag, none, varied
                  held_out.<wording>.jsonl  detailed, short, tag, none, paraphrase_1, …

A tenth of the queries is held out, by a hash of their text; rows that share a query or
a right text with a held-out row are left out of training. All files of a kind have the
same rows in the same order; only their instructions differ.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence

import study_wordings

from sentence_t5 import names, whole_files
from sentence_t5.tasks import medi_rows, records

SYMMETRIC, ASYMMETRIC, MIXED = "symmetric", "asymmetric", "mixed"
NONE, TAG, SHORT, DETAILED = DETAILS = ("none", "tag", "short", "detailed")
PARAPHRASED = tuple(
    f"paraphrase_{i + 1}" for i in range(len(study_wordings.PARAPHRASES))
)
VARIED = "varied"

_HELD_OUT_PARTS = 10
# Held-out rows of a task at most: more cost time and say little.
_MAX_HELD_OUT = 150
_ABOUT = "about.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Files:
    """What was made of a file.

    Attributes:
        folder: where the files are.
        kinds: task_id -> "symmetric", if most of its rows have one instruction for both
            sides, or "asymmetric".
        train_rows: task_id -> rows in the files for training.
        held_out_rows: the same, of the others.
        num_kept: instructions, of all rows and sides, that have another form than
            `Represent the ... for ...:` and have one wording only.
        num_instructions: how many there are.
    """

    folder: pathlib.Path
    kinds: Mapping[str, str]
    train_rows: Mapping[str, int]
    held_out_rows: Mapping[str, int]
    num_kept: int
    num_instructions: int

    def train(self, wording: str) -> str:
        """Returns the path of the file for training in a wording."""
        return str(self.folder / f"train.{wording}.jsonl")

    def held_out(self, wording: str) -> str:
        """Returns the path of the held-out rows in a wording."""
        return str(self.folder / f"held_out.{wording}.jsonl")

    def tasks(self, kind: str) -> list[str]:
        """Returns the tasks of a kind, in the file's order; all if it is mixed."""
        return [task for task in self.kinds if kind in (MIXED, self.kinds[task])]


Row = tuple[str, medi_rows.Row]  # task_id and row


def prepare(path: str, folder: pathlib.Path) -> Files:
    """Writes the files, or finds them as an earlier call has left them.

    Args:
        path: a file of MEDI's form.
        folder: where the files go.

    Returns:
        What there is.

    Raises:
        ValueError: a row of another form, or nothing left to train on.
    """
    code = b"".join(
        pathlib.Path(module).read_bytes()
        for module in (__file__, study_wordings.__file__)
    )
    made_of = {
        "format": _FORMAT,
        "sha256": whole_files.sha256(path),
        "code": hashlib.sha256(code).hexdigest(),
    }
    about = folder / _ABOUT
    if about.exists() and (found := json.loads(about.read_text()))["of"] == made_of:
        return Files(folder, **found["files"])
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(
        (
            medi_rows.task_id_of(f"{path}, line {number}", record),
            medi_rows.parse(f"{path}, line {number}", record),
        )
        for number, _, record in records.Reader(path).places()
    )
    if not train or not held_out:
        raise ValueError(
            f"{path}: {len(train)} rows to train on and {len(held_out)} held out; the "
            "study needs some of both. Take a larger file."
        )
    for name, wording in _wordings().items():
        if name not in PARAPHRASED:
            _write(folder / f"train.{name}.jsonl", train, wording)
        if name != VARIED:
            _write(folder / f"held_out.{name}.jsonl", held_out, wording)
    files = _describe(train, held_out)
    about.write_text(json.dumps({"of": made_of, "files": files}, indent=2))
    return Files(folder, **files)


def split(rows) -> tuple[list[Row], list[Row]]:
    """Returns the rows to train on, and the held-out ones."""
    kept, held_out = [], collections.defaultdict(list)
    for task_id, row in rows:
        if _part_of(row[names.INPUTS]) == 0:
            held_out[task_id].append((task_id, row))
        else:
            kept.append((task_id, row))
    texts = {
        row[side]
        for of_task in held_out.values()
        for _, row in of_task
        for side in (names.INPUTS, names.TARGETS)
    }
    train = [
        (task_id, row)
        for task_id, row in kept
        if row[names.INPUTS] not in texts and row[names.TARGETS] not in texts
    ]
    few = [row for of_task in held_out.values() for row in of_task[:_MAX_HELD_OUT]]
    return train, few


def _part_of(text: str) -> int:
    """Returns the part that a query belongs to, the same on every machine."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % _HELD_OUT_PARTS


def _wordings() -> dict[str, Sequence[study_wordings.Wording]]:
    """Returns the wordings that each file's rows take turns in."""
    named = {name: [getattr(study_wordings, name)] for name in DETAILS}
    forms = zip(PARAPHRASED, study_wordings.PARAPHRASES, strict=True)
    paraphrased = {name: [study_wordings.paraphrase(form)] for name, form in forms}
    varied = [study_wordings.detailed]
    varied += map(study_wordings.paraphrase, study_wordings.TRAINED_PARAPHRASES)
    return {**named, **paraphrased, VARIED: varied}


def _write(
    path: pathlib.Path,
    rows: Sequence[Row],
    wordings: Sequence[study_wordings.Wording],
) -> None:
    """Writes rows in MEDI's form, with their instructions in other words."""
    with path.open("w", encoding="utf-8") as file:
        for i, (task_id, row) in enumerate(rows):
            word = wordings[i % len(wordings)]

            def pair(before, text, task_id=task_id, word=word):
                return [word(task_id, before) if before else before, text]

            negatives = zip(
                row[names.NEGATIVE_TARGETS + names.INSTRUCTION],
                row[names.NEGATIVE_TARGETS],
                strict=True,
            )
            record = {
                "query": pair(row[names.INPUTS + names.INSTRUCTION], row[names.INPUTS]),
                "pos": pair(row[names.TARGETS + names.INSTRUCTION], row[names.TARGETS]),
                "neg": [pair(*negative) for negative in negatives],
                "task_id": task_id,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _describe(train: Sequence[Row], held_out: Sequence[Row]) -> dict:
    """Counts rows and kinds; see ``Files``."""
    same = collections.defaultdict(int)
    rows = [*train, *held_out]
    instructions = []
    for task_id, row in rows:
        left, right = (
            row[side + names.INSTRUCTION] for side in (names.INPUTS, names.TARGETS)
        )
        same[task_id] += 1 if left == right else -1
        instructions += [text for text in (left, right) if text]
    return {
        "kinds": {
            task_id: SYMMETRIC if count >= 0 else ASYMMETRIC
            for task_id, count in same.items()
        },
        "train_rows": dict(collections.Counter(task_id for task_id, _ in train)),
        "held_out_rows": dict(collections.Counter(task_id for task_id, _ in held_out)),
        "num_kept": sum(not study_wordings.has_form(text) for text in instructions),
        "num_instructions": len(instructions),
    }
