#!/usr/bin/env bash
# A training job on one node:
#
#   sbatch slurm/train_job.sh sft_train.py --config my_run.yaml --learning_rate 1e-5
#   sbatch --gpus-per-node=8 slurm/train_job.sh sft_train.py --config my_run.yaml --strategy fsdp2
#
# sbatch reads the options before slurm/train_job.sh, which override those below. The training
# script gets the arguments after its name. Before the time limit, the job saves, goes back into the
# queue and resumes: see docs/slurm.md.
#
#SBATCH --job-name=train
##SBATCH --partition=gpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1         # one launcher, which starts a process per GPU
#SBATCH --gpus-per-node=1           # or --gres=gpu:4; or --gpus-per-node=0 --gpus-per-task=4
#SBATCH --cpus-per-task=8           # of the node: 4 to 16 per GPU
#SBATCH --mem=64G                   # of the node; 0 is all it has
#SBATCH --time=24:00:00             # a job that needs longer requeues itself
#SBATCH --output=%x-%j.log          # job name, job id; all starts of the job write to one file
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
# shellcheck disable=SC2034 # training_job.sh reads it
job_script=slurm/train_job.sh
# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh"
