"""What Linux says of this processor; torch, which knows some of it, is not needed."""

from pathlib import Path

_FACTS = Path("/proc/cpuinfo")


def vendor() -> str:
    """Return the maker in CPUID's words, `AuthenticAMD` say; "" where Linux does not tell."""
    return _fact("vendor_id")


def model() -> str:
    """Return the name that the maker gave it; "" where Linux does not tell."""
    return _fact("model name")


def multiplies_in_tiles() -> bool:
    """Whether it has AMX; torch also knows whether the system lets a process use it."""
    return "amx_tile" in _fact("flags").split()


def _fact(name: str) -> str:
    """Return what stands behind a name, of the first core."""
    try:
        with _FACTS.open(encoding="utf-8") as lines:  # as far as the first core's: there are many
            return next((line.partition(":")[2].strip() for line in lines if _says(line, name)), "")
    except OSError:
        return ""


def _says(line: str, name: str) -> bool:
    return line.partition(":")[0].strip() == name
