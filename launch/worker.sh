#!/usr/bin/env bash
# What tpu_pod.sh runs on each worker of a TPU slice, in the checkout that it copied there.
#
#   bash launch/worker.sh setup              Python from 3.11 up, and .venv with libtpu
#   bash launch/worker.sh start COMMAND...   in the background; the log is train.log
#   bash launch/worker.sh stop               SIGTERM: training saves, then this returns
#   bash launch/worker.sh log                follows train.log
#
# "start" outlives the connection that it came by.
set -euo pipefail

# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
LOG="$ROOT/train.log"
PID="$ROOT/train.pid"
# Seconds that "start" watches for an early end, and that "stop" waits for the last save.
WATCH="${WATCH:-20}"
PATIENCE="${PATIENCE:-600}"

# The command is the leader of a process group; what it started counts too.
signal() {
  kill "-$1" -- "-$(cat "$PID")" 2>/dev/null || kill "-$1" "$(cat "$PID")" 2>/dev/null
}

running() {
  [[ -s "$PID" ]] && signal 0
}

setup() {
  if ! find_python >/dev/null 2>&1; then
    # The images of TPU VMs are Ubuntu 22.04, whose own Python is 3.10.
    sudo add-apt-repository -y ppa:deadsnakes/ppa
    sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv
  fi
  make_venv tpu
}

start() {
  if running; then
    echo "$(hostname): process $(cat "$PID") still runs; stop it first." >&2
    return 1
  fi
  if [[ -x "$VENV/bin/python" ]]; then
    export PATH="$VENV/bin:$PATH"
  fi
  setsid nohup "$@" >"$LOG" 2>&1 </dev/null &
  echo $! >"$PID"
  for ((i = 0; i < WATCH; i++)); do
    sleep 1
    if ! running; then
      local code=0
      wait "$(cat "$PID")" || code=$?
      echo "$(hostname): ended at once with exit code $code; the end of $LOG:" >&2
      tail -n 20 "$LOG" >&2
      return "$code"
    fi
  done
  echo "$(hostname): process $(cat "$PID") runs, log in $LOG"
}

stop() {
  if ! running; then
    echo "$(hostname): nothing runs."
    return
  fi
  signal TERM
  for ((i = 0; i < PATIENCE; i++)); do
    if ! running; then
      echo "$(hostname): stopped; the end of $LOG:"
      tail -n 3 "$LOG"
      return
    fi
    sleep 1
  done
  echo "$(hostname): process $(cat "$PID") still runs after $PATIENCE s." >&2
  return 1
}

case "${1:-}" in
  setup) setup ;;
  start) start "${@:2}" ;;
  stop) stop ;;
  log) exec tail -n 100 -F "$LOG" ;;
  *)
    echo "Usage: bash launch/worker.sh setup | start COMMAND... | stop | log" >&2
    exit 2
    ;;
esac
