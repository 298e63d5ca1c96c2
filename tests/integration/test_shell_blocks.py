"""Bash runs every command of the documents and of the recipes' first lines, with stand-ins.

Programs that need a network, a GPU, Slurm or hours are stand-ins on PATH that record their
arguments. The real parsers then read the recorded arguments.
"""

import argparse
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from utils.config.preparation import check_preparation, parse_preparation, parse_sources
from utils.config.settings import parse_fine_tuning, parse_pretraining

ROOT = Path(__file__).parents[2]
SHELL_FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.yaml")]

STAND_IN = f"""#!{sys.executable} -SIE
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    file.write(json.dumps(sys.argv) + chr(10))
if sys.argv[0].endswith("/git"):
    os.mkdir(os.path.basename(sys.argv[-1]).removesuffix(".git"))
"""
# Options that the documents use, from the manuals of sbatch, srun and vLLM 0.11.
SLURM_OPTIONS = {
    *("--nodes", "--gpus-per-node", "--time", "--account", "--partition", "--array", "--check"),
    *("--ntasks-per-node", "--gpus", "--pty", "--when"),
}
VLLM_OPTIONS = {"--enable-lora", "--lora-modules", "--max-lora-rank"}
# For these programs the test only checks that bash starts them.
TAKEN_AS_THEY_ARE = {
    *("curl", "docker", "apptainer", "git", "grep", "pip", "rsync", "sacctmgr", "scancel"),
    *("scontrol", "sinfo", "squeue", "tail", "touch", "transformers", "wandb"),
    *("apt-get", "dpkg-deb", "head", "mv", "sed", "tar"),
}


def shell_lines(path: Path) -> list[str]:
    """Return the commands of a document's bash blocks, or of a recipe's first comment."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    else:
        head = re.match(r"(?:#.*\n)*", text)
        text = "\n".join(re.findall(r"^#   +(.*)", head[0] if head else "", flags=re.MULTILINE))
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clone of the repository in which programs and launchers are stand-ins."""
    directory = tmp_path_factory.mktemp("clone")
    for path in (*ROOT.glob("*.py"), *ROOT.glob("requirements*.lock"), ROOT / ".env.example"):
        (directory / path.name).symlink_to(path)
    for name in ("recipes", "accelerate_configs", "examples", "Makefile"):
        (directory / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "slurm", directory / "slurm")
    (directory / ".venv" / "bin").mkdir(parents=True)
    (directory / ".venv" / "bin" / "activate").touch()
    (directory / "programs").mkdir()
    for name in ("cp", "chmod", "mkdir"):
        (directory / "programs" / name).symlink_to(shutil.which(name) or name)
    for name in (*TAKEN_AS_THEY_ARE, *READERS):
        folder = "slurm" if name.endswith(".sh") else "programs"
        (directory / folder / name).write_text(STAND_IN)
        (directory / folder / name).chmod(0o755)
    (directory / ".venv" / "bin" / "pip").symlink_to(directory / "programs" / "pip")
    guide = (ROOT / "docs" / "running.md").read_text()
    (directory / "my_run.yaml").write_text(guide.split("```yaml")[1].split("```")[0])
    (directory / "my_chats.jsonl").touch()  # a raw file in train_data
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("path", filter(shell_lines, SHELL_FILES), ids=lambda path: path.name)
def test_commands_of_documents_are_understood(path, clone, tmp_path, monkeypatch):
    monkeypatch.chdir(clone)
    noted = tmp_path / "noted"
    noted.touch()
    for line in shell_lines(path):
        ended = subprocess.run(
            [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", line],
            env={"PATH": str(clone / "programs"), "NOTED": str(noted), "USER": "me"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{line}\n{ended.stderr}"
        shutil.rmtree(clone / "stoker", ignore_errors=True)
    calls = [json.loads(line) for line in noted.read_text().splitlines()]
    assert calls or not re.search(r"python|slurm", "".join(shell_lines(path)))
    for program, *words in calls:
        understood(Path(program).name, words)


def understood(program: str, words: list[str]) -> None:
    """Parse the arguments of a call as the program does; fail if it would refuse them."""
    for word in words:
        named = word.rpartition("=")[2]
        if re.match(r"(recipes|accelerate_configs|slurm|examples)/[\w/.-]+$", named):
            assert Path(named).exists(), named
    if program not in TAKEN_AS_THEY_ARE:
        READERS[program](words)


def read_script(words: Sequence[str]) -> None:
    """Parse the settings of a script, or of `-m MODULE`."""
    script, *arguments = words
    if script in ("-m", "-c"):
        read_module(*arguments) if script == "-m" else compile(arguments[0], "-c", "exec")
    elif script == "prepare_data.py":
        given = parse_preparation(arguments)
        check_preparation(given)
        assert parse_sources(given)
    elif script in ("pretrain.py", "sft_train.py"):
        parse = parse_pretraining if script == "pretrain.py" else parse_fine_tuning
        if {"--help", "--print_config"} & {*arguments}:
            with pytest.raises(SystemExit, match="0"):
                parse(arguments, description=None)
            return
        # A start with bf16 would need a GPU.
        dry = [] if "--dry_run" in arguments else ["--dry_run"]
        assert parse([*arguments, *dry], description=None).training.output_dir
    else:
        assert script.endswith(".py"), script
        read_module(script.removesuffix(".py").replace("/", "."), *arguments)


class UnderstoodError(Exception):
    """Raised in a module's main once its arguments are parsed, to end it there."""


def read_module(name: str, *arguments: str) -> None:
    """Run a module's main, but stop it once it has parsed its arguments."""
    if name in ("venv", "lm_eval"):  # lm_eval is not in the lock file
        return
    with pytest.MonkeyPatch.context() as patch:
        known = argparse.ArgumentParser.parse_known_args

        def stop_at_known(self, given=None, namespace=None):
            known(self, given, namespace)
            raise UnderstoodError

        def stop(self, given=None, namespace=None):
            assert known(self, given, namespace)[1] == []
            raise UnderstoodError

        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_at_known)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{name}.__main__")
        patch.setattr(sys, "argv", [name, *arguments])
        given = [list(arguments)] if inspect.signature(module.main).parameters else []
        with suppress(UnderstoodError):
            assert module.main(*given) in (0, None)


def after_options(words: list[str]) -> tuple[str, list[str]]:
    """Return the program and its arguments after Slurm's options."""
    at = next(number for number, word in enumerate(words) if not word.startswith("-"))
    assert {word.partition("=")[0] for word in words[:at]} <= SLURM_OPTIONS
    return words[at], words[at + 1 :]


def read_job(words: list[str]) -> None:
    """Parse `[OPTIONS] slurm/X_job.sh ARGUMENTS`."""
    job, arguments = after_options(words)
    if Path(job).name == "sweep_job.sh":
        assert len(arguments) == 1
    else:
        preparation = ["prepare_data.py"] if Path(job).name == "prepare_job.sh" else []
        read_script([*preparation, *arguments])


def read_srun(words: list[str]) -> None:
    """Parse `[OPTIONS] PROGRAM ARGUMENTS`."""
    understood(*after_options(words))


def read_launcher(words: list[str]) -> None:
    """Parse torchrun's `OPTIONS SCRIPT ARGUMENTS`, or the same after accelerate's `launch`."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    if words[0] == "launch":
        given = launch_command_parser().parse_args(words[1:])
    else:
        given = get_args_parser().parse_args(words)
    read_script([given.training_script, *given.training_script_args])


def read_hub_command(words: list[str]) -> None:
    """Parse a command line of `hf`."""
    from huggingface_hub.cli.hf import app

    with app.make_context("hf", list(words), resilient_parsing=True) as context:
        name, command, rest = app.resolve_command(context, list(words))
        assert command is not None
        command.make_context(name, rest, parent=context)


def read_vllm(words: list[str]) -> None:
    """Parse `serve MODEL OPTIONS`."""
    assert words[0] == "serve"
    assert {word for word in words if word.startswith("-")} <= VLLM_OPTIONS


def read_make(words: list[str]) -> None:
    """Let make print the commands of the targets."""
    subprocess.run(["make", "-n", *words], check=True, capture_output=True)


READERS = {
    "python": read_script,
    "launch_node.sh": read_script,
    "run_python.sh": read_script,
    "submit.sh": read_job,
    "sbatch": read_job,
    "srun": read_srun,
    "accelerate": read_launcher,
    "torchrun": read_launcher,
    "hf": read_hub_command,
    "vllm": read_vllm,
    "make": read_make,
}
