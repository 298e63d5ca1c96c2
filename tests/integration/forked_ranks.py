"""Ranks of a launch as forks of a process that has imported everything, without torchrun's agent.

accelerate's own launcher makes the environment of the ranks. Only torchrun, which would start new
processes, is replaced. As with torchrun, the first rank that fails ends the others.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parents[2]
STRATEGIES = Path(__file__).parent / "cpu_strategies"
FOLDERS = (STRATEGIES, ROOT, ROOT / "tests" / "integration", ROOT / "tests" / "exactness")
_ENVIRONMENT = threading.Lock()  # held while this process's environment is changed
# Time that the other ranks have to end by themselves after one rank failed. On a slow machine each
# needs many seconds.
GRACE_S = 60
PRELOADED = (
    "accelerate", "datasets", "deepspeed", "dotenv.main", "peft", "transformers.trainer", "trl",
    "wandb", "pretrain", "sft_train", "utils.training.fine_tune_trainer", "utils.run.start",
    "utils.run.finish", "forked_ranks",
)  # fmt: skip


def rank_environment(
    options: Sequence[str], environment: Mapping[str, str], rank: int, ranks: int, port: int
) -> dict[str, str]:
    """Return the environment of a rank that `accelerate launch OPTIONS` starts."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    found: dict[str, str] = {}
    args = launch_command_parser().parse_args([*options, "script.py"])
    with (
        _ENVIRONMENT,
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("torch.distributed.run.run", side_effect=lambda _: found.update(os.environ)),
    ):
        launch_command(args)
    torchruns = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    torchruns |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return found | {name: str(value) for name, value in torchruns.items()}


@dataclass(frozen=True)
class Launched:
    """The end of a launch: its output, and the exit codes of its ranks."""

    returncode: int
    stdout: str
    codes: tuple[int, ...]  # none if torchrun started the ranks

    def succeeded(self) -> str:
        """Return the output of a launch that must have ended with exit code 0."""
        assert self.returncode == 0, self.stdout[-6000:]
        return self.stdout


class Ranks:
    """The ranks of one launch, from the start until `wait`; each has its own environment."""

    def __init__(
        self,
        script: Path,
        args: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        cwd: Path = ROOT,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, FOLDERS))
        os.environ["DS_ACCELERATOR"] = "cpu"
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - goes with this object
        self.processes = []
        for environment in environments:
            command = (str(script), list(args), dict(environment), self._output.name, str(cwd))
            process = context.Process(target=run_rank, args=command)
            process.start()
            self.processes.append(process)

    def output(self) -> str:
        """Return the output of all ranks so far."""
        return Path(self._output.name).read_text(errors="replace")

    def wait(self, timeout_s: float, grace_s: float = GRACE_S) -> Launched:
        """Wait for all ranks; kill the others `grace_s` after one fails. Raises TimeoutError."""
        give_up_at = time.monotonic() + timeout_s
        while running := [process for process in self.processes if process.exitcode is None]:
            wait([process.sentinel for process in running], timeout=0.2)
            if any(process.exitcode for process in self.processes):
                give_up_at = min(give_up_at, time.monotonic() + grace_s)
                self._end_others(give_up_at)
            elif time.monotonic() > give_up_at:
                self._end_others(give_up_at)
                raise TimeoutError(f"ranks do not end: {self.output()[-6000:]}")
        codes = tuple(process.exitcode for process in self.processes)
        return Launched(next(filter(None, codes), 0), self.output(), codes)

    def _end_others(self, give_up_at: float) -> None:
        for process in self.processes:
            process.join(max(0, give_up_at - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def run_rank(
    script: str, args: list[str], environment: dict[str, str], output: str, cwd: str
) -> None:
    """Run a script as main module in a fork; exit with its exit code."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    # Loader workers of the rank must not use this process's fork server.
    multiprocessing.set_start_method("fork", force=True)
    apply_changes()
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code: object = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    if "RANK" not in environment:  # ranks of a launch skip the interpreter's teardown
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def apply_changes() -> None:
    """Apply the changes of cpu_strategies/sitecustomize.py to imported modules."""
    import sitecustomize

    for name, change in sitecustomize.wanted_changes().items():
        change(importlib.import_module(name))
