# shellcheck shell=bash
# The beginning of every job script, sourced in the batch shell with `root` set to the repository.
# Changes to `root`, reads cluster.env and defines shared functions: log lines, refusals,
# requeueing.

# On a full disk no line can be written. The job still ends as usual and is requeued.
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*" || true; }

cd -- "$root" || exit 2
root=$PWD
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  printf '%s is a job script: sbatch %s ... (without Slurm: slurm/launch_node.sh SCRIPT ...)\n' \
    "${BASH_SOURCE[-1]}" "${BASH_SOURCE[-1]}" >&2
  exit 2
fi
# Ignore Slurm's stop signal while no step runs, because no process could get it. The run itself
# also watches the time limit.
trap '' USR1
# shellcheck source=slurm/environment.sh
source slurm/environment.sh

# Check Slurm's numbers, because bash would evaluate any other text in arithmetic.
for name in SLURM_{JOB_ID,JOB_NUM_NODES,RESTART_COUNT,CPUS_PER_TASK} \
  SLURM_ARRAY_{JOB_ID,TASK_ID,TASK_MIN,TASK_MAX,TASK_STEP,TASK_COUNT}; do
  [[ ${!name:-0} =~ ^[0-9]+$ ]] || refuse 2 "$name is $(printf '%q' "${!name}"), no number: let Slurm set it."
done

# To Slurm's commands, `123` means all tasks of an array whose last task has this job id.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
restarts=${SLURM_RESTART_COUNT:-0}
export STOKER_JOB_BEGAN=$EPOCHSECONDS # a file STOP that is newer is for this start
run='' # the run's directory, known once it started
say "job $job, start $((restarts + 1)): ${SLURM_JOB_NUM_NODES:-1} node(s) ${SLURM_JOB_NODELIST:-}, in $root"
again='to resume, submit the same command again'

# run_step COMMAND: runs srun to its end and sets `code` to its exit code. If this shell gets a stop
# signal (USR1 or TERM), it sends USR1 to srun, which forwards it to the tasks, and sets `passed_on`
# to the signal's name.
#
# After its last step, a script must ignore both signals: Slurm sends TERM after a requeue, and the
# last lines of the log must still be written.
passed_on=''
run_step() {
  local signalled='' status lost
  step=''
  # Set the traps before the step starts. Otherwise the step would inherit that USR1 is ignored.
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
    # If a signal comes just as the step ends, bash (5.2) returns -1, and 127 at the next call.
    if ((status < 0)); then
      lost=1
    elif ((status != 127)) || [[ -z $code$lost ]]; then
      code=$status
    fi
    [[ -n $signalled ]] || break
  done
  code=${code:-138} # as if the signal had ended the step
  step=''
}

pass_on() {
  passed_on=$1
  [[ -n $step ]] || return 0
  say "job $job: got $1, asking the run to stop"
  kill -USR1 "$step" 2>/dev/null || true
}

# Sets `state`, `reason`, `slurm_restarts` and `may_requeue`; empty if Slurm does not answer.
# It asks squeue: in scontrol's output, a job's name may be any text and look like another field.
ask_slurm() {
  local answer
  answer=$(squeue --noheader --states=all --jobs="$job" \
    --Format=State:30,Reason:30,RestartCnt:12,Requeue:8 2>/dev/null) || answer=
  read -r state reason slurm_restarts may_requeue <<<"$answer" || true
}

# why_not_requeue: prints why this script must not requeue the job; prints nothing if it may.
#
# How a step ended, and what squeue of Slurm 22.05 then prints:
#   stopped by USR1, touch STOP, preemption's grace, scancel --signal   RUNNING
#   scancel                                          COMPLETING, restarts as before
#   time limit                                       COMPLETING, reason TimeLimit
#   scontrol requeue, a node lost, preempted         COMPLETING, one restart more
# `scontrol requeue` also works for a job that the user cancelled. That job must not run again.
why_not_requeue() {
  ask_slurm
  [[ -n $state ]] || { sleep 2; ask_slurm; }
  if [[ ${slurm_restarts:-} =~ ^[0-9]+$ ]] && ((slurm_restarts > restarts)); then
    printf 'Slurm has requeued it itself'
  elif [[ -z $state ]]; then
    printf 'not requeued, squeue does not answer: %s' "$again"
  elif [[ $state == OUT_OF_ME* ]]; then
    printf 'ended by Slurm for lack of memory, not requeued: sbatch --mem; %s' "$again"
  elif [[ $state != RUNNING && $state != TIMEOUT && $reason != TimeLimit ]]; then
    printf 'cancelled, not requeued: %s' "$again"
  elif [[ $may_requeue == 0 ]]; then
    printf 'not requeued (--no-requeue, or the cluster forbids it): %s' "$again"
  fi
}

# notify EVENT TEXT: calls the user's STOKER_ON_EVENT, a command or the URL of a webhook, with
# EVENT RUN JOB TEXT (one line). If the command fails, the job ends in the same way.
notify() {
  local tell text=${2%%$'\n'*} rest=${2#*$'\n'} where=$run
  [[ -n ${STOKER_ON_EVENT:-} ]] || return 0
  [[ $text != *: || $text == "$2" ]] || text+=" ${rest%%$'\n'*}" # the reason is in the second line
  if [[ -z $where && -f $root/.stoker/submitted-$job ]]; then
    read -r where <"$root/.stoker/submitted-$job" # as slurm/submit.sh noted it
  fi
  case $STOKER_ON_EVENT in
  http://* | https://*) tell=(slurm/run_python.sh -m utils.launch.notify) ;;
  *) tell=("$STOKER_ON_EVENT") ;;
  esac
  export STOKER_ON_EVENT STOKER_EVENT=$1 STOKER_RUN=$where STOKER_JOB=$job STOKER_TEXT=$text
  tell+=("$STOKER_EVENT" "$STOKER_RUN" "$STOKER_JOB" "$STOKER_TEXT")
  timeout --kill-after=2 10 "${tell[@]}" </dev/null ||
    say "STOKER_ON_EVENT: its command ended with $?; nothing else depends on it"
}

# plan_to_leave_out: sets `leave_out`, the nodes that the job's next start has to leave out (the
# user's own --exclude and bad nodes), and `without`, words for the log. Both may be empty.
plan_to_leave_out() {
  local asked nodes answer
  leave_out='' without=''
  [[ ${STOKER_LEAVE_OUT_AFTER:-} != 0 && -e ${STOKER_LEDGER:-$root/.stoker/nodes.jsonl} ]] || return 0
  if asked=$(squeue --noheader --jobs="$job" --format='%x|%n|%v' 2>/dev/null) && [[ $asked == *'|'*'|'* ]] &&
    nodes=$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --format='%N|%t|%c|%m|%G|%f' 2>/dev/null) &&
    answer=$(timeout --kill-after=2 20 env -u STOKER_NOTES_DIR slurm/run_python.sh \
      -m utils.launch.ledger leave-out "$asked" "$nodes" </dev/null); then
    { IFS= read -r leave_out && IFS= read -r without; } <<<"$answer" || true
  else
    without='the ledger of bad nodes or Slurm does not answer, no node is left out'
  fi
}

# leave_out_nodes: applies the plan. Slurm accepts the change only for a job that waits.
leave_out_nodes() {
  local answer tries
  [[ -n $leave_out ]] || return 0
  for ((tries = 0; tries < 3; tries++)); do
    ! answer=$(scontrol update jobid="$job" ExcNodeList="$leave_out" 2>&1) || return 0
    sleep 1
  done
  say "job $job: the nodes are not left out, Slurm refuses that: $answer"
}

# requeue WHY: puts this job back into the queue, or prints why not. It returns in both cases, but
# after a requeue Slurm soon ends this shell: write all output and clean up before the call.
requeue() {
  local why answer event=stopped leave_out='' without=''
  why=$(why_not_requeue)
  if [[ -z $why || $why == *'requeued it itself' ]]; then
    plan_to_leave_out
  fi
  if [[ -n $why ]]; then
    [[ $why != *'requeued it itself' ]] || event=requeued
    leave_out_nodes
    notify "$event" "$1; $why${without:+; $without}"
    [[ -z $without ]] || say "job $job: $without (python status.py --nodes)"
    say "job $job: $1; $why"
    return
  fi
  notify requeued "$1; start $((restarts + 2)) will resume${without:+; $without}"
  [[ -z $without ]] || say "job $job: $without (python status.py --nodes)"
  say "job $job: ${1%.}; requeued, start $((restarts + 2)) will resume"
  if answer=$(scontrol requeue "$job" 2>&1); then
    leave_out_nodes
    sleep 3 # Slurm kills what is left of the job; an exit now would only race with that
  else
    notify stopped "requeueing failed ($answer): $again"
    say "job $job: scontrol requeue failed ($answer): $again"
  fi
}
