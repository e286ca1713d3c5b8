"""Options that are one of a few words, and numbers that are 1 or more."""

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


def check_positive(name: str, value: int | None) -> None:
    """Checks a number of things, or None for a default.

    Args:
        name: of the option.
        value: what it was set to.

    Raises:
        ValueError: it is below 1.
    """
    if value is not None and value < 1:
        raise ValueError(f"{name}: got {value}, expected 1 or more.")
