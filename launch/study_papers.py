"""What the papers report, beside which the study puts its own rows.

Each row says how well it is known:

    authors    in the authors' own repository or paper, read there
    quoted     in another paper or in notes that quote it
    recalled   from memory, not checked against the paper: don't quote it

Averages over the seven STS sets (Spearman × 100) and SentEval's seven transfer tasks
(accuracy), as the papers print them.

Source: Ni et al. 2021 (arXiv 2108.08877) and T5X Retrieval's README; Su et al. 2022
(arXiv 2212.09741), whose ablations are figures: only what the text says is here.
"""

import dataclasses

AUTHORS, QUOTED, RECALLED = "authors", "quoted", "recalled"
LEGEND = (
    "Evidence: *authors*, read in the authors' own repository or paper; *quoted*, by "
    "another paper or by notes; *recalled*, from memory and not checked."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One of Sentence-T5's rows.

    Attributes:
        size: of T5.
        pooling: as this package calls it.
        stage: what it was trained on: raw, nli or cqa_nli.
        sts: average of STS12-16, STS-B and SICK-R, or None.
        sts_evidence: how well that is known.
        transfer: average of the transfer tasks, or None.
        transfer_evidence: how well that is known.
    """

    size: str
    pooling: str
    stage: str
    sts: float | None
    sts_evidence: str
    transfer: float | None
    transfer_evidence: str


SENTENCE_T5 = (
    Row("base", "mean", "raw", 55.97, RECALLED, 88.96, QUOTED),
    Row("base", "first", "raw", 10.4, QUOTED, 83.38, QUOTED),
    Row("base", "encdec", "raw", 23.4, QUOTED, 81.69, QUOTED),
    Row("base", "mean", "nli", 81.92, RECALLED, 88.66, QUOTED),
    Row("base", "encdec", "nli", 82.81, RECALLED, 88.88, RECALLED),
    Row("base", "mean", "cqa_nli", 83.3, AUTHORS, 89.5, AUTHORS),
    Row("large", "mean", "raw", 51.8, QUOTED, 89.98, RECALLED),
    Row("large", "mean", "nli", 82.71, RECALLED, 90.45, RECALLED),
    Row("large", "mean", "cqa_nli", 84.1, AUTHORS, 91.0, AUTHORS),
    Row("xl", "mean", "nli", 83.62, RECALLED, 90.94, RECALLED),
    Row("xl", "mean", "cqa_nli", 84.6, AUTHORS, 91.5, AUTHORS),
    Row("xxl", "mean", "raw", 58.02, QUOTED, 90.71, RECALLED),
    Row("xxl", "mean", "nli", 83.74, RECALLED, None, ""),
    Row("xxl", "mean", "cqa_nli", 85.0, AUTHORS, 91.6, AUTHORS),
)

# What INSTRUCTOR's text says of its ablations; their values are in figures only.
INSTRUCTOR = {
    "with": (
        "Su et al.: trained on symmetric or on asymmetric data alone, models without "
        "instructions are about as good as GTR or better; on all data without "
        "instructions they suffer; on all data with instructions they are best "
        "(authors; values are in a figure)."
    ),
    "detail": (
        "Su et al.: no instruction, the data set's tag, a short one, a detailed one: "
        "each is better than the one before (authors; values are in a figure)."
    ),
    "paraphrases": (
        "Su et al.: over five paraphrases, the gap between best and worst grows "
        "substantially without the 300 data sets of Super-NaturalInstructions, whose "
        "instructions are diverse (authors; values are in a figure)."
    ),
}
GEOMETRY = (
    "Ni et al.: as size grows, uniformity gets better and alignment a little worse "
    "(quoted; no table of numbers was found)."
)
SIZES_OF_INSTRUCTOR = (
    "INSTRUCTOR's average over its 70 data sets: base 55.9, large 58.4, xl 58.8 "
    "(authors)."
)
