"""Print what a fine-tuned model answers to a held-out instruction, by plain transformers.

python examples/complete.py --model runs/demo-sft/final --chats data/stdlib/chats_heldout.jsonl
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


def complete(model: Any, tokenizer: Any, messages: list[dict], max_new_tokens: int) -> str:
    """Return the model's answer to the messages; it stops at its own end of turn.

    Sampled: the greedy answer of a model this small repeats itself.
    """
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(
            **prompt, max_new_tokens=max_new_tokens, do_sample=True, temperature=0.7, top_p=0.9
        )
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Complete the first instruction that is short enough to read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="A model directory (final/ of a run).")
    parser.add_argument("--chats", required=True, type=Path, help="JSONL with `messages`.")
    parser.add_argument("--index", type=int, default=0, help="Which chat of the file, from 0.")
    parser.add_argument("--max_new_tokens", type=int, default=120)
    arguments = parser.parse_args()

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    with arguments.chats.open(encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    messages = chats[arguments.index]
    answer = complete(model, tokenizer, messages[:1], arguments.max_new_tokens)
    shown = {
        "instruction (held out)": messages[0]["content"],
        "the model's answer": answer,
        "the original": messages[1]["content"],
    }
    for title, text in shown.items():
        sys.stdout.write(f"--- {title}\n{text}\n")


if __name__ == "__main__":
    main()
