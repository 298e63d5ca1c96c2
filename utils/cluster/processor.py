"""What Linux says of this processor, for those that must know it before torch is imported."""

from pathlib import Path

_FACTS = Path("/proc/cpuinfo")


def vendor() -> str:
    """Return the maker in CPUID's words, `AuthenticAMD` say; "" where Linux does not tell."""
    return _fact("vendor_id")


def multiplies_in_tiles() -> bool:
    """Whether it has AMX; torch also knows whether the system lets a process use it."""
    return "amx_tile" in _fact("flags").split()


def _fact(name: str) -> str:
    """Return what stands behind a name, of the first core."""
    try:
        lines = _FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(": ")[2] for line in lines if line.startswith(name)), "")
