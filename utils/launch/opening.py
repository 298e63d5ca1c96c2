"""The output of a script before it imports torch: the first line, or versions of the packages."""

import contextlib
import importlib.metadata
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.config.declarations import FLAGS_RANK, SettingValue

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "deepspeed",
    "flash-attn",
)  # fmt: skip
# Settings that name the input of a script. The first line shows the first of these that is set.
SOURCES = ("config", "model_name_or_path", "init_from", "model_config", "sources")
_REPOSITORY = Path(__file__).resolve().parents[2]


def early_settings(words: Sequence[str]) -> dict[str, SettingValue]:
    """Return {name: setting} from a script's arguments and from the recipes that they name.

    words: the arguments. Wrong settings are ignored here, because the script reports them later.
    """
    # The launcher imports this module before it checks the packages.
    from utils.config.command_line import CONFIG_FLAG, read_flags
    from utils.config.recipes import read_recipes

    flags, _ = read_flags(words)
    entries, _ = read_recipes(flags.get(CONFIG_FLAG, []))
    return entries | {
        name: SettingValue(" ".join(given), f"--{name}", FLAGS_RANK)
        for name, given in flags.items()
    }


def opening_line(script: str, words: Sequence[str]) -> str:
    """Return the line that announces a script: time, script, recipe or model, and output directory.

    words: the script's arguments
    """
    settings = early_settings(words)
    inputs = [str(settings[name].value) for name in SOURCES if name in settings]
    line = f"{time.strftime('%H:%M:%S')}  {script}: {[*inputs, *words, 'no arguments'][0]}"
    if output := settings.get("output_dir"):
        line += f", output in {output.value}"
    return line


def version_text() -> str:
    """Return the versions of Stoker, Python and the packages, one per line."""
    project = (_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    version_line = re.search(r'^version = "(.+)"', project, re.MULTILINE)
    state = git_state()
    commit = ""
    if state:
        changed = ", with changes" if state["dirty"] else ""
        commit = f" (commit {state['commit'][:12]}{changed})"
    lines = [f"stoker {version_line[1] if version_line else 'unknown'}{commit}"]
    lines += [f"python {platform.python_version()}"]
    lines += [f"{name} {version}" for name, version in package_versions().items() if version]
    return "\n".join(lines) + "\n"


def package_versions() -> dict[str, str | None]:
    """Return {package: version} of the packages that affect a run; None means not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_state(folder: Path = _REPOSITORY) -> dict[str, Any] | None:
    """Return {"commit": hash, "dirty": whether files differ from the commit}.

    Return None if `folder` is not a git repository or git fails.
    """
    if not (folder / ".git").exists():
        return None
    # Without optional locks, git commands of other processes cannot fail because of this one.
    command = ["git", "--no-optional-locks", "-C", str(folder)]
    command += ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, changed = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(changed)}
