#!/usr/bin/env bash
# Trains the points of a sweep. Each task of the job array trains one point, on one node:
#
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml            the unfinished points
#   sbatch --array=0-7%2 slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml       two at a time
#
# If submitted again, finished points end at once and the others resume. Options on the command
# line override those below.

#SBATCH --job-name=sweep
##SBATCH --partition=gpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1         # one launcher, which starts a process per GPU
#SBATCH --gpus-per-node=1           # of each point
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G                   # of each point's node
#SBATCH --time=24:00:00             # of each point; a longer one requeues itself
#SBATCH --output=%x-%A_%a.log       # job name, id of the array, point; one file for all starts
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300         # seconds before the time limit: time for a step and a save
set -euo pipefail

# sbatch copies this file away. The repository is STOKER_ROOT, or where sbatch was called.
root=${STOKER_ROOT:-$PWD}
[[ -n ${STOKER_ROOT:-} || -f $root/slurm/job_setup.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -f $root/slurm/job_setup.sh ]]; then
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
wait "$!" # if the command failed, this ends the script as well
sweep_name="${sweep##*/}"
export WANDB_RUN_GROUP="${WANDB_RUN_GROUP:-${sweep_name%.yaml}}" # the points are one group
# shellcheck disable=SC2034 # training_job.sh reads it
job_script=slurm/sweep_job.sh
# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh" "${arguments[@]}"
