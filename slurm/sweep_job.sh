#!/usr/bin/env bash
# Trains the points of a sweep, one a task of a job array; a point is one run on one node:
#
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml            the unfinished points
#   sbatch --array=0-7%2 slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml       two at a time
#
# Handed in again, finished points end at once and the others go on. The table of results in the
# sweep's output_dir is renewed whenever a point ends. Every option below can be given on the
# command line instead, which wins.

#SBATCH --job-name=sweep
#SBATCH --nodes=1
# One task a node: slurm/launch_node.sh, which starts one process a GPU.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
##SBATCH --mem=32G
##SBATCH --partition=gpu
##SBATCH --account=my_account
# One log a point, which all its starts append to.
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
# Stopped by the time limit, a point saves, queues again and goes on.
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail

# sbatch runs a copy of this file in a spool directory, so its own path says nothing.
root=""
for candidate in "${STOKER_ROOT:-}" "$PWD" "${SLURM_SUBMIT_DIR:-}"; do
  if [[ -n $candidate && -f $candidate/slurm/launch_node.sh ]]; then
    root="$candidate"
    break
  fi
done
if [[ -z $root ]]; then
  printf 'no repository here (%s): call sbatch in it, or set STOKER_ROOT\n' "$PWD" >&2
  exit 2
fi
cd -- "$root"

if (($# != 1)); then
  printf 'usage: sbatch --array=0-N slurm/sweep_job.sh recipes/sweep/FILE.yaml\n' >&2
  exit 2
fi
sweep="$1"
point="${SLURM_ARRAY_TASK_ID:-}"
if [[ -z $point ]]; then
  printf 'a sweep is a job array: slurm/submit.sh slurm/sweep_job.sh %q, or sbatch --array=0-N\n' \
    "$sweep" >&2
  exit 2
fi

# Into a file first: mapfile would not see the command fail.
words="$(mktemp)"
code=0
slurm/run_python.sh -m utils.jobs.sweep point "$sweep" "$point" >"$words" || code=$?
if ((code == 0)); then
  mapfile -d '' -t arguments <"$words"
fi
rm -f -- "$words"
if ((code != 0)); then
  exit "$code"
fi

renew_table() {
  local code=$?
  slurm/run_python.sh -m utils.jobs.sweep ended "$sweep" "$point" "$code" ||
    printf 'the table of %q could not be renewed, see above\n' "$sweep" >&2
}
trap renew_table EXIT

# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh" "${arguments[@]}"
