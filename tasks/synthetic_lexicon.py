"""Words of the synthetic task: concepts, their synonyms, opposites and kinds.

Data only; `sentence_t5.tasks.synthetic` turns them into sentences. A concept is a tuple
of interchangeable surface forms. Two concepts of one slot never share a form, so that
agreement between two sentences has to be learnt: it cannot be read off shared words.
"""

from typing import NamedTuple


class Slot(NamedTuple):
    """The concepts that can fill one slot of an event.

    Attributes:
      concepts: for each concept, its surface forms.
      opposites: for each concept, the index of its opposite, or -1.
      kinds: for each concept, the more general forms that it entails, or ().
    """

    concepts: tuple[tuple, ...]
    opposites: tuple[int, ...]
    kinds: tuple[tuple, ...]


def _plain(*lines: str) -> Slot:
    """Concepts without opposites: forms split at `|`."""
    concepts = tuple(tuple(line.split("|")) for line in lines)
    return Slot(concepts, (-1,) * len(concepts), ((),) * len(concepts))


def _opposed(*lines: str) -> Slot:
    """Pairs of opposite concepts: sides split at ` / `, forms at `|`."""
    concepts = tuple(
        tuple(side.split("|")) for line in lines for side in line.split(" / ")
    )
    opposites = tuple(i ^ 1 for i in range(len(concepts)))
    return Slot(concepts, opposites, ((),) * len(concepts))


def _nouns(*groups: tuple[str, tuple[str, ...]]) -> Slot:
    """Nouns as (singular, plural) forms, grouped under a more general noun."""
    concepts, kinds = [], []
    for kind, lines in groups:
        general = tuple(_number(form) for form in kind.split("|"))
        for line in lines:
            concepts.append(tuple(_number(form) for form in line.split("|")))
            kinds.append(general)
    return Slot(tuple(concepts), (-1,) * len(concepts), tuple(kinds))


def _number(noun: str) -> tuple[str, str]:
    """Returns a noun's singular and plural; `a:b` spells out an irregular plural."""
    if ":" in noun:
        singular, plural = noun.split(":")
        return singular, plural
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun, noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun, noun[:-1] + "ies"
    return noun, noun + "s"


def _verbs(*lines: str) -> Slot:
    """Pairs of opposite verbs as (past, participle); `a:b` where the two differ."""
    slot = _opposed(*lines)
    concepts = tuple(
        tuple(tuple(form.split(":")) if ":" in form else (form, form) for form in forms)
        for forms in slot.concepts
    )
    return slot._replace(concepts=concepts)


# The first concept is singular; all others take plural nouns and verbs.
COUNTS = Slot(
    concepts=(
        ("one", "a single", "just one"),
        ("two", "a pair of", "a couple of"),
        ("many", "lots of", "numerous"),
    ),
    opposites=(-1, -1, -1),
    kinds=((), (), ()),
)

MOODS = _opposed(
    "young|youthful|juvenile / old|elderly|aged",
    "happy|cheerful|joyful / sad|gloomy|sorrowful",
    "rich|wealthy|affluent / poor|needy|penniless",
    "brave|fearless|bold / timid|fearful|shy",
    "clever|smart|bright / foolish|silly|dumb",
    "tired|weary|sleepy / lively|energetic|awake",
)

AGENTS = _nouns(
    (
        "person:people|human",
        (
            "child:children|kid|youngster",
            "doctor|physician|medic",
            "teacher|instructor|tutor",
            "farmer|grower|planter",
            "soldier|warrior|fighter",
            "thief:thieves|burglar|robber",
            "singer|vocalist|crooner",
            "lawyer|attorney|solicitor",
            "sailor|seafarer|mariner",
            "cook|chef|baker",
            "king|monarch:monarchs|ruler",
            "pupil|student|learner",
            "writer|author|novelist",
            "tourist|traveller|visitor",
        ),
    ),
    (
        "animal|beast",
        (
            "dog|hound|canine",
            "cat|feline|kitty",
            "horse|steed|stallion",
            "rabbit|hare|bunny",
            "monkey|ape|chimp",
            "pig|hog|swine:swine",
        ),
    ),
)

ACTIONS = _verbs(
    "opened|unlocked|unsealed / closed|shut|sealed",
    "bought|purchased|acquired / sold|auctioned|vended",
    "found|discovered|located / lost|misplaced|mislaid",
    "pushed|shoved|thrust / pulled|dragged|tugged",
    "built|constructed|made / destroyed|demolished|wrecked",
    "lifted|raised|hoisted / lowered|dropped|sank:sunk",
    "cleaned|washed|scrubbed / dirtied|soiled|stained",
    "hid:hidden|concealed|buried / showed:shown|displayed|exhibited",
    "fixed|repaired|mended / broke:broken|smashed|shattered",
    "threw:thrown|tossed|hurled / caught|grabbed|seized",
    "watched|observed|viewed / ignored|neglected|overlooked",
    "filled|loaded|stuffed / emptied|drained|unloaded",
)

SIZES = _opposed(
    "big|large|huge / small|little|tiny",
    "expensive|costly|pricey / cheap|inexpensive|budget",
    "new|modern|recent / ancient|antique|vintage",
    "pretty|beautiful|lovely / ugly|hideous|unsightly",
    "wet|soaked|damp / dry|parched|waterless",
    "red|crimson|scarlet / blue|azure|navy",
    "white|ivory|snowy / black|ebony|inky",
)

OBJECTS = _nouns(
    (
        "vehicle|conveyance",
        (
            "car|automobile|sedan",
            "boat|ship|vessel",
            "bicycle|bike|cycle",
            "cart|wagon|carriage",
        ),
    ),
    (
        "container|receptacle",
        (
            "box|crate|carton",
            "bag|sack|pouch",
            "bottle|flask|jar",
            "cup|mug|beaker",
            "basket|hamper|creel",
        ),
    ),
    (
        "artwork|creation",
        (
            "picture|image|photograph",
            "statue|sculpture|figurine",
            "carpet|rug|mat",
        ),
    ),
    (
        "thing|item",
        (
            "coat|jacket|parka",
            "lamp|lantern|torch",
            "gem|jewel|diamond",
            "stone|rock|boulder",
            "chair|seat|stool",
            "sofa|couch|settee",
            "letter|note|message",
            "gift|present|reward",
            "drum|kettledrum|tambourine",
            "house|home|dwelling",
        ),
    ),
)

PLACES = _plain(
    "in the park|in the public garden|on the lawn",
    "in the forest|in the woods|among the trees",
    "on the street|along the road|on the avenue",
    "on the beach|by the seaside|at the coast",
    "at the market|in the bazaar|in the shop",
    "in the classroom|at the academy|on the campus",
    "in the hospital|at the clinic|in the ward",
    "on the mountain|on the summit|at the peak",
    "by the river|beside the stream|near the creek",
    "on the farm|in the meadow|near the barn",
    "in the kitchen|beside the stove|near the oven",
    "at the station|on the platform|beside the railway",
    "in the castle|at the palace|inside the fortress",
)

TIMES = _plain(
    "in the morning|at dawn|at sunrise",
    "in the evening|at dusk|at sunset",
    "at noon|at midday|at lunchtime",
    "at night|after dark|at midnight",
    "in winter|during the frost|in the cold season",
    "in summer|during the heat|in the warm season",
    "yesterday|the day before|a day ago",
)
