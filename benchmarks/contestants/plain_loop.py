"""A plain training loop on a Llama in eighty lines, in the manner of nanoGPT: the reference.

No Trainer, no callbacks, rows from one array. Tuned: layers compiled one by one.
"""

import contextlib
import json

import numpy as np
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from benchmarks.job import Job, Outcome, run_contestant
from benchmarks.steps import StepRecorder


class Layer(nn.Module):
    """Pre-norm attention with rotary positions, then SwiGLU; parameters named as transformers'."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = hidden // self.heads
        self.eps = config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, self.eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, self.eps)
        kv_dim = self.kv_heads * self.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, hidden, bias=False),
                "k_proj": nn.Linear(hidden, kv_dim, bias=False),
                "v_proj": nn.Linear(hidden, kv_dim, bias=False),
                "o_proj": nn.Linear(hidden, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        """Transform (B, T, H) states."""
        rows, length, width = hidden.shape
        normed = self.input_layernorm(hidden)
        query, key, value = (
            self.self_attn[name](normed).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = (rotate(states, cosine, sine) for states in (query, key))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.self_attn["o_proj"](attended)
        normed = self.post_attention_layernorm(hidden)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return hidden + self.mlp["down_proj"](gated)


class Llama(nn.Module):
    """Embedding, layers, norm; the loss against the next tokens."""

    def __init__(self, config: dict, length: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.tied = config["tie_word_embeddings"]
        if not self.tied:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        half = config["hidden_size"] // config["num_attention_heads"] // 2
        theta = config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(length), theta ** (-torch.arange(half) / half))
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (B, T) tokens."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cosine, self.sine)
        hidden = self.norm(hidden)[:, :-1]
        head = self.embed_tokens if self.tied else self.lm_head
        logits = functional.linear(hidden, head.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to (B, heads, T, D) states, the halves as in transformers."""
    left, right = states.chunk(2, dim=-1)
    turned = states * cosine + torch.cat([-right, left], dim=-1) * sine
    return turned.to(states.dtype)


def train(job: Job) -> Outcome:
    """Train on rows in Stoker's order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((job.files / "weights" / "config.json").read_text())
    model = Llama(config, job.sequence_length).to(device)
    weights = load_file(job.files / "weights" / "model.safetensors", device=device)
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    if job.tuned:
        for layer in model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.learning_rate, fused=True, weight_decay=0.0
    )
    documents = load_from_disk(str(job.files / "documents")).with_format("numpy")
    order = np.load(job.files / "order.npy")
    mixed: contextlib.AbstractContextManager = (
        torch.autocast(device, torch.bfloat16)
        if job.precision == "bf16"
        else contextlib.nullcontext()
    )
    recorder = StepRecorder(job)
    for step in range(job.steps):
        rows = order[step * job.micro_batch_size :][: job.micro_batch_size]
        tokens = torch.from_numpy(np.stack(documents[rows]["input_ids"])).to(device).long()
        recorder.saw_batch(tokens)
        with mixed:
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.saw_loss(loss)
        recorder.ended_step()
    return recorder.outcome(attention="sdpa")


if __name__ == "__main__":
    run_contestant(train)
