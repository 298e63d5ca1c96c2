"""Published chat templates of 2026, and the text that is trained on with each of them.

Each was read at its source, and checked with all 33 kinds of chats (`test_a_collection...`). The
file is identified by its SHA-256. `shape` is a template with the same structure that the tests
have: our own in template_kinds.py, or one that TRL ships.
"""

from dataclasses import dataclass, field
from typing import Any

LLAMA_CPP = "ggml-org/llama.cpp models/templates/"
MISTRAL = "mistralai/mistral-common tests/data/chat_templates/"
TRL = "huggingface/trl trl/chat_templates/"
QWEN_CALL = "<function=look_up>\n<parameter=keyc>\n7351\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True)
class Published:
    """A published template. trained: {kind of chat: text that is trained on}."""

    source: str
    sha256: str  # the first 16 digits
    shape: str
    trained: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


PUBLISHED = {
    "Ministral 3 Reasoning": Published(
        LLAMA_CPP + "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        "31b50c917746ef1c",
        "thoughts as parts",
        {"one turn": "Xone, xtwo.</s>", "thought": "[THINK]Tone ttwo.[/THINK]Xone.</s>"},
    ),
    "Mistral Small 4 (v15)": Published(
        MISTRAL + "v15_think.jinja",
        "61f5738c25a6bf34",
        "thoughts as parts",
        {"one turn": "Xone, xtwo.</s>", "thought": "[THINK]Tone ttwo.[/THINK]Xone.</s>"},
    ),
    "GLM-4.7-Flash": Published(
        LLAMA_CPP + "GLM-4.7-Flash.jinja",
        "d63ad536c3c81880",
        "thought opened by the prompt, the next header ends a turn",
        {
            "one turn": "</think>Xone, xtwo.<|user|>",
            "thought": "Tone ttwo.</think>Xone.<|user|>",
            "user last": "</think>Xone, xtwo.<|user|>",
        },
    ),
    "DeepSeek V4": Published(
        LLAMA_CPP + "deepseek-ai-DeepSeek-V4.jinja",
        "f8b442fab67e75b3",
        "thinking is off by default",
        {"one turn": "Xone, xtwo.<\uff5cend\u2581of\u2581sentence\uff5c>"},
    ),
    "DeepSeek V4, thinking": Published(
        LLAMA_CPP + "deepseek-ai-DeepSeek-V4.jinja",
        "f8b442fab67e75b3",
        "thinking is off by default",
        {"thought": "Tone ttwo.</think>Xone.<\uff5cend\u2581of\u2581sentence\uff5c>"},
        {"thinking": True},
    ),
    "Granite 4.1": Published(
        LLAMA_CPP + "ibm-granite-granite-4.1.jinja",
        "fed2756d2d24e127",
        "role between tokens",
        {
            "one turn": "Xone, xtwo.<|end_of_text|>",
            "call last, number": '<tool_call>\n{"name": "look_up", "arguments": {"keyc": 7351}}\n'
            "</tool_call><|end_of_text|>",
        },
    ),
    "Gemma 4": Published(
        LLAMA_CPP + "google-gemma-4-31B-it.jinja",
        "1d35a24a2a63cc60",
        "gemma4_v5",
        {
            "one turn": "Xone, xtwo.<turn|>",
            "call last, number": "<|tool_call>call:look_up{keyc:7351}<tool_call|><|tool_response>",
        },
    ),
    "Qwen3.5": Published(
        LLAMA_CPP + "Qwen3.5-4B.jinja",
        "a4aee8afcf2e0711",
        "qwen3_5_think",
        {
            "one turn": "\n</think>\n\nXone, xtwo.<|im_end|>",
            "thought": "Tone ttwo.\n</think>\n\nXone.<|im_end|>",
            "user last": "Xone, xtwo.<|im_end|>",
            "call last, number": f"\n</think>\n\n<tool_call>\n{QWEN_CALL}<|im_end|>",
        },
    ),
    "Qwen3.6": Published(
        TRL + "qwen3_6.jinja",
        "e84f32a23fdda276",
        "qwen3_6",
        {
            "thought": "Tone ttwo.\n</think>\n\nXone.<|im_end|>",
            "user last": "Xone, xtwo.<|im_end|>",
        },
    ),
    "Qwen3-Instruct-2507": Published(
        TRL + "qwen3_instruct_2507.jinja",
        "64f85b198065d0fb",
        "qwen3_instruct_2507",
        {"one turn": "Xone, xtwo.<|im_end|>", "empty thought": "Xone.<|im_end|>"},
    ),
    "gpt-oss": Published(
        LLAMA_CPP + "openai-gpt-oss-120b.jinja",
        "a4c9919cbbd4acdd",
        "gptoss",
        {
            "one turn": "<|channel|>final<|message|>Xone, xtwo.<|return|>",
            "thought": "<|channel|>analysis<|message|>Tone ttwo.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Xone.<|return|>",
            "user last": "<|channel|>final<|message|>Xone, xtwo.<|end|>",
        },
    ),
    "Nemotron 3 Nano": Published(
        LLAMA_CPP + "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
        "43a92aacc2e169bb",
        "nemotron_3_nano",
        {
            "one turn": "</think>Xone, xtwo.<|im_end|>",
            "thought": "Tone ttwo.\n</think>\nXone.<|im_end|>",
        },
    ),
    "LFM2.5-8B-A1B": Published(
        LLAMA_CPP + "LFM2.5-8B-A1B.jinja",
        "6d65c8804847ad74",
        "markers around a thought",
        {
            "one turn": "Xone, xtwo.<|im_end|>\n",
            "thought": "<think>Tone ttwo.</think>Xone.<|im_end|>\n",
        },
    ),
}
