#!/usr/bin/env bash
# Checks a job without a GPU, then submits it. Takes the arguments of sbatch:
#
#   slurm/submit.sh --nodes=4 --time=24:00:00 slurm/multinode_job.sh sft_train.py --config my.yaml
#   slurm/submit.sh --check --nodes=4 slurm/multinode_job.sh ...      only check
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml    all unfinished points
#
# The job enters the queue on hold. A dry run compares the resources that Slurm understood with the
# settings and the accelerate config, and prints the plan. Then the job is released, or cancelled
# with the exit code of the dry run.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

usage() { sed -n '2,6s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"; }

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
only_check=
if [[ ${1:-} == --check ]]; then
  only_check=yes
  shift
fi
if (($# == 0)); then
  usage >&2
  exit 2
fi

# The job script is the first word that is a file which begins with #!, as sbatch demands.
options=() stays_held='' parsable=''
while (($#)); do
  if [[ -f $1 ]] && IFS= read -r -n 2 magic <"$1" && [[ $magic == '#!' ]]; then
    break
  fi
  case $1 in
  -H | --hold) stays_held=yes ;;
  --parsable) parsable=yes ;;
  esac
  options+=("$1")
  shift
done
if (($# == 0)); then
  say "no job script among the words: slurm/submit.sh [SBATCH OPTIONS] slurm/train_job.sh SCRIPT ARGUMENTS"
  exit 2
fi

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
export STOKER_ROOT=$root # the job finds the repository from any directory
python="$root/slurm/run_python.sh" # a separate process: sbatch passes this environment on

first=(--hold --parsable)
if [[ ${1##*/} == sweep_job.sh && -n ${2:-} && -z ${SBATCH_ARRAY_INX:-} ]]; then
  points=$("$python" -m utils.submit.sweep points "$2" | sed '/\tfinished$/d; s/\t.*//' | paste -sd,)
  if [[ -z $points ]]; then
    say "nothing is left to run, nothing is submitted"
    exit 0
  fi
  say "array: $points"
  first+=(--array="$points") # the user's own --array comes later and wins
fi

# Read the first line without $(...): with --wait, sbatch prints the job's number at once but runs
# until the job ends.
exec {answer}< <(exec sbatch "${first[@]}" "${options[@]}" "$@")
sbatch=$!
if ! IFS= read -r line <&"$answer"; then
  wait "$sbatch" # with sbatch's exit code and message
  exit
fi
job=${line%%;*} on=()
[[ $line != *';'* ]] || on=(--clusters="${line#*;}")

cancel() {
  local code=$?
  if scancel "${on[@]}" "$job"; then
    say "not submitted: job $job is cancelled"
  else
    say "job $job is still on hold: scancel $job"
  fi
  exit "$code"
}
trap cancel EXIT
trap 'exit 130' INT TERM HUP

fields=JobID,Name,NumNodes,NumTasks,tres-per-node,tres-per-task,tres-per-job,TimeLimit,Requeue,StdOut
shown=$(squeue "${on[@]}" --noheader --jobs="$job" --Format="${fields//,/:1024,}:1024")
"$python" -m utils.submit.check "$PWD" "$fields" "$shown" "${#options[@]}" "${options[@]}" "$@" >&2

if [[ $only_check == yes ]]; then
  say "checked; not submitted (--check)"
  exit 0
fi
[[ $stays_held == yes ]] || scontrol "${on[@]}" release "$job" >&2
trap - EXIT INT TERM HUP
[[ $parsable == yes ]] && printf '%s\n' "$line" || printf 'Submitted batch job %s\n' "$job"
say "watch:   squeue --job=$job"
say "cancel:  scancel $job"
wait "$sbatch"
