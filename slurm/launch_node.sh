#!/usr/bin/env bash
# Starts a script's processes on this node, one per GPU:
#
#   slurm/launch_node.sh sft_train.py --config recipes/sft/demo_cpu.yaml       this machine
#   srun --ntasks-per-node=1 slurm/launch_node.sh sft_train.py ...             each node of a job
#
# The job scripts run it under srun. The training script's --strategy, or its recipe's, selects how
# the processes share the model. ACCELERATE_CONFIG overrides it. Paths are relative to the
# repository's root. utils/config/errors.py lists the exit codes.
set -euo pipefail

# Ignore stop signals until Python handles them: they must not kill the launcher as it starts.
trap '' USR1 TERM
trap 'exit 130' INT

cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
find_python
# shellcheck source=slurm/stage_env.sh
[[ -z ${STOKER_STAGE_ENV:-} ]] || source slurm/stage_env.sh
# This fails if Python is too old for the code, or if the container does not start.
problem=$("${python[@]}" -c 'import utils.launch.node' 2>&1) || refuse 69 \
  "${python[*]} cannot start the launcher (${problem##*$'\n'}): activate the environment that has Stoker's packages in slurm/cluster.env."

# A core dump is as large as the memory of its process. Thousands of them have filled file systems.
ulimit -c 0

# exec: the Python process becomes the task. It gets Slurm's signals, and srun gets its exit code.
exec "${python[@]}" -m utils.launch.node "$@"
