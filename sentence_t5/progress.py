"""Progress bars on stderr, all of one kind."""

import sys

import tqdm.auto


def bar(
    label: str, total: int, unit: str, *, shown: bool, done: int = 0
) -> tqdm.auto.tqdm:
    """Returns a progress bar that is quiet where it is written into a log.

    Args:
        label: what is under way.
        total: how many there are in all.
        unit: what one is called.
        shown: whether it shows at all.
        done: how many were done before.
    """
    return tqdm.auto.tqdm(
        total=total,
        initial=done,
        unit=unit,
        desc=label,
        disable=not shown,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
    )
