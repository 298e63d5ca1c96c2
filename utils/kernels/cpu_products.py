"""Settings for faster training on a CPU: oneDNN for float32 products, malloc, aligned weights."""

import ctypes
from collections.abc import Mapping

import torch
from torch import nn

from utils.config.precision import has_amx
from utils.host.machine import cpu_fact

# torch's names of precisions: exact float32 products, or oneDNN's products.
_EXACT, _ONEDNN = "highest", "medium"
_CACHE_LINE = 64  # bytes
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's codes for mallopt


def choose_products() -> str | None:
    """Use oneDNN for float32 matrix products if MKL is slow on this CPU; return a log line or None.

    MKL's AVX-512 kernels are fast only on Intel's processors. On an AMD EPYC a float32 step with
    MKL takes 1.8 times as long. torch's precision "medium" selects oneDNN. This precision also
    permits rounding to bfloat16, but oneDNN rounds only on CPUs with AMX. The function tests that
    nothing is rounded. Returns None if MKL is fast here or the user set a precision.
    """
    avx_512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    slow = avx_512 and not has_amx() and cpu_fact("vendor_id") not in ("", "GenuineIntel")
    if not slow or torch.get_float32_matmul_precision() != _EXACT:
        return None
    torch.set_float32_matmul_precision(_ONEDNN)
    if _products_are_exact():
        return "oneDNN's, faster than MKL's on this CPU; full precision verified"
    torch.set_float32_matmul_precision(_EXACT)
    return "MKL's; oneDNN's, faster on this CPU, would round factors"


def uses_onednn() -> bool:
    """Return whether oneDNN computes float32 matrix products in full precision here."""
    return torch.get_float32_matmul_precision() == _ONEDNN and not has_amx()


def products_name() -> str:
    """Return the name of the library that computes float32 matrix products."""
    return "oneDNN" if uses_onednn() else "torch's default"


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Make glibc keep freed memory for later allocations; return whether this worked.

    If glibc returned the memory to Linux, Linux would clear hundreds of megabytes in each step.
    This would take a tenth of the step's time. If the user configured malloc, this function changes
    nothing and returns False.
    """
    configured = any(name.startswith(("MALLOC_TRIM_", "MALLOC_MMAP_")) for name in environment)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if configured or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "") or mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def align_weights(model: nn.Module) -> None:
    """Align weights on a CPU to cache lines, because MKL's order of sums depends on the alignment.

    A resumed run then computes exactly the same numbers as an uninterrupted run.
    """
    for weight in model.parameters():
        if weight.is_cpu and weight.data_ptr() % _CACHE_LINE:
            weight.data = weight.data.clone()


def _products_are_exact() -> bool:
    values = torch.rand(2, 96, 384, generator=torch.Generator().manual_seed(0)) + 1
    unit = torch.eye(384).expand(2, -1, -1)
    return torch.equal(values[0] @ unit[0], values[0]) and torch.equal(values @ unit, values)
