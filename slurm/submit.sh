#!/usr/bin/env bash
# Checks a job without a GPU, then submits it. Takes the arguments of sbatch:
#
#   slurm/submit.sh --nodes=4 --time=24:00:00 slurm/multinode_job.sh sft_train.py --config my.yaml
#   slurm/submit.sh --check --nodes=4 slurm/multinode_job.sh ...      only check
#   slurm/submit.sh --when=H100-80GB --nodes=4 slurm/multinode_job.sh ...   when would it finish?
#   slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml    all unfinished points
#
# The job enters the queue on hold. A dry run compares the resources that Slurm understood with the
# settings and the accelerate config, and prints the plan. Then the job is released, or cancelled
# with the exit code of the dry run.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

usage() { sed -n '2,7s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"; }

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
only_check='' when=''
case ${1:-} in
--check) only_check=yes && shift ;;
--when | --when=*) when=$1 && shift ;;
esac
if (($# == 0)); then
  usage >&2
  exit 2
fi

# The job script is the first word that is a file which begins with #!, as sbatch demands.
options=() tested=() stays_held='' parsable=''
while (($#)); do
  if [[ -f $1 ]] && IFS= read -r -n 2 magic <"$1" && [[ $magic == '#!' ]]; then
    break
  fi
  case $1 in
  -H | --hold) stays_held=yes ;;
  --parsable) parsable=yes ;;
  esac
  options+=("$1")
  [[ $1 == -H || $1 == --hold ]] || tested+=("$1")
  shift
done
if (($# == 0)); then
  for word in "${options[@]}"; do
    [[ $word != *.sh ]] || say "no job script $word in $PWD; there are: $(cd -- "${BASH_SOURCE[0]%/*}" && echo *_job.sh)"
  done
  say "no job script among the words: slurm/submit.sh [SBATCH OPTIONS] slurm/train_job.sh SCRIPT ARGUMENTS"
  exit 2
fi

late='^--(account|array|constraint|cpus-per-task|exclude|exclusive|gpus(-per-node|-per-task)?|gres|mem|nodelist|nodes|ntasks(-per-node)?|partition|qos|time)(=|$)'
for word in "${@:2}"; do
  [[ ! $word =~ $late ]] || say "note:    ${word%%=*} stands after $1, so sbatch does not read it: options of sbatch stand before the job script"
done

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
export STOKER_ROOT=$root # the job finds the repository from any directory
python="$root/slurm/run_python.sh" # a separate process: sbatch passes this environment on

if [[ -n $when ]]; then
  type -P sbatch >/dev/null || { say "no sbatch on PATH: --when asks Slurm" && exit 69; }
  gpu=${when#--when}
  exec "$python" -m utils.submit.when "$PWD" "${gpu#=}" "${#options[@]}" "${options[@]}" "$@"
fi

array=()
if [[ ${1##*/} == sweep_job.sh && -n ${2:-} && -z ${SBATCH_ARRAY_INX:-} ]]; then
  points=$("$python" -m utils.submit.sweep points "$2" | sed '/\tfinished$/d; s/\t.*//' | paste -sd,)
  if [[ -z $points ]]; then
    say "nothing is left to run, nothing is submitted"
    exit 0
  fi
  say "array: $points"
  array=(--array="$points") # the user's own --array comes later and wins
fi

# status.py prints this command for a resume. It is written to provenance.json. STOKER_ON_EVENT may
# contain a token.
submit=slurm/submit.sh there='' variables=''
for name in DS_ACCELERATOR "${!ACCELERATE_@}" "${!STOKER_@}"; do
  case $name in STOKER_ROOT | STOKER_SUBMITTED | STOKER_ON_EVENT) continue ;; esac
  [[ -z ${!name:-} ]] || printf -v variables '%s%s=%q ' "$variables" "$name" "${!name}"
done
if [[ ! . -ef $root ]]; then
  submit=$0
  printf -v there 'cd %q && ' "$PWD"
fi
printf -v STOKER_SUBMITTED '%q ' "$submit" "${options[@]}" "$@"
STOKER_SUBMITTED=$there$variables$STOKER_SUBMITTED
export STOKER_SUBMITTED

# Read the first line without $(...): with --wait, sbatch prints the job's number at once but runs
# until the job ends.
exec {answer}< <(exec sbatch --hold --parsable "${array[@]}" "${options[@]}" "$@")
sbatch=$!
export -n STOKER_SUBMITTED # for jobs alone
if ! IFS= read -r line <&"$answer"; then
  wait "$sbatch" && exit || code=$? # with sbatch's exit code and message
  # Print the partitions, unless sbatch could not read its options (255).
  ((code == 255)) || { sinfo -o "%20P %12l %6D %6c %10m %20G %f" 2>/dev/null; } >&2 ||
    say "Slurm does not answer. Without Slurm: slurm/launch_node.sh SCRIPT ARGUMENTS"
  exit "$code"
fi
job=${line%%;*} on=()
[[ $line != *';'* ]] || on=(--clusters="${line#*;}")

cancel() {
  local code=$?
  rm -f -- "$root/.stoker/submitted-$job"
  if scancel "${on[@]}" "$job"; then
    say "not submitted: job $job is cancelled"
  else
    say "job $job is still on hold: scancel $job"
  fi
  exit "$code"
}
trap cancel EXIT
trap 'exit 130' INT TERM HUP

# refusal JOB_SCRIPT ARGUMENTS: prints sbatch's refusal of this job without --hold. On hold, Slurm
# accepts a job that it can never start.
refusal() {
  local line text=''
  text=$(sbatch --test-only "${array[@]}" "${tested[@]}" "$@" 2>&1 </dev/null) && return
  [[ $text == *'node configuration is not available'* ]] || return 0
  # --test-only leaves out nodes that are down now. For a job in the future, sbatch counts them.
  trap '' INT TERM HUP # this job must not stay in the queue
  text=
  while IFS= read -r line; do
    if [[ $line =~ ^[0-9]+(\;.*)?$ ]]; then
      scancel "${on[@]}" "${line%%;*}"
      printf 'too few nodes that fit are up now: the job waits for others (sinfo -R)'
      return
    fi
    text+=$line$'\n'
  done < <(exec sbatch --parsable "${array[@]}" "${tested[@]}" --begin=now+52weeks --mail-type=NONE "$@" 2>&1)
  printf '%s' "$text"
}

qos=Name,Flags # without accounting of limits, Slurm ignores the others
if [[ $(scontrol "${on[@]}" show config || true) =~ AccountingStorageEnforce[^$'\n']*limits ]]; then
  qos+=,MaxWall,MaxTRES,MaxTRESPU,GrpTRES
fi
refused=$(refusal "$@")
answers=(
  "$refused"
  "$(scontrol "${on[@]}" --oneliner show partition || true)"
  "$(sinfo "${on[@]}" --noheader --format='%R|%c|%m|%G|%f' || true)"
  "$(sacctmgr -nP show qos format="$qos" 2>/dev/null || true)"
)

fields=JobID,Name,NumNodes,NumTasks,tres-per-node,tres-per-task,tres-per-job,TimeLimit,Requeue,StdOut
fields+=,Partition,QOS,MinMemory,NumCPUs,cpus-per-task,MinTime
shown=$(squeue "${on[@]}" --noheader --jobs="$job" --Format="${fields//,/:1024,}:1024")
"$python" -m utils.submit.check "$PWD" "$fields" "$shown" "${answers[@]}" \
  "${#options[@]}" "${options[@]}" "$@" >&2

if [[ $only_check == yes ]]; then
  say "checked; not submitted (--check)"
  exit 0
fi
[[ $stays_held == yes ]] || scontrol "${on[@]}" release "$job" >&2
trap - EXIT INT TERM HUP

# Remove the notes of jobs that were cancelled before they had a log, and those of long ago.
notes=("$root"/.stoker/submitted-*)
if [[ -f ${notes[0]} ]] && queue=$(squeue --me --noheader --format=%A); then
  for note in "${notes[@]}"; do
    log=$(sed -n 2p -- "$note" 2>/dev/null) || continue # its job ends now
    [[ -f $log || $'\n'$queue$'\n' == *$'\n'"${note##*-}"$'\n'* ]] || rm -f -- "$note"
  done
  find "$root/.stoker" -maxdepth 1 -name 'submitted-*' -mtime +60 -delete || true
fi
[[ $parsable == yes ]] && printf '%s\n' "$line" || printf 'Submitted batch job %s\n' "$job"
say "watch:   python status.py --watch"
say "cancel:  scancel $job"
wait "$sbatch"
