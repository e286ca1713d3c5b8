"""Hard negatives: which of the nearest passages a training pair may be told apart from.

    nearest passages ─► without known positives and identical texts ─► ranks 1, 2, 3, …
      ─► rank window ─► score and margin rules ─► the first N, or N at random

Texts are the same if they are after NFKC, case folding and folding white space. Each
distinct passage is searched once, so that no negative comes twice and a rank counts
texts. A query's known positives are those of every pair with the same query text.

Numbers and rules only: no model, no files (``mine`` has those).

Source: the margins are those of NV-Retriever (Moreira et al. 2024, arXiv 2407.15831):
negatives too near to the positive are likely to be positives that nobody marked.
"""

import dataclasses
import hashlib
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

TOP, RANDOM = "top", "random"


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which passages are taken as negatives of a pair.

    Attributes:
        num_negatives: how many, at most.
        min_rank: the nearest passage to look at; 1 is the nearest of all.
        max_rank: the farthest.
        margin: a negative's score must be below the positive's by at least this.
        relative_margin: the same, as a share of the positive's score: with 0.05, at
            most 95 % of it.
        min_score: the least score of a negative.
        max_score: its largest score.
        sampling: "top" takes the nearest, "random" draws from all that are allowed.
        seed: of the draws.
    """

    num_negatives: int = 5
    min_rank: int = 1
    max_rank: int = 100
    margin: float | None = None
    relative_margin: float | None = None
    min_score: float | None = None
    max_score: float | None = None
    sampling: str = TOP
    seed: int = 0

    def __post_init__(self):
        """Checks the rules against each other.

        Raises:
            ValueError: a number out of range, or a window that is too small.
        """
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be positive: {self.num_negatives}.")
        if self.min_rank < 1 or self.max_rank - self.min_rank + 1 < self.num_negatives:
            raise ValueError(
                f"The ranks {self.min_rank} to {self.max_rank} can't give "
                f"{self.num_negatives} negatives: ranks count from 1; widen the window "
                "or ask for fewer."
            )
        for name in ("margin", "relative_margin"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if self.sampling not in (TOP, RANDOM):
            raise ValueError(
                f"sampling: got {self.sampling!r}, expected {TOP!r} or {RANDOM!r}."
            )

    def choose(
        self, scores: np.ndarray, positive_score: float, pair: int
    ) -> np.ndarray:
        """Chooses among a pair's candidates.

        Args:
            scores: of the candidates (known positives and identical texts are none),
                nearest first, float32 [c].
            positive_score: of the pair's positive.
            pair: the pair's number, which with the seed decides the draw.

        Returns:
            Positions of the negatives in ``scores``, ascending.
        """
        scores = np.asarray(scores, np.float64)
        allowed = np.zeros(len(scores), bool)
        allowed[self.min_rank - 1 : self.max_rank] = True
        positive = float(positive_score)
        if self.margin is not None:
            allowed &= scores <= positive - self.margin
        if self.relative_margin is not None:
            allowed &= scores <= positive - self.relative_margin * abs(positive)
        if self.min_score is not None:
            allowed &= scores >= self.min_score
        if self.max_score is not None:
            allowed &= scores <= self.max_score
        found = np.flatnonzero(allowed)
        if self.sampling == RANDOM and len(found) > self.num_negatives:
            draw = np.random.default_rng([self.seed, pair])
            found = np.sort(draw.choice(found, self.num_negatives, replace=False))
        return found[: self.num_negatives]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query with one of its positives.

    Attributes:
        query: its row in ``Pool.queries``.
        positive: the positive's row in ``Pool.passages``.
        query_text: the query as it was written.
        positive_text: the positive as it was written.
        query_id: the query's id; None where queries have none.
        positive_id: the passage's id; None where passages have none.
    """

    query: int
    positive: int
    query_text: str
    positive_text: str
    query_id: str | None = None
    positive_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Pool:
    """Queries, passages to search, and what must not be mined.

    Attributes:
        queries: distinct queries.
        passages: distinct passages; those to search come first.
        passage_ids: their ids, or None.
        num_searched: how many passages are searched. The others are positives that the
            corpus lacks, which only have a score.
        pairs: those of one query stand together.
        excluded: for each query, the rows of passages that are none of its negatives.
    """

    queries: Sequence[str]
    passages: Sequence[str]
    passage_ids: Sequence[str] | None
    num_searched: int
    pairs: Sequence[Pair]
    excluded: Sequence[np.ndarray]

    def depth(self, rules: Rules) -> int:
        """Returns how many passages to search for, so that no rank is missing."""
        return rules.max_rank + max(map(len, self.excluded), default=0)


@dataclasses.dataclass(frozen=True)
class RawPair:
    """A pair as it was read: texts, and ids where there are any."""

    query: str
    positive: str
    query_id: str | None = None
    positive_id: str | None = None


def make_pool(
    pairs: Iterable[RawPair],
    corpus: Sequence[str] | None = None,
    corpus_ids: Sequence[str] | None = None,
) -> Pool:
    """Finds out which texts are the same, and what each query must not be given.

    Passages are the same, and are known to be positives, by their normalised texts.
    Queries stay as they are written, since each is encoded as it is written.

    Args:
        pairs: the known positives.
        corpus: what to search; the positives of all pairs by default.
        corpus_ids: ids of the corpus' rows.

    Returns:
        The pool.

    Raises:
        ValueError: there are no pairs, or no passages to search.
    """
    pairs = list(pairs)
    searched = [pair.positive for pair in pairs] if corpus is None else corpus
    if not pairs or not searched:
        raise ValueError(
            f"There are {len(pairs)} pairs and {len(searched)} passages to search: "
            "nothing can be mined."
        )
    passages, ids = _Distinct(), []
    for number, text in enumerate(searched):
        if passages.add(text):
            ids.append(corpus_ids[number] if corpus_ids is not None else None)
    num_searched = len(passages.texts)
    for pair in pairs:
        if passages.add(pair.positive):
            ids.append(pair.positive_id)
    queries = dict.fromkeys(pair.query for pair in pairs)
    query_rows = {text: row for row, text in enumerate(queries)}
    known: dict[bytes, set[int]] = {}
    for pair in pairs:
        same = known.setdefault(_key(pair.query), set())
        same.add(passages.row(pair.positive))
    excluded = []
    for text in query_rows:
        found = {*known[_key(text)], passages.row(text)} - {None}
        in_corpus = sorted(row for row in found if row < num_searched)
        excluded.append(np.array(in_corpus, np.int64))
    made = [
        Pair(
            query_rows[pair.query],
            passages.row(pair.positive),
            pair.query,
            pair.positive,
            pair.query_id,
            pair.positive_id,
        )
        for pair in pairs
    ]
    return Pool(
        queries=list(queries),
        passages=passages.texts,
        passage_ids=None if corpus_ids is None else ids,
        num_searched=num_searched,
        pairs=sorted(made, key=lambda pair: pair.query),
        excluded=excluded,
    )


class _Distinct:
    """Texts without repeats, by row."""

    def __init__(self):
        self.texts: list[str] = []
        self._rows: dict[bytes, int] = {}

    def add(self, text: str) -> bool:
        """Adds a text; returns whether it was new."""
        if self._rows.setdefault(_key(text), len(self.texts)) < len(self.texts):
            return False
        self.texts.append(text)
        return True

    def row(self, text: str) -> int | None:
        """Returns the row of a text, or None."""
        return self._rows.get(_key(text))


def normalise(text: str) -> str:
    """Returns what two texts that count as the same have in common."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _key(text: str) -> bytes:
    """Hashes a normalised text, so that a large corpus isn't held twice."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16).digest()
