"""A rank whose DDP exchanges gradients in bfloat16. Prints whether they are those of a reference.

The reference rounds each rank's gradient, divided by the number of ranks, and sums in bfloat16.
"""

import copy

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import distributed

from utils.launch.processes import exchange_in_bf16, tune_strategy


def main() -> None:
    """Compare the gradients of one backward pass."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()])
    tune_strategy(accelerator)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    alone = copy.deepcopy(model)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(accelerator.process_index))
    alone(inputs).square().sum().backward()
    shared_model = accelerator.prepare(model)
    exchange_in_bf16(shared_model)
    shared_model(inputs).square().sum().backward()
    for own, shared in zip(alone.parameters(), model.parameters(), strict=True):
        by_rank = [torch.empty_like(own.grad) for _ in range(accelerator.num_processes)]
        distributed.all_gather(by_rank, own.grad)
        parts = [gradient.bfloat16() / len(by_rank) for gradient in by_rank]
        assert torch.equal(shared.grad, sum(parts).float())
        assert not torch.equal(shared.grad, sum(by_rank) / len(by_rank))
    print(f"rank {accelerator.process_index}: as the reference")


main()
