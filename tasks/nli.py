"""Natural language inference as triples: SNLI and MultiNLI from TFDS.

    premise   entailed hypothesis   [contradicting hypotheses of the same premise]

The form that sentence encoders are tuned on. A premise's rows lie anywhere in a data
set, so they are grouped by its text; rows without a label (-1) are left out, and so is
a premise without an entailed or without a contradicting hypothesis.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import seqio

from sentence_t5 import names
from sentence_t5.tasks import prepared, text_pairs

SNLI = "snli:1.1.0"
MULTI_NLI = "multi_nli:1.1.0"

_ENTAILMENT, _CONTRADICTION = 0, 2
_MULTI_NLI_SPLITS = {
    "train": ("train",),
    "validation": ("validation_matched", "validation_mismatched"),
}


def task(
    vocabulary: seqio.Vocabulary,
    data_sets: Sequence[str] = (SNLI, MULTI_NLI),
    data_dir: str | None = None,
    name: str = "nli",
) -> seqio.Task:
    """Makes the task of NLI triples.

    Args:
      vocabulary: turns texts into ids.
      data_sets: TFDS names with versions, of SNLI and MultiNLI or sets like them.
      data_dir: where TFDS keeps its data sets; its own default by default.
      name: the task's name.

    Returns:
      A SeqIO task with splits train and validation, and inputs, targets and
      negative_targets.

    Raises:
      FileNotFoundError: a data set is not prepared; the command that does is named.
    """
    builders = [prepared.builder(each, data_dir) for each in data_sets]

    def labelled(split: str) -> Iterator[tuple[str, str, int]]:
        for builder in builders:
            is_multi = builder.name == "multi_nli"
            for part in _MULTI_NLI_SPLITS[split] if is_multi else (split,):
                for row in prepared.rows(builder, part):
                    premise, hypothesis = row["premise"], row["hypothesis"]
                    yield premise.decode(), hypothesis.decode(), int(row["label"])

    source = text_pairs.RowSource(
        rows=lambda split: triples(labelled(split)),
        identity=lambda split: prepared.identity(builders, __file__),
        splits=tuple(_MULTI_NLI_SPLITS),
        negatives=True,
        streams=False,
    )
    return text_pairs.task(name, source, vocabulary)


def triples(
    labelled: Iterable[tuple[str, str, int]],
) -> Iterator[Mapping[str, object]]:
    """Groups labelled pairs by premise.

    Args:
      labelled: (premise, hypothesis, label) with 0 entailment, 1 neutral, 2
        contradiction, -1 no agreement, in any order.

    Yields:
      One row for each entailed hypothesis, with all contradicting ones as negatives;
      the rows of a premise begin with different negatives. Premises come in the order
      in which they are first entailed; a hypothesis counts once for a premise.
    """
    entailed: dict[str, dict[str, None]] = collections.defaultdict(dict)
    contradicted: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for premise, hypothesis, label in labelled:
        if label == _ENTAILMENT:
            entailed[premise][hypothesis] = None
        elif label == _CONTRADICTION:
            contradicted[premise][hypothesis] = None
    for premise, hypotheses in entailed.items():
        negatives = list(contradicted.get(premise, ()))
        if not negatives:
            continue
        for index, hypothesis in enumerate(hypotheses):
            turn = index % len(negatives)
            yield {
                names.INPUTS: premise,
                names.TARGETS: hypothesis,
                names.NEGATIVE_TARGETS: negatives[turn:] + negatives[:turn],
            }
