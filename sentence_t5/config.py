"""``sentence-t5 config``: checks gin files, prints each value and its origin."""

import sys
from collections.abc import Sequence

from sentence_t5 import gin_files


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see ``gin_files.main``."""
    return gin_files.main(argv, command="config")


if __name__ == "__main__":
    sys.exit(main())
