"""Queries, keys and values of Qwen3-0.6B's shape, and those who attend to them on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.recording.job import CannotRunError
from utils.data.sequences import longest_segment
from utils.kernels.varlen import AttentionNeeds, VarlenKernel, find_kernels, packed_varlen

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128

# (B, H, T, D) query, (B, Hkv, T, D) key and value to (B, T, H, D).
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def device() -> str:
    """Return where to compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_states(rows: int, length: int) -> list[torch.Tensor]:
    """Return query, key and value, bf16."""
    random = torch.Generator(device()).manual_seed(0)
    shapes = [(rows, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [
        torch.randn(shape, generator=random, device=device()).bfloat16().requires_grad_()
        for shape in shapes
    ]


def timed(rows: int, length: int, attend: Attend) -> tuple[Callable[[], object], int]:
    """Return a call of both passes, and its tokens."""
    states = make_states(rows, length)
    gradient = torch.ones(rows, length, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device())

    def call() -> None:
        for one in states:
            one.grad = None
        attend(*states).backward(gradient)

    return call, rows * length


def chosen_kernel(whole_rows: bool = False) -> VarlenKernel:
    """Return the kernel that Stoker's models would have here; `whole_rows`: one document each."""
    return find_kernels(device(), torch.bfloat16, AttentionNeeds(HEAD_DIM), whole_rows)[0][0]


def needed_kernel(load: Callable[[], VarlenKernel | str]) -> VarlenKernel:
    """Return a kernel for GPUs; raises CannotRunError where it is not here."""
    kernel = load()
    if isinstance(kernel, str):
        raise CannotRunError(kernel)
    if device() == "cpu":
        raise CannotRunError(f"{kernel.label} needs a GPU")
    return kernel


def through(kernel: VarlenKernel, boundaries: torch.Tensor, length: int) -> Attend:
    """Return Stoker's attention with this kernel; `boundaries` are cu_seq_lens."""
    module, ends = torch.nn.Module(), boundaries.to(device())
    longest = longest_segment(boundaries, length)

    def attend(*states: torch.Tensor) -> torch.Tensor:
        return packed_varlen(
            module, *states, cu_seq_lens_q=ends, max_length_q=longest, kernel=kernel
        )[0]

    return attend


def through_sdpa(backend: SDPBackend | None = None, mask: torch.Tensor | None = None) -> Attend:
    """Return torch's attention, with one of its kernels alone if `backend` names it."""
    if backend is not None and device() == "cpu":
        raise CannotRunError(f"{backend.name} needs a GPU")
    causal: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=True, **causal
        )
        return attended.transpose(1, 2).contiguous()

    if backend is None:
        return attend

    def attend_by_backend(*states: torch.Tensor) -> torch.Tensor:
        # The choice is made in the forward pass; the backward pass follows it.
        with sdpa_kernel(backend):
            return attend(*states)

    return attend_by_backend
