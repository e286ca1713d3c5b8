# Makes the virtual environment that the other launch scripts run in; sourced by them.
#
#   make_venv EXTRA   installs the checkout with an extra ("" for none) into $VENV, by
#                     default .venv in the checkout, at the tested versions
#
# An environment that already holds this setup.py at these versions is used as it is.
# $PYTHON names the interpreter to build one with; else the first found from 3.11 up.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c \
      'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Found no Python from 3.11 up with its venv module." \
    "Install one (Debian: python3-venv), or set PYTHON=/path/to/python." >&2
  return 1
}

make_venv() {
  local extra="$1" python stamp wanted
  stamp="$VENV/.installed-${extra:-plain}"
  wanted="$ROOT $(cat "$ROOT/setup.py" "$ROOT/requirements.lock" | cksum)"
  if [[ -x "$VENV/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
    return
  fi
  if [[ ! -x "$VENV/bin/python" ]]; then
    python="$(find_python)"
    echo "Making $VENV with $("$python" --version)."
    "$python" -m venv "$VENV"
  fi
  echo "Installing into $VENV."
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$ROOT/requirements.lock" --editable "$ROOT${extra:+[$extra]}"
  echo "$wanted" >"$stamp"
}
