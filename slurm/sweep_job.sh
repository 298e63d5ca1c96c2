#!/usr/bin/env bash
# Trains the points of a sweep, one a task of a job array; a point is one run on one node:
#
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml            the unfinished points
#   sbatch --array=0-7%2 slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml       two at a time
#
# Submitted again, finished points end at once and the others resume. Options on the command line
# win over those below.

#SBATCH --job-name=sweep
##SBATCH --partition=gpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1         # one launcher, which starts a process per GPU
#SBATCH --gpus-per-node=1           # of each point
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G                   # of each point's node
#SBATCH --time=24:00:00             # of each point; one that needs longer requeues itself
#SBATCH --output=%x-%A_%a.log       # job name, array's id, point; all starts of it write there
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300         # seconds before the time limit: time for a step and a save
set -euo pipefail

# sbatch copies this file away: the repository is where sbatch was called, or STOKER_ROOT.
root=${STOKER_ROOT:-$PWD}
[[ -n ${STOKER_ROOT:-} || -f $root/slurm/launch_node.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -f $root/slurm/launch_node.sh ]]; then
  printf 'no repository here (%s): call sbatch in it, or set STOKER_ROOT to it.\n' "$root" >&2
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

mapfile -d '' -t arguments < <(slurm/run_python.sh -m utils.submit.sweep point "$sweep" "$point")
wait "$!" # ends this script too if the command failed
sweep_name="${sweep##*/}"
export WANDB_RUN_GROUP="${WANDB_RUN_GROUP:-${sweep_name%.yaml}}" # the points are one group
# shellcheck disable=SC2034 # for messages
job_script=slurm/sweep_job.sh
# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh" "${arguments[@]}"
