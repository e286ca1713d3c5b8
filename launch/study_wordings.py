"""Other wordings of INSTRUCTOR's instructions: shorter ones, and paraphrases.

    detailed  Represent the medical question for retrieving an answer passage:
    short     medical question:
    tag       medquad:                                       the data set's name
    none

Instructions of the form `Represent the <what> for <goal>:` are taken apart and put
together anew; those of another form stay as they are, and are counted.

Source: Su et al. 2022 (arXiv 2212.09741) for the form and for the four degrees of
detail. The paper's own wordings were not at hand; these are this project's.
"""

import re
from collections.abc import Callable

# From a task's name and an instruction to its other wording.
Wording = Callable[[str, str], str]

_FORM = re.compile(
    r"Represent (?:the |this |an? )?(?P<what>.+?) for (?P<goal>.+?)"
    r"\s*[:;.]?\s*(?:Input:)?",
    re.IGNORECASE,
)
# What models are scored with; none of them is trained on.
PARAPHRASES = (
    "Encode the {what} for {goal}:",
    "Embed this {what} in order to serve {goal}:",
    "For {goal}, represent the {what}:",
    "Turn the {what} into a vector; it is for {goal}:",
    "Task: {goal}. Text type: {what}.",
)
# What one model is trained on, beside the file's own wording.
TRAINED_PARAPHRASES = (
    "Describe the {what} for {goal}:",
    "The {what}, to be used for {goal}:",
    "With {goal} in mind, summarize the {what}:",
)


def has_form(instruction: str) -> bool:
    """Says whether an instruction can be taken apart."""
    return _FORM.fullmatch(instruction) is not None


def detailed(task_id: str, instruction: str) -> str:
    """Returns the instruction as it is."""
    return instruction


def short(task_id: str, instruction: str) -> str:
    """Returns what kind of text it is, without what it is for."""
    return _reworded("{what}:", instruction)


def tag(task_id: str, instruction: str) -> str:
    """Returns the task's name."""
    return f"{task_id}:"


def none(task_id: str, instruction: str) -> str:
    """Returns no instruction."""
    return ""


def paraphrase(form: str) -> Wording:
    """Returns the wording that one of the paraphrases above makes."""
    return lambda task_id, instruction: _reworded(form, instruction)


def _reworded(form: str, instruction: str) -> str:
    parts = _FORM.fullmatch(instruction)
    if parts is None:
        return instruction
    return form.format(what=parts["what"], goal=parts["goal"])
