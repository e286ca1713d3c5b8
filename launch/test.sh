#!/usr/bin/env bash
# Runs the tests in a virtual environment of their own, from any folder.
#
#   bash launch/test.sh [pytest arguments]
#
# Without arguments: lint, then every test but the slow ones and those that need a network
# or a TPU. `bash launch/test.sh -m slow` runs the slow ones.
set -euo pipefail

# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv test

cd "$ROOT"
if (($# == 0)); then
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
fi
# Two workers: most of a test is the compiler, which uses one core at a time.
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"
