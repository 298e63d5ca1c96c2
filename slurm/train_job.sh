#!/usr/bin/env bash
# A training job on one node:
#
#   sbatch slurm/train_job.sh sft_train.py --config my_run.yaml --learning_rate 1e-5
#   sbatch --gpus-per-node=8 slurm/train_job.sh sft_train.py --config my_run.yaml --strategy fsdp2
#
# Options before the script's name are sbatch's and win over those below; what follows it goes to
# the script as it is. The job saves and goes back into the queue before its time limit, and resumes
# there: see docs/slurm.md.
#
#SBATCH --job-name=train
##SBATCH --partition=gpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1         # one launcher, which starts a process per GPU
#SBATCH --gpus-per-node=1           # or --gres=gpu:4; or --gpus-per-node=0 --gpus-per-task=4
#SBATCH --cpus-per-task=8           # of the node, for all its GPUs: 4 to 16 each
#SBATCH --mem=64G                   # of the node; 0 is all it has
#SBATCH --time=24:00:00             # a job that needs longer requeues itself
#SBATCH --output=%x-%j.log          # job name, job id; all starts of the job write to one file
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
if [[ ${SLURM_JOB_NUM_NODES:-1} != 1 ]]; then
  printf 'train_job.sh is for one node, not %s: sbatch slurm/multinode_job.sh takes the same arguments.\n' \
    "$SLURM_JOB_NUM_NODES" >&2
  exit 2
fi
# shellcheck disable=SC2034 # for messages
job_script=slurm/train_job.sh
# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh"
