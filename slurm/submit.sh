#!/usr/bin/env bash
# Checks a job without a GPU and without queueing, then hands it in. Takes what sbatch takes:
#
#   slurm/submit.sh --nodes=4 --time=24:00:00 slurm/multinode_job.sh sft_train.py --config my.yaml
#   slurm/submit.sh --check --nodes=4 slurm/multinode_job.sh ...      only check
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml    all unfinished points
#
# The check holds settings, accelerate config and request against each other and says what will
# happen; what it refuses is not handed in, and its exit code is this script's.
set -euo pipefail

usage() {
  sed -n '2,6s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
only_check=no
if [[ ${1:-} == --check ]]; then
  only_check=yes
  shift
fi
if (($# == 0)); then
  usage >&2
  exit 2
fi

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
directory="$PWD"
facts="$(mktemp -d)"
trap 'rm -rf -- "$facts"' EXIT

# A script of its own: sbatch passes this environment on, and the job reads cluster.env itself.
"$root/slurm/run_python.sh" -m utils.submit.submit "$directory" "$facts" "$@"
if [[ ! -f "$facts/options" ]]; then
  exit 0 # nothing is left to run
fi
if [[ $only_check == yes ]]; then
  printf 'checked; not handed in (--check)\n' >&2
  exit 0
fi

mapfile -d '' -t options <"$facts/options"
# A pipe and not $(...): with --wait sbatch says the number at once and ends with the job.
sbatch "${options[@]}" "$@" | while IFS= read -r line; do
  printf '%s\n' "$line"
  if [[ $line =~ ^(Submitted\ batch\ job\ )?([0-9]+) ]]; then
    while IFS= read -r hint; do
      printf '%s\n' "${hint//%JOB%/"${BASH_REMATCH[2]}"}" >&2
    done <"$facts/help"
  fi
done
