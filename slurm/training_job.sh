# shellcheck shell=bash
# The part that all training jobs share, in the batch shell on the first node. The job scripts
# source it, with `root` set to the repository, `job_script` to their name, and SCRIPT ARGUMENTS as
# "$@". Exits with the exit code of the run (utils/config/errors.py), and requeues the job for 75
# and 76.

job_script=${job_script:-slurm/multinode_job.sh} # for messages
# shellcheck source=slurm/job_setup.sh
source "$root/slurm/job_setup.sh"

if [[ $job_script == slurm/train_job.sh && ${SLURM_JOB_NUM_NODES:-1} != 1 ]]; then
  refuse 2 "train_job.sh is for one node, not $SLURM_JOB_NUM_NODES: sbatch slurm/multinode_job.sh takes the same arguments."
elif (($# == 0)); then
  refuse 2 "no script given: sbatch [OPTIONS] $job_script SCRIPT ARGUMENTS ..., as in sbatch $job_script sft_train.py --config my_run.yaml"
elif [[ ! -f $1 ]]; then
  refuse 2 "$(printf '%q' "$1") is no file in $root: name a script, as in pretrain.py or sft_train.py, before its arguments."
fi

# Prints the smallest number of cores of the job's nodes. A step has one number for all nodes.
cores_per_node() {
  local fewest='' count
  # SLURM_JOB_CPUS_PER_NODE is like 64(x3),32
  while IFS= read -r count; do
    count=${count%%(*}
    [[ $count =~ ^[0-9]+$ ]] || continue
    if [[ -z $fewest ]] || ((count < fewest)); then fewest=$count; fi
  done <<<"${SLURM_JOB_CPUS_PER_NODE//,/$'\n'}"
  printf '%s' "${fewest:-${SLURM_CPUS_ON_NODE:-1}}"
}

# Ranks and launchers of all nodes write their notes here. The notes of a failed start stay.
notes=$root/.stoker/job-$job.$restarts
rm -rf -- "$root/.stoker/job-$job."*
if ! mkdir -p -- "$root/.stoker" || ! mkdir -m 700 -- "$notes"; then
  refuse 74 "$notes cannot be made: the repository has to be yours and seen by all nodes."
fi

step_options=(
  --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
  --cpus-per-task="${SLURM_CPUS_PER_TASK:-$(cores_per_node)}" # srun ignores sbatch's since 22.05
  --kill-on-bad-exit=1 --wait=120 --input=none --export=ALL
)
# --gres=gpu:4 on the command line overrides the script's --gpus-per-node, but srun would still read
# --gpus-per-node from the environment.
gpus=${SLURM_GPUS_ON_NODE:-no}
if [[ ${SLURM_GPUS_PER_NODE:-} == 0 && -z ${SLURM_GPUS_PER_TASK:-}${SLURM_GPUS:-} ]]; then
  gpus=no # with --exclusive, SLURM_GPUS_ON_NODE counts GPUs that the job did not ask for
elif [[ -n ${SLURM_GPUS_PER_NODE:-} && ${SLURM_GPUS_PER_NODE##*:} != "${SLURM_GPUS_ON_NODE:-0}" ]]; then
  unset SLURM_GPUS_PER_NODE
fi

say "$(printf '%q' "$1"), each node: ${SLURM_CPUS_PER_TASK:-$(cores_per_node)} core(s), $gpus GPU(s)${ACCELERATE_CONFIG:+; ACCELERATE_CONFIG=$ACCELERATE_CONFIG}"

# Sets `verdict`, `code` and `down` (the nodes that failed) after a step.
judge_step() {
  verdict='' down=''
  if [[ -f $notes/exit_code ]]; then
    read -r code <"$notes/exit_code" || true
    [[ $code =~ ^[0-9]+$ ]] || code=1
    verdict=$(<"$notes/verdict.txt")
  elif ((code > 128 && code <= 192)); then
    # The launchers leave a verdict for every end of their workers, so a launcher itself was killed.
    verdict="srun or a node's launcher was killed by signal $((code - 128)), see any lines of srun above"
    code=76
  elif ((code >= 233 && code <= 236)); then
    # The last byte of Slurm's 1001 to 1004 (slurm_errno.h): communication failed.
    verdict="srun lost a node, see its lines above"
    code=76
  elif ((code == 253)); then
    code=79
    verdict="Slurm killed the job's processes because a node's memory ran out: sacct -j $job -o MaxRSS,ReqMem; ask for more (sbatch --mem), or use fewer data workers."
  elif ((code != 0)); then
    verdict="srun ended with exit code $code, see its lines above"
    ((round == 0)) || code=76
  fi
  if [[ $verdict == *'left no word'* || $verdict == *'lost the launcher of'* || $verdict == 'srun lost a node'* ]]; then
    down=$(sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --states=down --format=%N 2>/dev/null) || down=
    if [[ -n $down ]]; then
      verdict="node $down failed: $verdict"
      printf '%s\n' "$verdict" >"$notes/verdict.txt" || true # report.py reads it
    fi
  fi
  # These nodes trained before. After a requeue, others may replace the one that cannot any more.
  if ((round > 0 && code == 69)); then code=76; fi
}

# note_bad_nodes VERDICT: writes into the ledger of bad nodes if a node was the cause of the end.
note_bad_nodes() {
  local said lost
  ((code != 0 && code != 2 && code != 75)) || return 0
  lost=$(sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --states=down --format=%N 2>/dev/null) || lost=
  said=$(timeout --kill-after=2 20 env -u STOKER_NOTES_DIR slurm/run_python.sh \
    -m utils.launch.ledger note "$notes" "$code" "${lost//$'\n'/,}" "$1" </dev/null) ||
    said='the ledger of bad nodes was not written, see above'
  [[ -z $said ]] || say "job $job: $said"
}

# may_restart: whether to start the ranks again in this job: after a lost rank, not after a signal,
# at most `restarts_in_job` times, and not if the ranks before began at the same checkpoint. Sets
# `most` and `began_at`.
may_restart() {
  local step
  [[ $code == 76 && -z $passed_on && -z $down && -s $notes/restarts ]] || return 1
  read -r most step <"$notes/restarts" || return 1
  [[ $most =~ ^[0-9]+$ && $step != "$began_at" ]] && ((round < most)) || return 1
  began_at=$step
  ask_slurm
  [[ $state == RUNNING && $slurm_restarts == "$restarts" ]] && step_is_over
}

# step_is_over: waits until Slurm knows no step of this job, so that no process of it is left on any
# node. This fails if a node does not answer.
step_is_over() {
  local left tries
  for ((tries = 0; tries < 120; tries++)); do
    [[ -z $passed_on ]] || return 1
    left=$(squeue --noheader --steps --jobs="$job" --format=%i 2>/dev/null) || return 1
    [[ $left =~ \.[0-9]+ ]] || return 0
    sleep 1
  done
  return 1
}

# first_report: prints when the first rank reported its end, in unix seconds.
first_report() {
  local times
  times=$(stat --format=%.2Y -- "$notes"/rank-*.json 2>/dev/null) || times=$EPOCHSECONDS
  sort --numeric-sort <<<"$times" | head --lines=1
}

round=0 began_at=''
unset STOKER_LOST_AT
while [[ -z $passed_on ]]; do
  export STOKER_NOTES_DIR=$notes STOKER_RESTART_IN_JOB=$round
  run_step srun "${step_options[@]}" "${STOKER_SRUN_ARGS[@]}" "$root/slurm/launch_node.sh" "$@"
  judge_step
  note_bad_nodes "$verdict"
  [[ ! -s $notes/run_started ]] || run=$(<"$notes/run_started")
  may_restart || break
  round=$((round + 1))
  say "job $job: ${verdict%%$'\n'*}; restart $round of at most $most inside the job"
  STOKER_LOST_AT=$(first_report)
  export STOKER_LOST_AT
  notes=$root/.stoker/job-$job.$restarts.$round
  mkdir -m 700 -- "$notes" || break
done
trap '' USR1 TERM

# A node that does not see the repository cannot leave a verdict there. srun ends the tasks of the
# other nodes and returns their exit code. So ask all nodes; only this check uses exit code 200.
if ((code != 0)) && [[ ! -f $notes/run_started && -z $passed_on ]] && ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
  ask_slurm
  seen=0 unseen=''
  if [[ $state == RUNNING ]]; then
    # shellcheck disable=SC2016 # the nodes expand them
    unseen=$(timeout 10 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 \
      --input=none bash -c '[[ -x $1 ]] || { printf "%s does not see %s\n" "$SLURMD_NODENAME" "$1"; exit 200; }' \
      bash "$root/slurm/launch_node.sh" 2>/dev/null) || seen=$?
    [[ -z $unseen ]] || printf '%s\n' "$unseen" || true
  fi
  if ((seen == 200)); then
    note_bad_nodes "$unseen"
    code=$((round > 0 ? 76 : 69)) # see judge_step
    verdict="a node does not see the repository in $root, see the lines above: it has to be on a file system that all nodes see; or leave the node out with sbatch --exclude."
  fi
fi

# Count starts that end before the run begins. The run counts later ones (utils/run/start.py).
fruitless=$root/.stoker/fruitless-$job
if ((code != 75 && code != 76)) || [[ -n $run ]]; then
  rm -f -- "$fruitless"
else
  printf 'start %s: %s\n' "$((restarts + 1))" "${verdict%%$'\n'*}" >>"$fruitless" || true
  if (($(wc -l <"$fruitless") > 3)); then
    verdict="no progress: job $job ended $(wc -l <"$fruitless") times in a row before its run started:
$(<"$fruitless")"
    ask_slurm
    if [[ $code == 75 && ($passed_on == USR1 || $reason == TimeLimit) ]]; then
      verdict+="
The signal before the time limit came first, after $SECONDS s: give the job more time (sbatch --time)."
    fi
    code=77
    rm -f -- "$fruitless"
  fi
fi

# Write the report of a failed run, because the run cannot do this itself. Do this before
# `scontrol requeue`, which ends this shell. The report has a time limit. If it fails, the job ends
# in the same way.
if [[ -n $run ]] && ((code != 0 && code != 75)); then
  timeout --kill-after=2 30 env -u STOKER_NOTES_DIR slurm/run_python.sh report.py "$run" </dev/null ||
    say "no report was written: python report.py $run"
fi

case $code in
0)
  rm -rf -- "$root/.stoker/job-$job."*
  if [[ $verdict == stopped* ]]; then # at max_gpu_hours
    notify stopped "$verdict"
  else
    notify finished "$1"
  fi
  say "job $job: ${verdict:-done}"
  ;;
75 | 76)
  if ((code == 75)); then rm -rf -- "$notes"; fi
  requeue "${verdict:-stopped}"
  ;;
*)
  notify failed "exit code $code: $verdict"
  say "job $job: failed with exit code $code, not requeued; every rank's last words: $notes"
  printf '%s\n' "$verdict" || true
  ;;
esac
# status.py shows a job that failed before its run began by this note.
if ((code == 0)) || [[ -n $run && $code != 75 && $code != 76 ]]; then
  rm -f -- "$root/.stoker/submitted-$job"
fi
exit "$code"
