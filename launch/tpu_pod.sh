#!/usr/bin/env bash
# Trains on a Cloud TPU slice, from your own machine: queued resources, all workers.
#
#   bash launch/tpu_pod.sh [--dry_run] VERB NAME [options] [-- arguments]
#
#   check NAME -- FLAGS     compiles the run for such a slice on this machine: it fits?
#   up NAME                 requests the slice, waits for it, then "setup"
#   setup NAME              copies the last commit to every worker and installs it there
#   train NAME -- FLAGS     starts `python -m sentence_t5.train FLAGS` on every worker
#   run NAME -- COMMAND...  starts any command on every worker, in the checkout
#   logs NAME               follows the log of the first worker
#   stop NAME               SIGTERM to every worker: all save the same step and end
#   down NAME               deletes the slice
#
# Options, each of which may be set by the environment (ZONE, ...) instead:
#   --zone=us-west4-a               --project=...  (gcloud's own by default)
#   --accelerator_type=v5litepod-16 --runtime_version=... (by the accelerator's type)
#   --num_slices=1                  --spot
#   --shared_dir=/mnt/nfs           a folder that all workers mount, for model_dir
#
# --dry_run prints every command and runs none.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ZONE="${ZONE:-us-west4-a}"
PROJECT="${PROJECT:-}"
ACCELERATOR_TYPE="${ACCELERATOR_TYPE:-v5litepod-16}"
RUNTIME_VERSION="${RUNTIME_VERSION:-}"
NUM_SLICES="${NUM_SLICES:-1}"
SPOT="${SPOT:-}"
SHARED_DIR="${SHARED_DIR:-}"
DRY_RUN=""
VERB=""
NAME=""
REST=()

fail() {
  echo "tpu_pod.sh: error: $*" >&2
  exit 2
}

parse() {
  while (($#)); do
    case "$1" in
      --dry_run) DRY_RUN=1 ;;
      --zone=*) ZONE="${1#*=}" ;;
      --project=*) PROJECT="${1#*=}" ;;
      --accelerator_type=*) ACCELERATOR_TYPE="${1#*=}" ;;
      --runtime_version=*) RUNTIME_VERSION="${1#*=}" ;;
      --num_slices=*) NUM_SLICES="${1#*=}" ;;
      --spot) SPOT=1 ;;
      --shared_dir=*) SHARED_DIR="${1#*=}" ;;
      -h | --help)
        sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
      --)
        REST=("${@:2}")
        break
        ;;
      -*) fail "unknown option $1. Flags of training go after --; see --help." ;;
      *)
        if [[ -z "$VERB" ]]; then
          VERB="$1"
        elif [[ -z "$NAME" ]]; then
          NAME="$1"
        else
          fail "what is $1? Flags of training go after --; see --help."
        fi
        ;;
    esac
    shift
  done
  [[ -n "$VERB" && -n "$NAME" ]] || fail "expected a verb and a name; see --help."
  [[ "$NUM_SLICES" =~ ^[1-9][0-9]*$ ]] ||
    fail "--num_slices=$NUM_SLICES: expected 1 or more."
}

# A command as one line that a shell reads back, quoted where it must be.
quoted() {
  local word line=""
  for word in "$@"; do
    if [[ "$word" == *\'* && ! "$word" =~ [\"\$\`\\!] ]]; then
      word="\"$word\""
    elif [[ ! "$word" =~ ^[a-zA-Z0-9_./:=,@%+-]+$ ]]; then
      word="'${word//\'/\'\\\'\'}'"
    fi
    line+=" $word"
  done
  echo "${line# }"
}

# Prints a command; runs it unless --dry_run.
call() {
  echo "+ $(quoted "$@")"
  [[ -n "$DRY_RUN" ]] || "$@"
}

# gcloud's flags for where the slice is. Never empty.
where() {
  WHERE=(--zone="$ZONE")
  [[ -z "$PROJECT" ]] || WHERE+=(--project="$PROJECT")
}

nodes() {
  NODES=("$NAME")
  if ((NUM_SLICES > 1)); then
    NODES=()
    for ((i = 0; i < NUM_SLICES; i++)); do NODES+=("$NAME-$i"); done
  fi
}

runtime_version() {
  case "$ACCELERATOR_TYPE" in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v4-*) echo tpu-ubuntu2204-base ;;
    *) fail "no runtime version is known for $ACCELERATOR_TYPE: pass --runtime_version." ;;
  esac
}

# The slice's shape, as the compile command takes it. v4 and v5p count cores, two a chip.
topology() {
  local family="${ACCELERATOR_TYPE%%-*}" count="${ACCELERATOR_TYPE##*-}" shape=""
  case "$family" in
    v5litepod | v6e)
      case "$count" in
        4) shape=2x2 ;; 8) shape=2x4 ;; 16) shape=4x4 ;; 32) shape=4x8 ;;
        64) shape=8x8 ;; 128) shape=8x16 ;; 256) shape=16x16 ;;
      esac
      ;;
    v4 | v5p)
      case "$count" in
        8) shape=2x2x1 ;; 16) shape=2x2x2 ;; 32) shape=2x2x4 ;; 64) shape=2x4x4 ;;
        128) shape=4x4x4 ;; 256) shape=4x4x8 ;; 512) shape=4x8x8 ;; 1024) shape=8x8x8 ;;
      esac
      ;;
  esac
  [[ -n "$shape" ]] || fail "the shape of $ACCELERATOR_TYPE is not known here: run" \
    "python -m sentence_t5.compile --topology=... yourself."
  [[ "$family" != v5litepod ]] || family=v5e
  echo "$family:$shape"
}

# Runs one command on every worker of every slice at once.
on_all_workers() {
  local node pids=() failed=0
  for node in "${NODES[@]}"; do
    if [[ -n "$DRY_RUN" ]]; then
      call gcloud compute tpus tpu-vm ssh "$node" "${WHERE[@]}" --worker=all \
        --command="$1"
    else
      call gcloud compute tpus tpu-vm ssh "$node" "${WHERE[@]}" --worker=all \
        --command="$1" &
      pids+=($!)
    fi
  done
  [[ -z "$DRY_RUN" ]] || return 0
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return "$failed"
}

check() {
  local slice python="${PYTHON:-python}"
  slice="$(topology)"
  local slices=()
  ((NUM_SLICES == 1)) || slices=(--num_slices="$NUM_SLICES")
  call env JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$python" -m sentence_t5.compile \
    "${REST[@]}" --topology="$slice" ${slices[@]+"${slices[@]}"}
}

# On a worker's own disk, no host would find what another saved.
check_model_dir() {
  local argument model_dir=""
  for argument in "${REST[@]}"; do
    case "$argument" in
      --model_dir=*) model_dir="${argument#*=}" ;;
      --model_dir) fail "write --model_dir=..., in one word." ;;
      --coordinator_address* | --num_processes* | --process_id*)
        fail "$argument: on a TPU slice the workers find each other; leave it out."
        ;;
    esac
  done
  [[ -n "$model_dir" ]] || fail "expected --model_dir=gs://... after --."
  if [[ "$model_dir" != gs://* ]] &&
    [[ -z "$SHARED_DIR" || "$model_dir/" != "${SHARED_DIR%/}"/* ]]; then
    fail "--model_dir=$model_dir would be on each worker's own disk. Use gs://..., or" \
      "name the folder that all workers mount by --shared_dir=..."
  fi
}

up() {
  local runtime state
  runtime="${RUNTIME_VERSION:-$(runtime_version)}"
  local request=(gcloud compute tpus queued-resources create "$NAME" "${WHERE[@]}"
    --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$runtime")
  if ((NUM_SLICES > 1)); then
    request+=(--node-count="$NUM_SLICES" --node-prefix="$NAME")
  else
    request+=(--node-id="$NAME")
  fi
  [[ -z "$SPOT" ]] || request+=(--spot)
  call "${request[@]}"
  local look=(gcloud compute tpus queued-resources describe "$NAME" "${WHERE[@]}"
    --format='value(state.state)')
  if [[ -n "$DRY_RUN" ]]; then
    echo "# until it says ACTIVE:"
    call "${look[@]}"
  else
    while state="$("${look[@]}")"; [[ "$state" != ACTIVE ]]; do
      case "$state" in
        FAILED | SUSPENDING | SUSPENDED)
          echo "The request is $state: see gcloud compute tpus queued-resources" \
            "describe $NAME ${WHERE[*]}; then: bash launch/tpu_pod.sh down $NAME" >&2
          return 1
          ;;
      esac
      echo "$(date +%T) $NAME is $state"
      sleep "${POLL_SECONDS:-30}"
    done
  fi
  setup
}

setup() {
  local archive="${TMPDIR:-/tmp}/sentence_t5-$NAME.tar.gz" node
  if [[ -n "$(git -C "$ROOT" status --porcelain --untracked-files=no)" ]]; then
    echo "Note: the last commit is copied, without what is not committed." >&2
  fi
  call git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD
  for node in "${NODES[@]}"; do
    call gcloud compute tpus tpu-vm scp "$archive" "$node:sentence_t5.tar.gz" \
      "${WHERE[@]}" --worker=all
  done
  on_all_workers "mkdir -p sentence_t5 && find sentence_t5 -mindepth 1 -maxdepth 1 \
! -name .venv ! -name 'train.*' -exec rm -rf {} + && \
tar -xzf sentence_t5.tar.gz -C sentence_t5 && bash sentence_t5/launch/worker.sh setup"
}

start() {
  on_all_workers "bash sentence_t5/launch/worker.sh start $(quoted "$@")"
}

parse "$@"
where
nodes
case "$VERB" in
  check | train | run) ((${#REST[@]})) || fail "$VERB needs arguments after --." ;;
esac
case "$VERB" in
  check) check ;;
  up) up ;;
  setup) setup ;;
  train)
    check_model_dir
    start python -m sentence_t5.train --distributed "${REST[@]}"
    ;;
  run) start "${REST[@]}" ;;
  logs)
    call gcloud compute tpus tpu-vm ssh "${NODES[0]}" "${WHERE[@]}" --worker=0 \
      --command="bash sentence_t5/launch/worker.sh log"
    ;;
  stop) on_all_workers "bash sentence_t5/launch/worker.sh stop" ;;
  down)
    call gcloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force --quiet
    ;;
  *) fail "there is no verb $VERB; see --help." ;;
esac
