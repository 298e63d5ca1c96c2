#!/usr/bin/env bash
# Runs one of the repository's commands on this machine, in the environment of slurm/cluster.env:
#
#   slurm/run_python.sh -m utils.submit.sweep points recipes/sweep/demo_cpu.yaml
#
# It is for commands that need no GPU; slurm/launch_node.sh starts training processes. In a job
# whose Python exists only in a Pyxis container, it runs the command as a step.
set -euo pipefail

cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
if [[ -n ${SLURM_JOB_ID:-} ]] && ((${#STOKER_SRUN_ARGS[@]})); then
  exec srun --overlap --nodes=1 --ntasks=1 "${STOKER_SRUN_ARGS[@]}" "${STOKER_CONTAINER[@]}" python "$@"
fi
find_python
exec "${python[@]}" "$@"
