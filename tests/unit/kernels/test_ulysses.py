"""Two ranks share packed sequences through the flash kernels of one GPU, compiled and not.

NCCL takes one rank per GPU, and gloo exchanges no GPU tensors, so here the blocks go through the
CPU. tests/integration/test_context_parallel.py compares ranks on CPUs, to the last digits.
"""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
import transformers

from utils.kernels import ulysses
from utils.kernels.ulysses import context_group, cut_inputs
from utils.kernels.varlen import NAME, AttentionNeeds, find_kernels, register_packed_varlen

LENGTHS = (2000, 2096, 1500, 700, 3, 1893)  # of the documents of two sequences
SIZES = {
    "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


EXCHANGE = dist.all_to_all_single


def by_way_of_the_cpu(received, blocks, group):
    arrived = torch.empty(blocks.shape, dtype=torch.float32)
    EXCHANGE(arrived, blocks.cpu().float(), group=group)
    received.copy_(arrived)


def packed_inputs():
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, -1)
    tokens = torch.randint(1024, positions.shape, generator=generator)
    inputs = {
        "input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100),
        "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
    }  # fmt: skip
    inputs = {name: value.cuda() for name, value in inputs.items()}
    return inputs | {"max_length_q": 4096, "max_length_k": 4096}


def gradients(model, context):
    """Return the loss and the gradients, summed over the ranks, and the peak of memory."""
    inputs = packed_inputs()
    labels = inputs.pop("labels")
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if context is not None:
        inputs = cut_inputs({**inputs, "labels": labels}, context)
        following = inputs.pop("shift_labels")
        inputs.pop("labels")
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, following.flatten(), reduction="sum") / 8190
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    found = [loss.detach(), *(weight.grad for weight in model.parameters())]
    found = [value.float().cpu() for value in found]
    for value in found if context is not None else ():
        dist.all_reduce(value)
    return found, peak


def as_rank(rank, store, answers):
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ulysses.dist.all_to_all_single = by_way_of_the_cpu
    context = context_group(2, 60)
    kernels, _ = find_kernels("cuda", torch.bfloat16, AttentionNeeds(64))
    config = transformers.Qwen3Config(**SIZES)
    config._attn_implementation = NAME
    for kernel in kernels:
        register_packed_varlen(kernel)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).cuda()
        for compiled in (False, True):
            if compiled:
                for layer in model.model.layers:
                    layer.compile(dynamic=False)
            (alone, most), (shared, less) = (gradients(model, each) for each in (None, context))
            worst = max(
                ((own - value).abs().max() / value.abs().max()).item()
                for own, value in zip(shared, alone, strict=True)
            )
            if rank == 0:
                answers.put((kernel.name, compiled, worst, less / most))
            torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_share_sequences_through_each_kernel(tmp_path):
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(as_rank, (str(tmp_path / "store"), answers), nprocs=2)
    found = []
    while not answers.empty():
        found.append(answers.get())
    print(found)  # the report of a run on a GPU
    assert {kernel for kernel, *_ in found} >= {"torch_varlen", "per_document_sdpa"}
    assert {compiled for _, compiled, *_ in found} == {False, True}
    for kernel, compiled, worst, memory in found:
        assert worst < 0.03, (kernel, compiled, worst)
        assert memory < 0.6, (kernel, compiled, memory)
