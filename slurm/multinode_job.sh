#!/usr/bin/env bash
# A training job on any number of nodes:
#
#   sbatch --nodes=4 slurm/multinode_job.sh sft_train.py --config my_run.yaml --learning_rate 1e-5
#   sbatch --nodes=4 slurm/multinode_job.sh sft_train.py --config my_run.yaml --strategy fsdp2
#
# Options before the script's name are sbatch's and win over those below; what follows it goes to
# the script as it is. The job saves and goes back into the queue before its time limit, and resumes
# there: see docs/slurm.md.
#
#SBATCH --job-name=train
##SBATCH --partition=gpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1         # one launcher a node, which starts a process per GPU
#SBATCH --gpus-per-node=8           # or --gres=gpu:4; or --gpus-per-node=0 --gpus-per-task=4
#SBATCH --exclusive                 # whole nodes, with all their cores; to share nodes, leave it out and
##SBATCH --cpus-per-task=64         # name cores of a node, for all its GPUs
#SBATCH --mem=0                     # of each node; 0 is all it has
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
# shellcheck disable=SC2034 # for messages
job_script=slurm/multinode_job.sh
# shellcheck source=slurm/training_job.sh
source "$root/slurm/training_job.sh"
