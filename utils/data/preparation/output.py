"""The output directory of a preparation: whether it is vacant, unfinished or already done."""

import json
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.data.description import DESCRIPTION_FILE
from utils.data.preparation.unit import TRAIN
from utils.data.preparation.workspace import Workspace


def is_already_prepared(output_dir: Path, workspace: Workspace, used_tokenizer: str | None) -> bool:
    """Return whether `output_dir` holds the finished result of this very preparation.

    False for a vacant directory and for unfinished work. Raises ConfigurationError when anything
    else is in it: nothing is written over. `used_tokenizer`: a tokenizer that lies in
    `output_dir` may stay if it is the one in use.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"output_dir: {output_dir}: is a file, not a folder")
    prepared = _prepared_digest(output_dir)
    if workspace.root.exists():
        return False
    if prepared == workspace.digest:
        return True
    if prepared is not None:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds a dataset that was prepared with other settings or "
            "from sources that have changed since; nothing is written over: choose another "
            "--output_dir, or remove it first"
        )
    own = {"tokenizer"} if _is_same(used_tokenizer, output_dir / "tokenizer") else set()
    others = sorted(entry.name for entry in _entries(output_dir) if entry.name not in own)
    if others:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds other files ({', '.join(others[:5])}); nothing is "
            "written over: choose a new or empty folder"
        )
    return False


def _prepared_digest(output_dir: Path) -> str | None:
    try:
        content = json.loads((output_dir / TRAIN / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        return str(content["preparation"]["settings_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _is_same(used: str | None, placed: Path) -> bool:
    return used is not None and Path(used).resolve() == placed.resolve()
