# shellcheck shell=bash
# Reads slurm/cluster.env. Scripts that start processes source it in the repository's root.
# Sets `node` and the lists STOKER_CONTAINER and STOKER_SRUN_ARGS, and defines the functions below.

node=${SLURMD_NODENAME:-${HOSTNAME:-this machine}}

# refuse EXIT_CODE MESSAGE: ends this script before it started a process. In a step, it also writes
# code and message to the notes of the job script. srun then ends the tasks of the other nodes:
# without the notes, these ends would look like the cause. The first verdict stays.
refuse() {
  printf '%s: %s\n' "$node" "$2" >&2 || true
  if [[ -d ${STOKER_NOTES_DIR:-} ]] &&
    (set -C; printf '%s: %s\n' "$node" "$2" >"$STOKER_NOTES_DIR/verdict.txt") 2>/dev/null; then
    printf '%s\n' "$1" >"$STOKER_NOTES_DIR/exit_code"
  fi
  exit "$1"
}

for name in STOKER_SRUN_ARGS STOKER_CONTAINER; do
  [[ -z ${!name:-} ]] || refuse 2 \
    "$name is set in the environment, which cannot hold a list: set it in slurm/cluster.env, as $name=(...)."
done
# shellcheck disable=SC2034 # scripts that source this file use them
STOKER_SRUN_ARGS=() STOKER_CONTAINER=()
if [[ -f slurm/cluster.env ]]; then
  set +u # environments' activation scripts read unset variables
  trap 'refuse 69 "slurm/cluster.env failed, see above: bash slurm/cluster.env shows where, on this node."' EXIT
  # shellcheck source=/dev/null # the user's file
  source slurm/cluster.env
  trap - EXIT
  set -u
fi

# Sets `python`, the words that start it on this machine.
find_python() {
  python=("${STOKER_CONTAINER[@]}" python)
  command -v -- "${python[0]}" >/dev/null || refuse 69 \
    "there is no $(printf '%q' "${python[0]}") on PATH: activate the environment, or set STOKER_CONTAINER=(apptainer exec IMAGE), in slurm/cluster.env (see slurm/cluster.env.example)."
}
