"""Checks that a model can split its sequences over several ranks (setting `context_parallel`)."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings
from utils.kernels.varlen import NAME, AttentionNeeds
from utils.model.attention import AttentionChoice, is_recurrent
from utils.model.loss_head import choose_loss_head
from utils.model.probe import CPU, ProbeError, observe_attention, probe_config

WITHOUT = "set context_parallel: 1"
# Rope types whose frequencies depend on the longest document of a micro-batch. A rank sees only a
# slice of each sequence.
BY_LENGTH = {"dynamic", "longrope"}
KEY_HEADS = ("num_key_value_heads", "num_global_key_value_heads")


def check_context_parallel_model(
    settings: RunSettings,
    config: PreTrainedConfig,
    attention: AttentionChoice,
    device: torch.device | None,
    report: Report,
) -> None:
    """Raise ConfigurationError if the model cannot split a sequence over `context_parallel` ranks.

    device: the device that trains. None means a login node. Adds a warning to `report` if ranks on
    different nodes share sequences.
    """
    size, length = settings.run.context_parallel, settings.data.sequence_length
    if size == 1:
        return
    setting, problems = settings.values.shown("context_parallel"), list[str]()
    if length % size:
        problems.append(f"{size} does not divide sequence_length {length}: use a multiple of it")
    problems += indivisible_heads(config, size) or context_parallel_problems(
        config, attention, device or CPU
    )
    if problems:
        raise ConfigurationError([f"{setting}: {problem}." for problem in problems])
    # Consecutive ranks form a group. Without a launcher all ranks are on this node.
    if int(settings.values.environment.get("LOCAL_WORLD_SIZE", size)) % size:
        report.warn(
            f"{setting}: a group has ranks on several nodes, so every layer waits for the network: "
            "a number that divides the GPUs of a node is faster"
        )


def context_parallel_problems(
    config: PreTrainedConfig, attention: AttentionChoice, device: torch.device = CPU
) -> Iterator[str]:
    """Yield an error text with advice for each reason why ranks cannot share sequences."""
    name = config.model_type
    if is_recurrent(config):
        yield (
            f"{name} has recurrent layers, which carry a state from token to token, so that a rank "
            f"cannot begin inside a sequence: {WITHOUT}"
        )
        return
    text = config.get_text_config(decoder=True)
    if getattr(text, "floor_scale", None) and text.attn_temperature_tuning:
        yield (
            f"{name} scales its attention by the index of a token (floor_scale), and a rank would "
            f"count from the start of its slice: {WITHOUT}"
        )
    if kinds := BY_LENGTH & _rope_types(text):
        yield (
            f"{name} has rotary positions of type {min(kinds)}, whose frequencies depend on the "
            f"longest document of a micro-batch: {WITHOUT}, or use rope_type yarn"
        )
    if attention.name != NAME:
        yield (
            f"ranks share sequences through {NAME} alone, and this run uses {attention.name} "
            f"({attention.reason}): {WITHOUT}"
        )
        return
    try:
        needs = observe_attention(probe_config(config, device), device)
        plain = choose_loss_head("auto", config, device=device)
    except ProbeError:
        return  # the check of the attention reports this where the run trains
    if not isinstance(needs, AttentionNeeds):
        yield f"{needs}, and ranks share sequences through {NAME} alone: {WITHOUT}"
    elif needs.dropout:
        yield (
            f"{name} has attention dropout ({needs.dropout:g}), and the ranks of a group would "
            "draw the same masks for different heads: set it to 0 in the model's config"
        )
    if plain.name != "fused":
        yield f"{plain.reason}, which ranks that see slices cannot compute: {WITHOUT}"


def indivisible_heads(config: PreTrainedConfig, size: int) -> list[str]:
    """Return error texts for layers whose attention heads do not divide over `size` ranks."""
    faults: dict[str, None] = {}
    for layer in config.get_text_config(decoder=True).per_layer_config:
        heads = getattr(layer, "num_attention_heads", 0)
        if not heads:  # a layer without attention
            continue
        keys = [getattr(layer, name, None) or heads for name in KEY_HEADS]
        # A rank gets query heads and their key heads. With more ranks than key heads, several ranks
        # get a copy of the same key head.
        fitting = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and all(count % n == 0 or n % count == 0 for count in keys)
        ]
        if size not in fitting:
            key_text = f" and {min(keys)} key heads" if min(keys) < heads else ""
            text = (
                f"{heads} attention heads{key_text} do not divide over {size} ranks: take one of "
            )
            faults[text + ", ".join(map(str, fitting))] = None
    return list(faults)


def _rope_types(text: Any) -> set[str]:
    """Return the rope types, such as "yarn", of all layers. text: the text configuration."""
    parameters = getattr(text, "rope_parameters", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {group["rope_type"] for group in groups if "rope_type" in group}
