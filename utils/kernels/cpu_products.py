"""What makes training on a CPU faster: oneDNN for float32, a heap that keeps what is freed."""

import ctypes
from collections.abc import Mapping

import torch
from torch import nn

from utils.config.precision import has_amx
from utils.support.host import cpu_fact

# torch's words: float32 products exactly, or as oneDNN does them.
_EXACT, _ONEDNN = "highest", "medium"
_CACHE_LINE = 64  # bytes
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's numbers of them for mallopt


def settle_products(device: str) -> str | None:
    """Let this process multiply float32 by oneDNN where MKL is slow; return a line for the log.

    MKL's AVX-512 kernels are fast on Intel's processors only: a float32 step on an AMD EPYC takes
    1.8 times as long with them. "medium" allows torch to round factors to bfloat16, which oneDNN
    does with AMX only; a check shows that it does not here. What the user told torch stays.
    """
    avx_512 = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    slow = avx_512 and not has_amx() and cpu_fact("vendor_id") not in ("", "GenuineIntel")
    if not slow or torch.get_float32_matmul_precision() != _EXACT:
        return None
    torch.set_float32_matmul_precision(_ONEDNN)
    if _keeps_every_bit():
        return "oneDNN's, faster than MKL's on this CPU; full precision verified"
    torch.set_float32_matmul_precision(_EXACT)
    return "MKL's; oneDNN's, faster on this CPU, would round factors"


def by_onednn() -> bool:
    """Whether this process multiplies float32 by oneDNN."""
    return torch.get_float32_matmul_precision() == _ONEDNN and not has_amx()


def products_name() -> str:
    """Return the name of the library that does."""
    return "oneDNN" if by_onednn() else "torch's default"


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let glibc keep what is freed; False where the user decided, or without glibc.

    Otherwise the kernel clears hundreds of megabytes anew in each step: a tenth of its time.
    """
    told = any(name.startswith(("MALLOC_TRIM_", "MALLOC_MMAP_")) for name in environment)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if told or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "") or mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def align_weights(model: nn.Module) -> None:
    """Move weights on a CPU to whole cache lines, where torch puts its own tensors.

    Those of a safetensors file lie where the file has them, and MKL may sum in another order there
    than after a resume.
    """
    for weight in model.parameters():
        if weight.is_cpu and weight.data_ptr() % _CACHE_LINE:
            weight.data = weight.data.clone()


def _keeps_every_bit() -> bool:
    values = torch.rand(2, 96, 384, generator=torch.Generator().manual_seed(0)) + 1
    unit = torch.eye(384).expand(2, -1, -1)
    return torch.equal(values[0] @ unit[0], values[0]) and torch.equal(values @ unit, values)
