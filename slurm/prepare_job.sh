#!/usr/bin/env bash
# Tokenizes on the cluster without a GPU. Each task of the job array does a share:
#
#   sbatch --array=0-15 slurm/prepare_job.sh --sources corpus/*.jsonl.zst \
#       --tokenizer_name_or_path models/Qwen3-0.6B --output_dir data/corpus
#   sbatch slurm/prepare_job.sh --config recipes/data/my_data.yaml            all of it in one task
#
# The arguments are those of prepare_data.py. The last task to finish merges all shares and checks
# the result. If submitted again, also with another number of tasks, it does only the missing work.
#
#SBATCH --job-name=prepare
##SBATCH --partition=cpu            # sinfo lists them; commented out: the cluster's default
##SBATCH --account=my_account       # sacctmgr show assoc user=$USER
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8           # worker processes, unless --num_proc is given
#SBATCH --mem=16G                   # of each task: 1 to 2 GiB a worker
#SBATCH --time=04:00:00             # a task that needs longer requeues itself
#SBATCH --output=%x-%j.log          # each task of an array has its own job id
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60          # work that the time limit interrupts is done again
set -euo pipefail

# sbatch copies this file away. The repository is STOKER_ROOT, or where sbatch was called.
root=${STOKER_ROOT:-$PWD}
[[ -n ${STOKER_ROOT:-} || -f $root/slurm/job_setup.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -f $root/slurm/job_setup.sh ]]; then
  printf 'no repository here (%s): call sbatch in it, or set STOKER_ROOT to it.\n' "$root" >&2
  exit 2
fi
# shellcheck source=slurm/job_setup.sh
source "$root/slurm/job_setup.sh"

if (($# == 0)); then
  refuse 2 "no arguments given: sbatch --array=0-15 slurm/prepare_job.sh --sources ... --output_dir ... (python prepare_data.py --help lists them)"
fi
((${SLURM_JOB_NUM_NODES:-1} == 1)) || refuse 2 \
  "$SLURM_JOB_NUM_NODES nodes for one task, which uses one: use --array=0-$((SLURM_JOB_NUM_NODES - 1)) in place of --nodes=$SLURM_JOB_NUM_NODES."
own_processes=
for argument in "$@"; do
  case $argument in
  --shard | --shard=* | --merge | --merge=*)
    refuse 2 "$argument is not for jobs: the array is the division (sbatch --array=0-15)." ;;
  --num_proc | --num_proc=*) own_processes=1 ;;
  esac
done
cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
arguments=("$@")
[[ -n $own_processes ]] || arguments+=(--num_proc "$cores")

# Find the share of this task. Slurm gives the bounds of the array, not the list of its tasks.
shards=
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  step_width=${SLURM_ARRAY_TASK_STEP:-1}
  shards=$SLURM_ARRAY_TASK_COUNT
  # shellcheck disable=SC2153 # Slurm's names
  shard=$(((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN) / step_width))
  if (((SLURM_ARRAY_TASK_MAX - SLURM_ARRAY_TASK_MIN) / step_width + 1 != shards)); then
    refuse 2 "an array with gaps ($shards tasks from $SLURM_ARRAY_TASK_MIN to $SLURM_ARRAY_TASK_MAX) leaves shares undone: give a range, as in --array=0-$((shards - 1)); what is finished is not done again."
  fi
fi

# Temporary files of Python and datasets are private to the job, and removed at its end.
private=$(mktemp -d -- "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/stoker-prepare-XXXXXXXX") || refuse 74 \
  "no temporary directory can be made in ${SLURM_TMPDIR:-${TMPDIR:-/tmp}}: set TMPDIR in slurm/cluster.env to one on the node's own disk."
trap 'rm -rf -- "$private"' EXIT
export HF_DATASETS_CACHE=$private/datasets PYTHONUNBUFFERED=1 SRUN_CPUS_PER_TASK=$cores
if [[ -z ${HF_HUB_OFFLINE:-} ]]; then
  export HF_HUB_OFFLINE=1 # nodes seldom have internet, and would wait for time-outs
fi

say "prepare_data.py ${shards:+--shard $shard/$shards}"

run_step slurm/run_python.sh prepare_data.py "${arguments[@]}" ${shards:+--shard "$shard/$shards"}
trap '' USR1 TERM

if ((code > 128)) && [[ -n ${passed_on:-} ]]; then
  if ((restarts < 20)); then
    requeue "stopped by $passed_on, finished work is kept"
  else
    say "job $job: stopped by $passed_on after $restarts restarts, not requeued: give it more --time or a wider --array; $again"
  fi
  exit 75
fi
((code == 0)) || say "job $job: failed with exit code $code, see above; finished work is kept: $again"
exit "$code"
