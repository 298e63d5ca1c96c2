"""Llama, Qwen3 and GPT-2 in plain torch: dense, causal, one document per row."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional


def load_plain_model(weights: Path, length: int, device: str) -> nn.Module:
    """Return the model of a transformers directory, for rows of `length` tokens."""
    config = json.loads((weights / "config.json").read_text())
    gpt2 = config["model_type"] == "gpt2"
    model = (Gpt2 if gpt2 else Llama)(config, length).to(device)
    prefix = "transformer." if gpt2 else "model."
    tensors = load_file(weights / "model.safetensors", device=device)
    model.load_state_dict({name.removeprefix(prefix): value for name, value in tensors.items()})
    return model


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model of this module."""
    layers = model.h if isinstance(model, Gpt2) else model.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def head_dim(config: dict) -> int:
    """Return the width of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def next_token_loss(hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of (B, T, H) states against the tokens that follow."""
    logits = functional.linear(hidden[:, :-1], head)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Pre-norm attention with rotary positions, then SwiGLU; parameters named as transformers'."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = head_dim(config)
        self.eps = config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, self.eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, self.eps)
        inside, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, inside, bias=False),
                "k_proj": nn.Linear(hidden, kv_dim, bias=False),
                "v_proj": nn.Linear(hidden, kv_dim, bias=False),
                "o_proj": nn.Linear(inside, hidden, bias=False),
            }
        )
        self.norms_heads = config["model_type"] == "qwen3"
        if self.norms_heads:
            self.self_attn["q_norm"] = nn.RMSNorm(self.head_dim, self.eps)
            self.self_attn["k_norm"] = nn.RMSNorm(self.head_dim, self.eps)
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
        rows, length, _ = hidden.shape
        normed = self.input_layernorm(hidden)
        query, key, value = (
            self.self_attn[name](normed).view(rows, length, -1, self.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if self.norms_heads:
            query, key = self.self_attn["q_norm"](query), self.self_attn["k_norm"](key)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        query, key = (rotate(states, cosine, sine) for states in (query, key))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        attended = attended.transpose(1, 2).reshape(rows, length, -1)
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
        half = head_dim(config) // 2
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
        head = self.embed_tokens if self.tied else self.lm_head
        return next_token_loss(self.norm(hidden), head.weight, tokens)


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to (B, heads, T, D) states, the halves as in transformers."""
    left, right = states.chunk(2, dim=-1)
    turned = states * cosine + torch.cat([-right, left], dim=-1) * sine
    return turned.to(states.dtype)


class Gpt2Layer(nn.Module):
    """Pre-norm attention, then a GELU MLP; parameters named as transformers', as (in, out)."""

    def __init__(self, config: dict):
        super().__init__()
        hidden = config["n_embd"]
        self.heads = config["n_head"]
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = nn.ModuleDict(
            {"c_attn": Transposed(hidden, 3 * hidden), "c_proj": Transposed(hidden, hidden)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": Transposed(hidden, 4 * hidden), "c_proj": Transposed(4 * hidden, hidden)}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Transform (B, T, H) states."""
        rows, length, width = hidden.shape
        query, key, value = (
            states.view(rows, length, self.heads, -1).transpose(1, 2)
            for states in self.attn["c_attn"](self.ln_1(hidden)).split(width, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.attn["c_proj"](attended)
        inner = functional.gelu(self.mlp["c_fc"](self.ln_2(hidden)), approximate="tanh")
        return hidden + self.mlp["c_proj"](inner)


class Transposed(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2's are kept."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (..., in) to (..., out)."""
        return functional.linear(states, self.weight.T, self.bias)


class Gpt2(nn.Module):
    """Embeddings of tokens and positions, layers, norm; the loss against the next tokens."""

    def __init__(self, config: dict, length: int):
        super().__init__()
        hidden = config["n_embd"]
        self.wte = nn.Embedding(config["vocab_size"], hidden)
        self.wpe = nn.Embedding(config["n_positions"], hidden)
        self.h = nn.ModuleList(Gpt2Layer(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(hidden)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (B, T) tokens."""
        hidden = self.wte(tokens) + self.wpe(self.positions)
        for layer in self.h:
            hidden = layer(hidden)
        return next_token_loss(self.ln_f(hidden), self.wte.weight, tokens)
