"""Tokenized examples, and the memory-mapped files that hold them.

    inputs.tokens [T]  inputs.starts [n+1]       row i is tokens[starts[i]:starts[i+1]]
    inputs.instruction_lengths [n]               how many of them are an instruction's
    negative_targets.rows [n+1]                  row i has texts rows[i]..rows[i+1]-1
    scores [n]                                   description.json: sizes, fingerprint

The description is written last: a folder without it is not complete.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from sentence_t5 import names

FORMAT = 1
TEXTS = (names.INPUTS, names.TARGETS, names.NEGATIVE_TARGETS)
_NEGATIVE_ROWS = f"{names.NEGATIVE_TARGETS}.rows"
_DESCRIPTION = "description.json"

# A block of rows: for each text feature the list of its rows (a list of ids,
# or, for negatives, a list of lists of ids); for scores a list of floats; for lengths
# of instructions a list of numbers (for negatives, a list of lists).
Block = Mapping[str, list]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token ids of many texts, end to end.

    Attributes:
      tokens: ids, each text ending in EOS; [T], uint16 or int32.
      starts: where each text starts, and the end of the last one; int64 [n+1].
      instruction_lengths: how many of each text's first ids are an instruction's; int32
        [n]. None without instructions.
    """

    tokens: np.ndarray
    starts: np.ndarray
    instruction_lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        return self.tokens[self.starts[index] : self.starts[index + 1]].tolist()

    def num_longer(self, length: int) -> int:
        """Returns how many texts have more than `length` tokens, EOS included."""
        return int(np.count_nonzero(np.diff(self.starts) > length))


@dataclasses.dataclass(frozen=True)
class TokenizedExamples:
    """All examples of one split of one task, by index.

    Attributes:
      task_name: the SeqIO task.
      split: its split.
      fingerprint: hash of the ids and scores themselves: equal for equal examples.
      vocabulary_size: pieces and sentinels of the vocabulary.
      max_id: the largest id that occurs.
      texts: for each text feature, its texts.
      negative_rows: row i has the negatives `negative_rows[i]` up to, not including,
        `negative_rows[i + 1]`; int64 [n+1]. None without negatives.
      scores: similarity judgements; float32 [n]. None without scores.
      in_batch_negatives: whether rows are negatives to each other.
    """

    task_name: str
    split: str
    fingerprint: str
    vocabulary_size: int
    max_id: int
    texts: Mapping[str, Texts]
    negative_rows: np.ndarray | None = None
    scores: np.ndarray | None = None
    in_batch_negatives: bool = True

    def __len__(self) -> int:
        return len(self.texts[names.INPUTS])

    @property
    def has_instructions(self) -> bool:
        """Whether texts may begin with an instruction."""
        return self.texts[names.INPUTS].instruction_lengths is not None

    def row(self, index: int) -> Mapping[str, Any]:
        """Returns the ids (untrimmed, with EOS) and the numbers of one example."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)} in {self.task_name!r}.")
        row = {}
        for key in [key for key in TEXTS[:2] if key in self.texts]:
            row[key] = self.texts[key][index]
            if self.has_instructions:
                length = self.texts[key].instruction_lengths[index]
                row[f"{key}{names.INSTRUCTION_LENGTH}"] = int(length)
        if self.negative_rows is not None:
            first, last = self.negative_rows[index : index + 2]
            key = names.NEGATIVE_TARGETS
            row[key] = [self.texts[key][i] for i in range(first, last)]
            if self.has_instructions:
                lengths = self.texts[key].instruction_lengths[first:last]
                row[f"{key}{names.INSTRUCTION_LENGTH}"] = lengths.tolist()
        if self.scores is not None:
            row[names.SCORES] = float(self.scores[index])
        return row


@dataclasses.dataclass(frozen=True)
class MixedExamples:
    """The examples of several tasks, with the rates at which to mix them.

    Attributes:
      parts: each task's examples and rate; the rates sum to 1.
    """

    parts: tuple[tuple[TokenizedExamples, float], ...]

    def __len__(self) -> int:
        return sum(len(examples) for examples, _ in self.parts)

    @property
    def task_name(self) -> str:
        """The names of the tasks."""
        return "+".join(examples.task_name for examples, _ in self.parts)

    @property
    def fingerprint(self) -> str:
        """Changes with any example and any rate."""
        return " ".join(f"{part.fingerprint}@{rate:.6g}" for part, rate in self.parts)

    def row(self, index: int) -> Mapping[str, Any]:
        """Returns one example; the tasks' rows are numbered end to end."""
        for examples, _ in self.parts:
            if index < len(examples):
                return examples.row(index)
            index -= len(examples)
        raise IndexError(f"No such row in a mixture of {len(self)} rows.")


class Writer:
    """Appends blocks of rows to the files of one folder."""

    def __init__(self, folder: pathlib.Path, task_name: str, vocabulary_size: int):
        self._folder = folder
        self._task_name = task_name
        self._vocabulary_size = vocabulary_size
        self._dtype = np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")
        self._lengths = collections.defaultdict(list)
        self._hashes = collections.defaultdict(hashlib.sha256)
        self._max_id = -1
        self._num_rows = 0

    def append(self, block: Block) -> None:
        """Appends a block of rows."""
        for key, rows in block.items():
            if key == names.SCORES:
                self._write("scores", np.asarray(rows, "<f4"))
                continue
            if key.endswith(names.INSTRUCTION_LENGTH):
                text = key.removesuffix(names.INSTRUCTION_LENGTH)
                if text == names.NEGATIVE_TARGETS:
                    rows = [length for lengths in rows for length in lengths]
                self._write(f"{text}.instruction_lengths", np.asarray(rows, "<i4"))
                continue
            if key == names.NEGATIVE_TARGETS:
                self._lengths[_NEGATIVE_ROWS].extend(map(len, rows))
                rows = [text for texts in rows for text in texts]
            self._check_eos(key, rows)
            self._lengths[f"{key}.starts"].extend(map(len, rows))
            ids = np.asarray([token for text in rows for token in text], np.int64)
            self._check_ids(key, ids)
            self._write(f"{key}.tokens", ids.astype(self._dtype))
        self._num_rows += len(block[names.INPUTS])

    def close(self, split: str, in_batch_negatives: bool = True) -> None:
        """Writes where the rows start, and the description that completes a folder."""
        if not self._num_rows:
            raise ValueError(
                f"Task {self._task_name!r} has no rows in split {split!r}."
            )
        digest = hashlib.sha256()
        for name, lengths in self._lengths.items():
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
            self._write(name, starts)
        for name, part in sorted(self._hashes.items()):
            digest.update(f"{name} {part.hexdigest()}\n".encode())
        if not in_batch_negatives:
            digest.update(b"no in-batch negatives\n")
        description = {
            "format": FORMAT,
            "task": self._task_name,
            "split": split,
            "num_rows": self._num_rows,
            "dtype": self._dtype.str,
            "vocabulary_size": self._vocabulary_size,
            "max_id": self._max_id,
            "in_batch_negatives": in_batch_negatives,
            "files": {
                name: (self._folder / name).stat().st_size for name in self._hashes
            },
            "fingerprint": digest.hexdigest(),
        }
        (self._folder / _DESCRIPTION).write_text(
            json.dumps(description, indent=2), encoding="utf-8"
        )

    def _write(self, name: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._hashes[name].update(data)
        with open(self._folder / name, "ab") as file:
            file.write(data)

    def _check_eos(self, key: str, texts: list[list[int]]) -> None:
        for index, text in enumerate(texts):
            if not text or text[-1] != names.EOS_ID:
                raise ValueError(
                    f"Task {self._task_name!r}: text {index} of {key!r} near row "
                    f"{self._num_rows} does not end in EOS (id {names.EOS_ID}); its "
                    f"last ids are {text[-3:]}. Add "
                    "`seqio.preprocessors.append_eos_after_trim` as the last "
                    "preprocessor, and `add_eos=True` to the feature."
                )

    def _check_ids(self, key: str, ids: np.ndarray) -> None:
        if not ids.size:
            return
        self._max_id = max(self._max_id, int(ids.max()))
        if ids.min() <= names.PAD_ID or ids.max() >= self._vocabulary_size:
            raise ValueError(
                f"Task {self._task_name!r}: {key!r} has ids from {ids.min()} to "
                f"{ids.max()}, expected 1 to {self._vocabulary_size - 1}: the "
                f"vocabulary has {self._vocabulary_size}, and {names.PAD_ID} is "
                "padding, which no text may hold. Change the task's preprocessors."
            )


def open_folder(folder: pathlib.Path) -> TokenizedExamples:
    """Maps the files of a complete folder into memory."""
    text = (folder / _DESCRIPTION).read_text(encoding="utf-8")
    description = json.loads(text)
    for name, size in description["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} has not its {size} bytes")

    def read(name: str, dtype: str) -> np.ndarray:
        if not description["files"][name]:
            return np.empty(0, dtype)
        return np.memmap(folder / name, dtype, mode="r")

    files = description["files"]

    def read_texts(key: str) -> Texts:
        lengths = f"{key}.instruction_lengths"
        return Texts(
            read(f"{key}.tokens", description["dtype"]),
            read(f"{key}.starts", "<i8"),
            read(lengths, "<i4") if lengths in files else None,
        )

    texts = {key: read_texts(key) for key in TEXTS if f"{key}.starts" in files}
    return TokenizedExamples(
        task_name=description["task"],
        split=description["split"],
        fingerprint=description["fingerprint"],
        vocabulary_size=description["vocabulary_size"],
        max_id=description["max_id"],
        texts=texts,
        negative_rows=read(_NEGATIVE_ROWS, "<i8") if _NEGATIVE_ROWS in files else None,
        scores=read("scores", "<f4") if "scores" in files else None,
        in_batch_negatives=description.get("in_batch_negatives", True),
    )
