#!/usr/bin/env bash
# Runs one of the repository's commands on this machine, in the environment of slurm/cluster.env:
#
#   slurm/run_python.sh -m utils.submit.sweep points recipes/sweep/demo_cpu.yaml
#
# For what no GPU is needed: checks before the queue, the points of a sweep. Training processes are
# slurm/launch_node.sh's. In a job whose Python only exists in a Pyxis container it is a step of
# its own.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"

STOKER_CONTAINER=()
STOKER_SRUN_ARGS=()
if [[ -f slurm/cluster.env ]]; then
  set +u # environments' activation scripts read unset variables
  # shellcheck source=/dev/null # the user's own
  source slurm/cluster.env
  set -u
fi

command=("${STOKER_CONTAINER[@]}" python)
if [[ -n ${SLURM_JOB_ID:-} ]] && ((${#STOKER_SRUN_ARGS[@]})); then
  command=(srun --overlap --nodes=1 --ntasks=1 "${STOKER_SRUN_ARGS[@]}" "${command[@]}")
fi
if ! command -v -- "${command[0]}" >/dev/null; then
  printf '%s: there is no %s on PATH: activate the environment in slurm/cluster.env (see %s)\n' \
    "$(hostname)" "${command[0]}" slurm/cluster.env.example >&2
  exit 69
fi
exec "${command[@]}" "$@"
