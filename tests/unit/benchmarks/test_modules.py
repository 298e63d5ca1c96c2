"""Every benchmark can be imported, and what it patches exists."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if path.name != "__init__.py")
PACKAGES = {"litgpt", "torchtune", "unsloth", "flash_attn"}  # of other toolkits, in no lock file


@pytest.mark.slow
def test_benchmarks_are_imported_and_patch_what_exists():
    patched = set()
    for path in MODULES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name != "__main__.py":
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name in PACKAGES, name  # noqa: PT017 - other modules must be tried
        patched |= set(re.findall(r'mock\.patch\(\s*"([\w.]+)"', path.read_text()))
    assert "utils.run.finish.export_final" in patched
    for name in patched:
        pkgutil.resolve_name(name)
