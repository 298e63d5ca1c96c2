"""Ranks that share packed sequences compute the gradients of one process; prints figures as JSON.

The families have grouped heads, fewer key heads than ranks, sinks and windows, latent attention
(values narrower than keys), and experts. Everything is in float64.
"""

import json
import sys

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional

from utils.data.loader import model_inputs
from utils.kernels.ulysses import context_group, cut_inputs, cut_positions
from utils.kernels.varlen import NAME, PER_DOCUMENT, register_packed_varlen
from utils.model.loss_head import LossHeadChoice, RouterTerm, next_labels

VOCABULARY, ROWS, LENGTH = 61, 2, 48
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
LATENT = {
    "head_dim": 16, "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4,
    "first_k_dense_replace": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3": {},
    "gpt_oss": {"num_local_experts": 2, "sliding_window": 8, **EXPERTS},
    "deepseek_v3": LATENT,
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
}


def build(family: str, fused: bool) -> torch.nn.Module:
    """Return a model in float64 with the loss head that a run has."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    config._attn_implementation = NAME
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    router = RouterTerm(0.1, 2) if family == "qwen3_moe" else None
    LossHeadChoice("fused" if fused else "logits", "", router).install(model)
    return model.double().train()


def packed_batch(fused: bool) -> dict[str, torch.Tensor]:
    """Return a micro-batch as the loader makes it. Documents cross the slices of ranks."""
    generator = torch.Generator().manual_seed(1)
    lengths = [17, 5, 23, 3, 30, 18]  # two rows, the last document of the second is padding
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    mask = torch.rand(ROWS * LENGTH, generator=generator) < 0.6
    mask[ends[:-1].long()] = False
    mask[ends[-2] :] = False
    positions = {"loss_positions": mask[1:].nonzero().squeeze(-1)} if fused else {}
    return {
        "input_ids": torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator).int(),
        "loss_mask": mask.view(ROWS, LENGTH),
        "cu_seq_lens": ends,
        "sequence_tokens": torch.tensor([LENGTH, LENGTH - lengths[-1]]),
        "sources": torch.tensor([[True, False], [False, True]]),
        **positions,
    }


def inputs_of(batch, context):
    """Return the model's inputs as the trainer makes them."""
    batch, length = dict(batch), batch["input_ids"].shape[1]
    if context is None:
        return model_inputs(batch, "cpu")
    if "loss_positions" in batch:
        batch["loss_positions"] = cut_positions(batch["loss_positions"], length, context)
    return cut_inputs(model_inputs(batch, "cpu"), context)


def summed(model, sums, context):
    """Add the model's gradients to `sums`; return the sums over the ranks of the group."""
    for name, weight in model.named_parameters():
        sums[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    for value in sums.values() if context is not None else ():
        dist.all_reduce(value, group=context.group)
    return sums


def gradients(model, batch, context):
    """Return the loss in float64, computed from the logits, and the gradients."""
    inputs = inputs_of(batch, context)
    labels = inputs.pop("labels")
    following = inputs.pop("shift_labels", next_labels(labels))
    for name in ("sequence_tokens", "sources", "loss_positions"):
        inputs.pop(name, None)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    loss.backward()
    return summed(model, {"loss": loss.detach()}, context)


def figures(model, batch, context):
    """Return the figures of the loss head, and the gradients; the head computes in float32."""
    model.zero_grad()
    made = model(**inputs_of(batch, context), num_items_in_batch=7, use_cache=False)
    loss = made.loss
    sums = {}
    for name in ("by_source", "assignments", "probabilities"):
        if (value := getattr(made, name, None)) is not None:
            sums[name] = value.detach().clone()
    if "probabilities" in sums:
        loss = loss + (made.probabilities * torch.arange(1.0, 5.0)).sum() / 100
    loss.backward()
    sums["loss"] = loss.detach()
    return summed(model, sums, context)


def worst(ours, theirs):
    """Return the largest difference, relative to the largest value of each tensor."""
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[name] - value).abs().max() / value.abs().max().clamp(min=1e-9)).item()
        for name, value in theirs.items()
    )


def logits(model, inputs, context):
    """Return the logits of whole sequences."""
    cut = cut_inputs(inputs, context)
    names = ("input_ids", "position_ids", "cu_seq_lens_q", "max_length_q", "context")
    with torch.no_grad():
        own = model(**{name: cut[name] for name in names}, use_cache=False).logits.contiguous()
    parts = [torch.empty_like(own) for _ in range(context.size)]
    dist.all_gather(parts, own, group=context.group)
    return torch.cat(parts, dim=1).flatten(0, 1)


def leak(model, context):
    """Change the tokens of the first document; return the changes (inside, of the others)."""
    inputs = model_inputs(packed_batch(False), "cpu")
    before, first = logits(model, inputs, context), int(inputs["cu_seq_lens_q"][1])
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, :first] = (inputs["input_ids"][0, :first] + 1) % VOCABULARY
    changed = (logits(model, inputs, context) - before).abs().amax(dim=1)
    return changed[:first].max().item(), changed[first:].max().item()


def main() -> None:
    dist.init_process_group("gloo")
    register_packed_varlen(PER_DOCUMENT)
    found = {}
    for size in (2, 4):
        context = context_group(size, 60)
        first = dist.get_rank() // size * size
        assert dist.get_process_group_ranks(context.group) == [*range(first, first + size)]
        for family in FAMILIES:
            for recompute in (False, True):
                model, batch = build(family, fused=False), packed_batch(fused=False)
                alone = gradients(model, batch, None)
                if recompute:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                difference = worst(gradients(model, batch, context), alone)
                found[f"float64 {family} recompute={recompute} size={size}"] = difference
        for family in ("qwen3", "qwen3_moe"):
            for fused in (True, False):
                model, batch = build(family, fused), packed_batch(fused)
                alone, shared = (figures(model, batch, each) for each in (None, context))
                found[f"head {family} fused={fused} size={size}"] = worst(shared, alone)
        found[f"leak size={size}"] = leak(build("qwen3", True), context)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
