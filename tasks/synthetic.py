"""An offline task: pairs of sentences from a grammar, with known meaning.

An event fills eight slots (count, mood, agent, action, size, object, place, time), each
with a concept. Sentences spell it with synonyms, active or passive, in several orders.

    anchor         Two young kids opened a big box in the park at noon.
    entailed       At midday, a large carton was unsealed by two juvenile people.
    contradicting  Two young kids closed a big box in the park at noon.
    STS            score = 5 x the weighted share of slots on which two events agree

Words shared by two sentences say almost nothing about the STS score: a concept that
stays is usually spelt with another word, and fillers are drawn at random. So a model
that has learnt nothing scores near zero, and progress can only come from training.
Events of the validation split have (agent, action, object) combinations never seen in
the train split.
"""

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import seqio

from sentence_t5 import names, vocabularies
from sentence_t5.tasks import synthetic_lexicon as lexicon
from sentence_t5.tasks import text_pairs

TRAIN = "train"
VALIDATION = "validation"

SLOTS = (
    lexicon.COUNTS,
    lexicon.MOODS,
    lexicon.AGENTS,
    lexicon.ACTIONS,
    lexicon.SIZES,
    lexicon.OBJECTS,
    lexicon.PLACES,
    lexicon.TIMES,
)
COUNT, MOOD, AGENT, ACTION, SIZE, OBJECT, PLACE, TIME = range(len(SLOTS))
# How much each slot counts in the STS score.
WEIGHTS = (1, 1, 2, 2, 1, 2, 1, 1)
# Slots that an entailed sentence may leave out.
OPTIONAL = (MOOD, SIZE, PLACE, TIME)

# One event: the concept of each slot. One spelling: the form of each slot, where None
# leaves the slot out and -1 - k takes the k-th more general form.
Event = list[int]
Spelling = list[int | None]


def task(
    num_triples: int = 20_000,
    seed: int = 0,
    vocabulary: seqio.Vocabulary | None = None,
    name: str = "synthetic",
) -> seqio.Task:
    """Makes the task of anchor / entailed / contradicting sentences.

    Args:
      num_triples: rows of the train split; validation has a twentieth of them.
      seed: chooses the sentences.
      vocabulary: the project's own synthetic vocabulary by default.
      name: the task's name.

    Returns:
      A SeqIO task with inputs, targets and one text in negative_targets.
    """
    sizes = {TRAIN: num_triples, VALIDATION: max(1, num_triples // 20)}
    return text_pairs.task(
        name,
        text_pairs.RowSource(
            rows=lambda split: triples(sizes[split], seed, split),
            identity=lambda split: _identity("triples", sizes[split], seed, split),
            splits=tuple(sizes),
            negatives=True,
        ),
        vocabulary or vocabularies.synthetic(),
    )


def sts_task(
    num_pairs: int = 1_000,
    seed: int = 0,
    vocabulary: seqio.Vocabulary | None = None,
    name: str = "synthetic_sts",
) -> seqio.Task:
    """Makes the task of sentence pairs with a similarity score from 0 to 5.

    Args:
      num_pairs: rows of the validation split.
      seed: chooses the sentences.
      vocabulary: the project's own synthetic vocabulary by default.
      name: the task's name.

    Returns:
      A SeqIO task with inputs, targets and scores, made of held-out events.
    """
    return text_pairs.task(
        name,
        text_pairs.RowSource(
            rows=lambda split: scored_pairs(num_pairs, seed, split),
            identity=lambda split: _identity("sts", num_pairs, seed, split),
            splits=(VALIDATION,),
            scores=True,
        ),
        vocabulary or vocabularies.synthetic(),
    )


def triples(num: int, seed: int, split: str = TRAIN) -> Iterator[Mapping[str, Any]]:
    """Yields `num` rows {inputs: str, targets: str, negative_targets: [str]}."""
    rng = random.Random(f"triples/{seed}/{split}")
    for _ in range(num):
        event = _event(rng, held_out=split != TRAIN)
        spelling = _spelling(rng, event)
        yield {
            names.INPUTS: _sentence(rng, event, spelling),
            names.TARGETS: _sentence(rng, event, _entailed(rng, event, spelling)),
            names.NEGATIVE_TARGETS: [_contradiction(rng, event, spelling)],
        }


def scored_pairs(
    num: int, seed: int, split: str = VALIDATION
) -> Iterator[Mapping[str, Any]]:
    """Yields `num` rows {inputs: str, targets: str, scores: float in 0..5}."""
    rng = random.Random(f"sts/{seed}/{split}")
    slots = range(len(SLOTS))
    for _ in range(num):
        event = _event(rng, held_out=split != TRAIN)
        changed = _sample(rng, slots, _below(rng, len(SLOTS) + 1))
        other = _changed(rng, event, changed)
        spelling = _spelling(rng, event)
        respelt = _spelling(rng, other, avoid=(event, spelling))
        kept = [slot for slot in slots if slot not in changed]
        if kept and rng.random() < 0.2:
            slot = kept[_below(rng, len(kept))]
            respelt[slot] = spelling[slot]
        agreed = sum(WEIGHTS[slot] for slot in kept)
        yield {
            names.INPUTS: _sentence(rng, event, spelling),
            names.TARGETS: _sentence(rng, other, respelt),
            names.SCORES: 5.0 * agreed / sum(WEIGHTS),
        }


def _identity(kind: str, num: int, seed: int, split: str) -> Mapping[str, Any]:
    """What the rows are a pure function of, beside this module's own text."""
    return {
        "source": f"synthetic/{kind}",
        "rows": num,
        "seed": seed,
        "split": split,
        "grammar": text_pairs.source_sha256(__file__, lexicon.__file__),
    }


def _below(rng: random.Random, n: int) -> int:
    """Draws from 0..n-1; `random()` alone is the same in every Python version."""
    return int(rng.random() * n)


def _sample(rng: random.Random, items, num: int) -> list:
    """Draws `num` different items."""
    rest = list(items)
    return [rest.pop(_below(rng, len(rest))) for _ in range(num)]


def _event(rng: random.Random, held_out: bool) -> Event:
    """Draws an event of the wanted part: a tenth of the combinations is held out."""
    while True:
        event = [_below(rng, len(slot.concepts)) for slot in SLOTS]
        key = f"{event[AGENT]} {event[ACTION]} {event[OBJECT]}".encode()
        if (zlib.crc32(key) % 10 == 0) == held_out:
            return event


def _changed(rng: random.Random, event: Event, slots: list[int]) -> Event:
    """Returns the event with other concepts in `slots`, often the opposite ones."""
    other = list(event)
    for index in slots:
        slot, concept = SLOTS[index], event[index]
        if slot.opposites[concept] >= 0 and rng.random() < 0.5:
            other[index] = slot.opposites[concept]
        else:
            shift = 1 + _below(rng, len(slot.concepts) - 1)
            other[index] = (concept + shift) % len(slot.concepts)
    return other


def _spelling(
    rng: random.Random, event: Event, avoid: tuple[Event, Spelling] | None = None
) -> Spelling:
    """Draws a form for each slot, another one than `avoid` has for the same concept."""
    spelling: Spelling = []
    for index, slot in enumerate(SLOTS):
        num = len(slot.concepts[event[index]])
        form = _below(rng, num)
        if avoid and avoid[0][index] == event[index] and form == avoid[1][index]:
            form = (form + 1 + _below(rng, num - 1)) % num
        spelling.append(form)
    return spelling


def _entailed(rng: random.Random, event: Event, spelling: Spelling) -> Spelling:
    """Spells the event in other words, less precisely in places."""
    respelt = _spelling(
        rng, event, avoid=(event, spelling) if rng.random() < 0.7 else None
    )
    for index in OPTIONAL:
        if rng.random() < 0.15:
            respelt[index] = None
    for index in (AGENT, OBJECT):
        kinds = SLOTS[index].kinds[event[index]]
        if rng.random() < 0.1:
            respelt[index] = -1 - _below(rng, len(kinds))
    return respelt


def _contradiction(rng: random.Random, event: Event, spelling: Spelling) -> str:
    """Says something that cannot be true beside the event, mostly in its words."""
    changed = _sample(rng, range(len(SLOTS)), 1 + _below(rng, 2))
    other = _changed(rng, event, changed)
    respelt = list(spelling) if rng.random() < 0.7 else _spelling(rng, other)
    for index in changed:
        respelt[index] = _below(rng, len(SLOTS[index].concepts[other[index]]))
    return _sentence(rng, other, respelt)


def _form(event: Event, spelling: Spelling, index: int):
    """Returns the chosen surface form of a slot."""
    form = spelling[index]
    if form < 0:
        return SLOTS[index].kinds[event[index]][-1 - form]
    return SLOTS[index].concepts[event[index]][form]


def _sentence(rng: random.Random, event: Event, spelling: Spelling) -> str:
    """Spells an event as a sentence, in an order drawn at random."""
    word = {
        i: _form(event, spelling, i) for i, f in enumerate(spelling) if f is not None
    }
    plural = event[COUNT] > 0
    agent = " ".join(filter(None, (word[COUNT], word.get(MOOD), word[AGENT][plural])))
    size = word.get(SIZE)
    article = "the" if rng.random() < 0.5 else _article(size or word[OBJECT][0])
    thing = " ".join(filter(None, (article, size, word[OBJECT][0])))
    past, participle = word[ACTION]

    draw = rng.random()
    if draw < 0.4:
        clause = f"{agent} {past} {thing}"
    elif draw < 0.7:
        clause = f"{thing} was {participle} by {agent}"
    elif draw < 0.85:
        clause = f"it was {thing} that {agent} {past}"
    else:
        clause = f"there {'were' if plural else 'was'} {agent} who {past} {thing}"

    where = [word[index] for index in (PLACE, TIME) if index in word]
    if len(where) == 2 and rng.random() < 0.5:
        where.reverse()
    if where and rng.random() < 0.4:
        clause = f"{where.pop(0)} , {clause}".replace(" ,", ",")
    text = " ".join([clause, *where])
    return f"{text[0].upper()}{text[1:]}."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
