"""``python -m sentence_t5.export``."""

import sys

from sentence_t5 import export

sys.exit(export.main())
