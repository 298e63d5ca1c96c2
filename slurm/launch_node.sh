#!/usr/bin/env bash
# Starts a script's processes on this node, one per GPU:
#
#   slurm/launch_node.sh sft_train.py --config recipes/sft/demo_cpu.yaml       this machine
#   srun --ntasks-per-node=1 slurm/launch_node.sh sft_train.py ...             each node of a job
#
# The job scripts run it under srun. The script's --strategy, or its recipe's, says how they share
# the model (ACCELERATE_CONFIG wins over it); paths are taken from the repository's root. Exit codes:
# see utils/config/errors.py.
set -euo pipefail

# Until Python takes them: a request to stop must not kill the node's launcher as it starts.
trap '' USR1 TERM

cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
find_python
# Another Python than the environment's lacks packages, or is too old for the code.
problem=$("${python[@]}" -c 'import utils.launch.node' 2>&1) || refuse 69 \
  "${python[*]} cannot start the launcher (${problem##*$'\n'}): activate the environment that has Stoker's packages in slurm/cluster.env."

# A core dump of one process is as large as its memory; thousands have filled file systems.
ulimit -c 0

# exec: the Python process is the task, so Slurm's signals reach it and its exit code is srun's.
exec "${python[@]}" -m utils.launch.node "$@"
