"""Options that are one of a few words."""

from collections.abc import Sequence


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks an option's value.

    Args:
        name: of the option.
        value: what it was set to.
        choices: what it may be.

    Raises:
        ValueError: it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
