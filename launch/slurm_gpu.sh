#!/usr/bin/env bash
# Trains on the GPUs of a Slurm cluster, one process per GPU.
#
#   sbatch --nodes=2 launch/slurm_gpu.sh --gin_file=gin/st5_base_mean.gin \
#       --model_dir=/shared/st5_base
#   bash launch/slurm_gpu.sh --dry_run ...     prints what would be run
#
# Options of sbatch on its command line win over those below. Submit from the checkout;
# PYTHON names the interpreter that has sentence_t5 and jax[cuda12], by default
# .venv/bin/python. Two minutes before the time limit, Slurm sends SIGTERM: training saves
# and the job goes back into the queue, up to MAX_RESTARTS times.
#
#SBATCH --job-name=sentence_t5
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=6
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

MAX_RESTARTS="${MAX_RESTARTS:-20}"
# What training exits with when SIGTERM came and everything is saved.
SAVED=143

fail() {
  echo "slurm_gpu.sh: error: $*" >&2
  exit 2
}

dry_run=""
if [[ "${1:-}" == --dry_run ]]; then
  dry_run=1
  shift
fi
(($#)) || fail "expected flags of training, such as --gin_file=... --model_dir=..."
[[ -n "$dry_run" || -n "${SLURM_JOB_ID:-}" ]] ||
  fail "this is for sbatch: sbatch launch/slurm_gpu.sh ..."

# sbatch runs a copy of this script: the checkout is where it was submitted.
ROOT="${SLURM_SUBMIT_DIR:-$PWD}"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
NODES="${SLURM_JOB_NUM_NODES:-1}"

model_dir=""
for argument in "$@"; do
  case "$argument" in
    --model_dir=*) model_dir="${argument#*=}" ;;
    --model_dir) fail "write --model_dir=..., in one word." ;;
  esac
done
[[ -n "$model_dir" ]] || fail "expected --model_dir=..., on a disk that all nodes share."
if ((NODES > 1)); then
  case "$model_dir" in
    /tmp/* | /var/tmp/* | /dev/shm/* | "${TMPDIR:-/tmp}"/*)
      fail "--model_dir=$model_dir is on each node's own disk; $NODES nodes need one" \
        "that all share."
      ;;
  esac
fi
if [[ -z "$dry_run" && ! -x "$PYTHON" ]]; then
  fail "there is no $PYTHON. Make it (python3 -m venv .venv; .venv/bin/pip install" \
    "-e . 'jax[cuda12]'), or set PYTHON=..."
fi

# JAX reads the addresses and its number from Slurm's variables. A task that fails ends
# the others.
command=(srun --kill-on-bad-exit=1 "$PYTHON" -m sentence_t5.train "$@")
printf '+'
printf ' %q' "${command[@]}"
printf '\n'
[[ -z "$dry_run" ]] || exit 0

code=0
"${command[@]}" || code=$?
if ((code == SAVED)) && ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
  echo "Everything is saved; job $SLURM_JOB_ID goes back into the queue."
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
