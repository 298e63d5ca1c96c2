# shellcheck shell=bash
# Unpacks STOKER_STAGE_ENV, the tar archive of a Python environment, on this node's own disk, and
# lets `python` be the copy. slurm/launch_node.sh sources it. Copies are in
# FOLDER/stoker-env-UID/ARCHIVE-MTIME-SIZE: the next job finds them. If there is no copy, the
# environment of slurm/cluster.env stays, with a line that says why.

# Prints this user's folder for copies, on a disk of this node. Without one, it fails.
env_folder() {
  local base=${STOKER_STAGE_DIR:-} each folder
  for each in "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp; do
    [[ -z $base && -d $each ]] || continue
    case $(stat --file-system --format=%T -- "$each") in
    ext2/ext3 | xfs | btrfs | zfs | f2fs | jfs | overlayfs) base=$each ;;
    esac
  done
  [[ -n $base ]] || return
  folder=$base/stoker-env-$UID
  [[ -d $folder ]] || mkdir -m 700 -- "$folder" || return
  # /tmp is shared: another user may have made a link or a folder of this name.
  [[ ! -L $folder && -O $folder && $(stat --format=%A -- "$folder") == drwx--[-S]--- ]] &&
    [[ $(stat --format=%A -- "$base") != ????????w[!tT]* ]] && printf '%s' "$folder"
}

# unpack_env COPY: unpacks the archive, and removes other copies that no job uses.
unpack_env() {
  local copy=$1 old size free
  flock --nonblock "$env_used" || {
    printf 'its copy is damaged, and a job uses it'
    return 1
  }
  # Look at the archive before other copies go. The end of a plain one is zeros; tar does not notice
  # that they are missing.
  if [[ $STOKER_STAGE_ENV == *.tar ]] && tail --bytes=1024 -- "$STOKER_STAGE_ENV" | grep --quiet --invert-match -P '^\x00*$'; then
    printf 'it is cut short, or no tar archive'
    return 1
  fi
  # shellcheck disable=SC2154 # environment.sh sets it
  printf '%s: unpacking STOKER_STAGE_ENV %s\n' "$node" "$STOKER_STAGE_ENV" >&2
  for old in "${copy%/*}"/*.used; do
    [[ $old == "$copy.used" ]] ||
      (flock --nonblock 8 && flock --nonblock 9 && rm -rf -- "${old%.used}") 8>"${old%.used}.lock" 9>"$old" || true
  done
  rm -rf -- "$copy"
  size=$(stat --dereference --format=%s -- "$STOKER_STAGE_ENV")
  [[ $STOKER_STAGE_ENV == *.tar ]] || size=$((4 * size)) # compressed
  free=$(df --output=avail --block-size=1 -- "${copy%/*}" | tail --lines=1)
  if ((free < size)); then
    printf 'it needs about %s MiB, %s has %s MiB free' $((size >> 20)) "${copy%/*}" $((free >> 20))
    return 1
  fi
  # tar itself refuses members with .., and links that lead out of the folder while it unpacks.
  if mkdir -- "$copy" && tar --extract --no-same-owner --file="$STOKER_STAGE_ENV" --directory="$copy" 2>&1 &&
    { [[ ! -x $copy/bin/conda-unpack ]] || "$copy/bin/python" "$copy/bin/conda-unpack"; } &&
    is_unchanged "$copy" && sync --file-system "$copy"; then
    : >"$copy/.whole"
  else
    rm -rf -- "$copy"
    return 1
  fi
}

# is_unchanged COPY: whether the archive still has the time and size in the copy's name.
is_unchanged() {
  [[ $1 == *"$(stat --dereference --format=-%Y-%s -- "$STOKER_STAGE_ENV")" ]] ||
    { printf 'it changed while it was unpacked' && false; }
}

# Sets `env_copy`, unpacked and locked until this process ends. Without a copy, `why` has the reason.
find_env_copy() {
  local folder name making
  why='no folder on a disk of this node is yours alone: set STOKER_STAGE_DIR'
  folder=$(env_folder) || return
  why=$(stat --dereference --format=-%Y-%s -- "$STOKER_STAGE_ENV" 2>&1) || return
  name=${STOKER_STAGE_ENV##*/}
  env_copy=$folder/${name%.tar*}$why
  why="no locks in $folder"
  exec {making}>"$env_copy.lock" {env_used}>"$env_copy.used" || return
  flock "$making" || return # waits for a job that unpacks the same archive
  [[ -f $env_copy/.whole ]] || why=$(unpack_env "$env_copy") || why=${why:-not unpacked}
  if [[ -f $env_copy/.whole ]]; then
    flock --shared "$env_used"
  else
    exec {env_used}>&-
  fi
  exec {making}>&-
  [[ -f $env_copy/.whole ]]
}

# Lets `python` be that of the copy. Files of other people must not end the job: set -eu is off.
use_env_copy() {
  if [[ -d $env_copy/conda-meta && -f $env_copy/bin/activate ]]; then
    set +u
    # shellcheck source=/dev/null # conda-pack's
    source "$env_copy/bin/activate" || true
    set -u
  elif [[ -x $env_copy/bin/python ]]; then
    export PATH=$env_copy/bin:$PATH VIRTUAL_ENV=$env_copy
  else
    export PYTHONPATH=$env_copy${PYTHONPATH:+:$PYTHONPATH} # of pip install --target
  fi
}

# Waits of other nodes: this one may unpack for long (utils/launch/rendezvous.py).
export STOKER_MEET_TIMEOUT_S=${STOKER_MEET_TIMEOUT_S:-1800}
env_copy='' why=''
if ((${#STOKER_CONTAINER[@]})); then
  why='python is in STOKER_CONTAINER'
elif find_env_copy; then
  # psutil is compiled: it cannot be loaded from a disk that is mounted noexec.
  if why=$(use_env_copy && python -c 'import importlib.util, psutil, sys, utils.launch.node
print(sys.prefix, importlib.util.find_spec("torch").origin)' 2>&1) &&
    [[ ${why##*$'\n'} == *"$env_copy"* ]]; then
    why=''
    use_env_copy
  else
    why="it has no python with torch that works here: ${why##*$'\n'}"
  fi
fi
if [[ -n $why ]]; then
  printf '%s: STOKER_STAGE_ENV %s: the environment of slurm/cluster.env is used: %s\n' "$node" \
    "$STOKER_STAGE_ENV" "${why%%$'\n'*}" >&2
elif [[ ${SLURM_NODEID:-0} == 0 ]]; then
  printf '%s: python of %s\n' "$node" "$env_copy" >&2
fi
