#!/usr/bin/env bash
# Starts a script's processes on this node, one a GPU:
#
#   slurm/launch_node.sh sft_train.py --config recipes/sft/demo_cpu.yaml       this machine
#   srun --ntasks-per-node=1 slurm/launch_node.sh sft_train.py ...             each node of a job
#
# The job scripts run it under srun. ACCELERATE_CONFIG chooses the strategy; paths are taken from
# the repository's root. Exit codes: see utils/config/errors.py.
set -euo pipefail

# Until Python takes them: a request to stop must not kill the node's launcher as it starts.
trap '' USR1 TERM

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"

if [[ -n ${STOKER_CONTAINER:-} ]]; then
  printf '%s\n' 'STOKER_CONTAINER is set in the environment, which cannot hold a list: set it in slurm/cluster.env, as STOKER_CONTAINER=(...).' >&2
  exit 2
fi
STOKER_CONTAINER=()
if [[ -f slurm/cluster.env ]]; then
  # Environments' activation scripts read unset variables.
  set +u
  trap 'printf "%s: slurm/cluster.env failed, see above\n" "${SLURMD_NODENAME:-$(hostname)}" >&2' EXIT
  # shellcheck source=/dev/null # the user's own
  source slurm/cluster.env
  trap - EXIT
  set -u
fi

# A core dump of one process is as large as its memory; thousands have filled file systems.
ulimit -c 0

node="${SLURMD_NODENAME:-$(hostname)}"
if ((${#STOKER_CONTAINER[@]})) && ! command -v -- "${STOKER_CONTAINER[0]}" >/dev/null; then
  printf '%s: STOKER_CONTAINER begins with %q, which is no command here: %s\n' "$node" \
    "${STOKER_CONTAINER[0]}" 'set it as STOKER_CONTAINER=(apptainer exec IMAGE) in slurm/cluster.env' >&2
  exit 69
elif ! ((${#STOKER_CONTAINER[@]})) && ! command -v -- python >/dev/null; then
  printf '%s: there is no python on PATH: activate the environment in slurm/cluster.env (see %s)\n' \
    "$node" slurm/cluster.env.example >&2
  exit 69
fi

# exec: the Python process is the task, so Slurm's signals reach it and its exit code is srun's.
exec "${STOKER_CONTAINER[@]}" python -m utils.launch.node "$@"
