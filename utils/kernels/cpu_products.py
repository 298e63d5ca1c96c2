"""Matrix products on a CPU: the faster library for float32, and weights where it reads them well.

torch multiplies float32 by MKL, which is slow on other makers' processors than Intel's.
"""

import torch
from torch import nn

from utils.config.precision import has_amx
from utils.support.host import vendor

# torch's words for how float32 is multiplied: exactly, or in what oneDNN takes for it.
_EXACTLY, _BY_ONEDNN = "highest", "medium"

_CACHE_LINE = 64  # bytes

# Of the proof: products large enough for the kernels of training, in the layouts of both passes.
_PROVED = (96, 384)


def settle_products(device: str) -> str | None:
    """Let this process multiply float32 by the faster library; return a line where that says more.

    For AVX-512 MKL has fast kernels on Intel's processors alone: on an AMD EPYC (Zen 5) oneDNN's
    are more than twice as fast (docs/experiments.md). torch goes to oneDNN where products may be
    rounded to bfloat16, which oneDNN does on CPUs with AMX and on no other; that it does not here
    is proved on the spot. Elsewhere, and where someone has told torch otherwise, nothing changes.
    """
    if not _slow_by_mkl(device) or torch.get_float32_matmul_precision() != _EXACTLY:
        return None
    torch.set_float32_matmul_precision(_BY_ONEDNN)
    if _exact():
        return "oneDNN's, faster than MKL's on this CPU; proved to round no factor"
    torch.set_float32_matmul_precision(_EXACTLY)
    return "MKL's; oneDNN's, faster on this CPU, would round factors"


def by_onednn() -> bool:
    """Whether this process multiplies float32 by oneDNN."""
    return torch.get_float32_matmul_precision() == _BY_ONEDNN and not has_amx()


def products_name() -> str:
    """Return the library's name."""
    return "oneDNN" if by_onednn() else "torch's default"


def align_weights(model: nn.Module) -> None:
    """Let every weight on a CPU begin at a whole cache line, as torch's own tensors do.

    Those of a safetensors file lie where the file has them: a loss head of 32,000 words took 1.5
    times as long for it (docs/experiments.md), and MKL may sum in another order.
    """
    for weight in model.parameters():
        if weight.is_cpu and weight.data_ptr() % _CACHE_LINE:
            weight.data = weight.data.clone()


def _slow_by_mkl(device: str) -> bool:
    if device != "cpu" or not torch.backends.mkldnn.is_available() or has_amx():
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkl.is_available() and vendor() not in ("", "GenuineIntel")


def _exact() -> bool:
    """Whether products with the unit matrix, plain and batched, return every bit of float32."""
    rows, width = _PROVED
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(rows, width, generator=generator) + 1
    few, many = torch.eye(rows), torch.eye(width)
    plain = (values @ many, values @ many.T, few @ values, (values.T @ few).T)
    batch = torch.stack([values, values]), torch.stack([many, many])
    batched = (torch.bmm(*batch), torch.bmm(batch[1], batch[0].mT).mT)
    return all(torch.equal(own.expand_as(values), values) for own in plain) and all(
        torch.equal(own, batch[0]) for own in batched
    )
