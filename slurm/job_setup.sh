# shellcheck shell=bash
# What every job script starts with; sourced in the batch shell, with `root` set to the repository.
# Goes there, reads cluster.env, and has what the scripts share: log lines, refusals, requeueing.

say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

# refuse EXIT_CODE MESSAGE: before anything was started.
refuse() {
  printf '%s: %s\n' "${SLURMD_NODENAME:-${HOSTNAME:-this machine}}" "$2" >&2
  exit "$1"
}

[[ -n ${SLURM_JOB_ID:-} ]] || refuse 2 \
  "${BASH_SOURCE[-1]} is a job script: sbatch ${BASH_SOURCE[-1]} ... (without Slurm: slurm/launch_node.sh SCRIPT ...)"
# What Slurm counts is counted with below, and bash evaluates words in arithmetic.
for name in SLURM_{JOB_ID,JOB_NUM_NODES,RESTART_COUNT,CPUS_PER_TASK} \
  SLURM_ARRAY_{JOB_ID,TASK_ID,TASK_MIN,TASK_MAX,TASK_STEP,TASK_COUNT}; do
  [[ ${!name:-0} =~ ^[0-9]+$ ]] || refuse 2 "$name is $(printf '%q' "${!name}"), no number: let Slurm set it."
done
# Slurm's stop signal has no one to pass it on to before the step runs; the run knows the time too.
trap '' USR1

cd -- "$root" || exit 2
root=$PWD

for name in STOKER_SRUN_ARGS STOKER_CONTAINER; do
  [[ -z ${!name:-} ]] || refuse 2 \
    "$name is set in the environment, which cannot hold a list: set it in slurm/cluster.env, as $name=(...)."
done
# shellcheck disable=SC2034 # for who sources this
STOKER_SRUN_ARGS=() STOKER_CONTAINER=()
if [[ -f slurm/cluster.env ]]; then
  # Environments' activation scripts read unset variables. A trap on EXIT may be a caller's own.
  set +u
  trap 'printf "%s: slurm/cluster.env failed, see above\n" "${SLURMD_NODENAME:-}" >&2' ERR
  # shellcheck source=/dev/null # the user's own
  source slurm/cluster.env
  trap - ERR
  set -u
fi

# Commands of Slurm take `123` for all tasks of an array whose last task has this job id.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
restarts=${SLURM_RESTART_COUNT:-0}

# Slurm sets this from version 23 on.
if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then
  ends=$(squeue --noheader --jobs="$job" --format=%e) || ends=
  if [[ $ends == [0-9][0-9][0-9][0-9]-*T* ]]; then
    SLURM_JOB_END_TIME=$(date --date="$ends" +%s)
    export SLURM_JOB_END_TIME
  fi
fi

# Prints words so that a shell would read them again as they are, without secrets: `--hub_token x`
# has no place on a command line, but a log is read by more people than one.
quoted() {
  local secret='^--?([a-z_]*_)?(token|(hub|hf|access|auth|write|bearer)_token|api_key|secret|password)$'
  local word flag hide='' shown=()
  for word in "$@"; do
    flag=${word%%=*}
    if [[ -n $hide && $word != --* ]]; then
      shown+=('***')
    elif [[ ${flag//-/_} =~ ${secret//-/_} && $word == *=* ]]; then
      shown+=("$(printf '%q' "$flag")=***")
    else
      shown+=("$(printf '%q' "$word")")
    fi
    hide=
    [[ ${flag//-/_} =~ ${secret//-/_} && $word != *=* ]] && hide=1
  done
  printf '%s' "${shown[*]}"
}

say_job() {
  say "job $job, start $((restarts + 1)): ${SLURM_JOB_NUM_NODES:-1} node(s) ${SLURM_JOB_NODELIST:-}"
  if [[ ${SLURM_JOB_END_TIME:-} =~ ^[0-9]+$ ]]; then
    local left=$((SLURM_JOB_END_TIME - $(date +%s)))
    say "time limit: $(date --date="@$SLURM_JOB_END_TIME" '+%F %T'), in $((left / 3600)) h $((left % 3600 / 60)) min; Slurm's stop signal comes before it as sbatch --signal says"
  else
    say "time limit: none that Slurm tells"
  fi
}

# run_step COMMAND: runs srun to its end and sets `code`. A stop signal that reaches this shell is
# passed on to the tasks, as USR1, on which srun acts just by forwarding it; `passed_on` names it.
#
# A caller that has run its last step ignores both: Slurm's TERM, which follows a requeue, must not
# take the last lines with it.
run_step() {
  local signalled='' status lost
  step='' passed_on=''
  # Set before the step starts: it would inherit that USR1 is ignored.
  for name in USR1 TERM; do
    # shellcheck disable=SC2064 # the name of this round
    trap "signalled=1; pass_on $name" "$name"
  done
  "$@" </dev/null &
  step=$!
  [[ -z $passed_on ]] || pass_on "$passed_on"
  code='' lost=''
  while :; do
    signalled=
    wait "$step" && status=0 || status=$?
    # A signal in the very moment of the end: bash (5.2) says -1, or 127 when asked again.
    if ((status < 0)); then
      lost=1
    elif ((status != 127)) || [[ -z $code$lost ]]; then
      code=$status
    fi
    [[ -n $signalled ]] || break
  done
  code=${code:-138} # as if the signal had ended the step
}

pass_on() {
  passed_on=$1
  [[ -n $step ]] || return 0
  say "job $job: got $1, asking the run to stop"
  kill -USR1 "$step" 2>/dev/null || true
}

# Sets `state`, `reason`, `slurm_restarts` and `may_requeue`, empty if Slurm does not answer.
# Not scontrol's output: a job's name, which is free text, looks there like any other line.
ask_slurm() {
  local answer
  answer=$(squeue --noheader --states=all --jobs="$job" \
    --Format=State:30,Reason:30,RestartCnt:12,Requeue:8 2>/dev/null) || answer=
  read -r state reason slurm_restarts may_requeue <<<"$answer" || true
}

# why_not_requeue: prints why this job must not or cannot be put back into the queue by us; nothing
# where it can. `go_on` is the command that does so by hand.
#
# What squeue says on a real Slurm (22.05), once the step has ended:
#   stopped by USR1, touch STOP, preemption's grace, scancel --signal   RUNNING
#   scancel                                          COMPLETING, restarts as before
#   time limit                                       COMPLETING, reason TimeLimit
#   scontrol requeue, a node lost, preempted         COMPLETING, one restart more
# `scontrol requeue` would succeed for a job that the user cancelled, and bring it back to life.
why_not_requeue() {
  : "${go_on:?}"
  ask_slurm
  [[ -n $state ]] || { sleep 2; ask_slurm; }
  if [[ ${slurm_restarts:-} =~ ^[0-9]+$ ]] && ((slurm_restarts > restarts)); then
    printf 'Slurm has put it back into the queue itself'
  elif [[ $state != RUNNING && $state != TIMEOUT && $reason != TimeLimit ]]; then
    if [[ -z $state ]]; then
      printf 'not requeued: squeue does not answer. To go on: %s' "$go_on"
    else
      printf 'cancelled: not requeued. To go on: %s' "$go_on"
    fi
  elif [[ $may_requeue == 0 ]]; then
    printf 'not requeued: it was handed in with --no-requeue, or the cluster forbids it. To go on: %s' "$go_on"
  fi
}

# requeue WHY: puts this job back into the queue, or says why not; returns either way.
# Slurm ends this shell soon after; what is to be said or removed has to be before.
requeue() {
  local why answer
  why=$(why_not_requeue)
  if [[ -n $why ]]; then
    say "job $job: $1; $why"
    return
  fi
  say "job $job: $1; putting it back into the queue (start $((restarts + 2)) will go on from there)"
  if answer=$(scontrol requeue "$job" 2>&1); then
    sleep 3 # Slurm kills what is left of the job; an exit now would only race with that
  else
    say "job $job: scontrol requeue failed: $answer. To go on: $go_on"
  fi
}
