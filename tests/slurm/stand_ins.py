"""Stand-ins for Slurm's commands, which record their arguments and environment."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from launching import ROOT

_RECORD = r"""#!/bin/bash
name=${0##*/}
echo "$name ${1-}" >>"$STAND_IN/calls"
printf '%s\0' "$@" >"$STAND_IN/$name.arguments"
env -0 >"$STAND_IN/$name.environment"
"""
_COMMANDS = {
    "srun": _RECORD
    + r"""
for left in verdict.txt exit_code run_started; do
  [[ ! -f $STAND_IN/$left ]] || cp "$STAND_IN/$left" "$STOKER_NOTES_DIR/"
done
[[ ! -f $STAND_IN/at_srun ]] || source "$STAND_IN/at_srun"
read -r code <"$STAND_IN/srun.code"
exit "$code"
""",
    "squeue": _RECORD
    + r"""
[[ ! -f $STAND_IN/at_squeue ]] || source "$STAND_IN/at_squeue"
cat "$STAND_IN/state"
""",
    "scontrol": _RECORD
    + r"""
[[ $* != *config || ! -f $STAND_IN/config ]] || cat "$STAND_IN/config"
if [[ -f $STAND_IN/denied ]]; then
  cat "$STAND_IN/denied"
  exit 1
fi
""",
    "sbatch": _RECORD + 'cat "$STAND_IN/sbatch.output"\nexit "$(<"$STAND_IN/sbatch.code")"\n',
    "scancel": _RECORD,
    "sinfo": _RECORD + '[[ ! -f $STAND_IN/down ]] || cat "$STAND_IN/down"\n',
    "sacctmgr": _RECORD,
    "python": _RECORD
    + r"""
[[ ! -f $STAND_IN/python.output ]] || cat "$STAND_IN/python.output"
""",
    "sleep": "#!/bin/bash\n",
}


class StandIns:
    """A copy of slurm/ in `root`, and a folder with the stand-ins."""

    def __init__(self, directory: Path, root: Path):
        self.directory = directory
        self.root = root
        self.commands = directory / "commands"
        self.commands.mkdir(parents=True)
        for name, text in _COMMANDS.items():
            (self.commands / name).write_text(text)
            (self.commands / name).chmod(0o755)
        copy_scripts(root)
        self.answer(code=0)
        self.sbatch_says("77\n")
        self.slurm_says("RUNNING", "None", 0, 1)

    def answer(self, code: int) -> None:
        """Set srun's exit code."""
        (self.directory / "srun.code").write_text(f"{code}\n")

    def slurm_says(self, state: str, reason: str, restarts: int, may_requeue: int) -> None:
        """Set the columns of squeue's answer."""
        columns = f"{state:30}{reason:30}{restarts:<12}{may_requeue:<8}\n"
        (self.directory / "state").write_text(columns)

    def sbatch_says(self, text: str, code: int = 0) -> None:
        """Set sbatch's output and exit code."""
        (self.directory / "sbatch.output").write_text(text)
        (self.directory / "sbatch.code").write_text(str(code))

    def calls(self) -> list[list[str]]:
        """Return the name and the first argument of each call, and forget the calls."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines()
        path.unlink()
        return [line.split() for line in lines]

    def leaves(self, code: int, verdict: str) -> None:
        """Let the stand-in for srun leave a launcher's verdict, and the mark of a begun run."""
        (self.directory / "run_started").write_text("runs/a\n")
        (self.directory / "exit_code").write_text(f"{code}\n")
        (self.directory / "verdict.txt").write_text(f"{verdict}\n")

    def run(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None,
        cwd: Path | None = None, without: Iterable[str] = (), log: IO[str] | int = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a script as slurmd would, in the environment of job 7 on one node."""
        fixed = {
            "PATH": f"{self.commands}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(self.directory),
            "STAND_IN": str(self.directory),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "SLURM_CPUS_ON_NODE": "2",
            "SLURM_JOB_CPUS_PER_NODE": "2",
        }
        environment = fixed | dict(env or {})
        for name in without:
            del environment[name]
        return subprocess.run(
            [self.root / script, *arguments],
            env=environment, cwd=cwd or self.root, text=True, timeout=600, check=False,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def arguments(self, command: str) -> list[str]:
        """Return the arguments of the last call of a command."""
        return self._words(f"{command}.arguments")

    def was_called(self, command: str) -> bool:
        return (self.directory / f"{command}.arguments").exists()

    def environment(self, command: str) -> dict[str, str]:
        """Return the environment of the last call of a command."""
        return dict(pair.split("=", 1) for pair in self._words(f"{command}.environment"))

    def _words(self, name: str) -> list[str]:
        # Read bytes, because read_text() treats a carriage return as the end of a line.
        return (self.directory / name).read_bytes().decode().split("\0")[:-1]

    def forget(self) -> None:
        """Forget all earlier calls."""
        for path in self.directory.glob("*.arguments"):
            path.unlink()


def copy_scripts(root: Path) -> None:
    """Make a repository of the shipped job scripts and an empty training script."""
    ignored = shutil.ignore_patterns("cluster.env")
    shutil.copytree(ROOT / "slurm", root / "slurm", ignore=ignored)
    (root / "train.py").touch()
