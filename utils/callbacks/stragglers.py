"""How long a rank computes by itself, and which rank the others wait for."""

import time
from collections import deque
from typing import Any

import torch
from accelerate import PartialState

PROBE_S = 10.0  # between two timings of the fixed matrix product


class OwnTime:
    """Seconds that a rank computes, without its waits for other ranks.

    Under DDP these are the forward passes, and the backward passes from the loss to the embedding,
    which no collective delays. Under FSDP and DeepSpeed both passes wait for other ranks, so each
    rank times a fixed matrix product now and then instead. On a GPU the times come from CUDA
    events, read after the device has reached them.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device, self.on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if self.on_gpu else None
        self.spans = deque[tuple[Any, Any]]()  # begins and ends, not added up yet
        self.seconds, self.product_s, self.probed = 0.0, 0.0, -PROBE_S
        self.sharded = PartialState().distributed_type.value in ("FSDP", "DEEPSPEED")
        if not self.sharded:
            # Hook the model inside DDP: DDP's own forward begins with a broadcast of buffers.
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._forward_ends)
            model.get_input_embeddings().register_forward_hook(self._embedded)

    def _forward_ends(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        if model.training:
            self._end()
            output["loss"].register_hook(self._begin)

    def _embedded(self, embedding: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        if embedding.training and output.requires_grad:  # else count only forward passes
            output.register_hook(self._end)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _begin(self, *_: Any) -> None:
        self.begin = self._now()

    def _end(self, *_: Any) -> None:
        self.spans.append((self.begin, self._now()))
        while self.spans and (not self.on_gpu or self.spans[0][1].query()):
            begin, end = self.spans.popleft()
            self.seconds += begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin

    def take(self) -> tuple[float, float]:
        """Return the seconds computed since the last call, and those of the product (0: none)."""
        own_s, self.seconds = self.seconds, 0.0
        if self.sharded and time.monotonic() - self.probed >= PROBE_S:
            self.product_s = min(self._product_s() for _ in range(3))
            self.probed = time.monotonic()
        return own_s, self.product_s

    def _product_s(self) -> float:
        """Time a product: on a GPU 0.2 TFLOP in 16 MiB, after the log has waited for the device."""
        size, kind, runs = (2048, torch.bfloat16, 10) if self.on_gpu else (512, torch.float, 1)
        factor, begin = torch.ones(size, size, dtype=kind, device=self.device), time.perf_counter()
        for _ in range(runs):
            torch.mm(factor, factor)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


def slowest_rank(ranks: list[tuple[float, float, float, float]]) -> dict[str, float]:
    """Return the rank that waits least for others, and the share of a step that others lose by it.

    `ranks` holds the elapsed time of each rank, its wait for batches, and the result of
    `OwnTime.take`. If products were timed, the rank with the slowest product counts as always busy.
    """
    elapsed_s, longest = max(rank[0] for rank in ranks), max(rank[3] for rank in ranks)
    busy_s = [
        wait_s + (elapsed_s * product_s / longest if longest else own_s)
        for _, wait_s, own_s, product_s in ranks
    ]
    slowest = busy_s.index(max(busy_s))
    others_s = (sum(busy_s) - busy_s[slowest]) / (len(busy_s) - 1)
    return {"slowest_rank": slowest, "slowest_cost": (busy_s[slowest] - others_s) / elapsed_s}
