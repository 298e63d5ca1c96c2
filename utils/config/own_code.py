"""The user's own Python code: callbacks, a loss, a data format. Only local files are loaded."""

import hashlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from utils.config.declarations import setting
from utils.config.errors import ConfigurationError, did_you_mean


@dataclass(frozen=True)
class OwnCode:
    """Your own Python code: FILE.py:NAME, or MODULE:NAME in the working directory."""

    callbacks: list[str] = setting([])
    loss: str | None = None

    def digests(self) -> dict[str, dict[str, str]]:
        """Return {"callbacks" or "loss": {name: SHA-256 of the file}}, for provenance.json."""
        loss = {}
        if self.loss:
            loss = {f"SHA-256 of {source_of(self.loss)[1]}": sha256_of(self.loss)}
        return {"callbacks": {each: sha256_of(each) for each in self.callbacks}, "loss": loss}


def source_of(entry: str) -> tuple[Path, str]:
    """Split `FILE.py:NAME` or `MODULE:NAME` into (existing file, NAME). Raises ValueError."""
    where, _, name = entry.rpartition(":")
    path = Path(where if where.endswith(".py") else f"{where.replace('.', '/')}.py")
    if not where or not name.isidentifier():
        raise ValueError(f"{entry}: expected my_module:NAME or path/to/file.py:NAME")
    if not path.is_file():
        raise ValueError(f"{entry}: there is no file {path} in {Path.cwd()}{did_you_mean(path)}")
    return path, name


def sha256_of(entry: str) -> str:
    """Return the SHA-256 of the file in `FILE.py:NAME`; "" if `entry` is empty."""
    return hashlib.sha256(source_of(entry)[0].read_bytes()).hexdigest() if entry else ""


def load_own(entry: str) -> Any:
    """Run the file in `FILE.py:NAME` and return the object NAME. Raises ConfigurationError."""
    path, name = source_of(entry)
    try:
        return getattr(_load_module(path.resolve()), name)
    except Exception as error:  # the user's file may raise anything
        raise ConfigurationError(f"{entry}: {type(error).__name__}: {error}") from error


def callback_class(entry: str) -> type[Any]:
    """Import and return the TrainerCallback class of `FILE.py:NAME`. Raises ConfigurationError."""
    from transformers import TrainerCallback  # slow to import

    named = load_own(entry)
    if not (isinstance(named, type) and issubclass(named, TrainerCallback)):
        raise ConfigurationError(f"--callbacks {entry}: no class of TrainerCallback.")
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise ConfigurationError(f"--callbacks {entry}: {error}; it gets none.") from error
    return named


@cache
def _load_module(path: Path) -> ModuleType:
    """Run a Python file once. Return its module, which pickle finds in sys.modules."""
    name = f"own_code_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the file ends in .py"
    assert spec.loader is not None, "it is a file"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
