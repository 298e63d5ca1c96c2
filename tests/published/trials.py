"""The trial of a published model: whole runs in this process, and their results."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from facts import CHUNK, ONE_A_ROW, PACKS, REFUSED, VOCABULARY, Published
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

import pretrain
import sft_train
from utils.config.errors import ConfigurationError
from utils.model.architecture import causal_lm_class

FIRST_WORD = 32  # smaller ids are special tokens
HELDOUT = 6
# In pretraining one document is split over two sequences; most share one.
RUN: dict[str, object] = {
    "sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 4,
    "learning_rate": 1e-3, "logging_steps": 1, "bf16": False, "dtype": "float32",
    "report_to": "none",
}  # fmt: skip


def documents(count: int, seed: int) -> list[list[int]]:
    """Make learnable documents without special tokens."""
    made, words = tiny.documents(count, seed, longest=60), VOCABULARY - FIRST_WORD
    return [[FIRST_WORD + token % words for token in document] for document in made]


def prepare(root: Path) -> None:
    """Make the data for all models."""
    tiny.save(root / "documents", {"input_ids": documents(60, seed=0)})
    tiny.save(root / "heldout", {"input_ids": documents(HELDOUT, seed=1)})
    tiny.save(root / "chats", tiny.masked(documents(40, seed=2)))


def try_model(model: Published, data: Path, root: Path) -> dict[str, Any]:
    """Train a small model in every way and return the results; raises unexpected errors."""
    config = root / "config.json"
    config.write_text(json.dumps(model.small_config()))
    _make_tokenizer(model, root / "tokenizer")
    settings = RUN | {
        "tokenizer_name_or_path": root / "tokenizer",
        "packing": "none" if model.packs == ONE_A_ROW else "best_fit",
    }
    scratch = settings | {"train_data": data / "documents", "model_config": config}
    if model.packs != PACKS:
        packed = scratch | {"packing": "best_fit", "output_dir": root / "refused", "max_steps": 3}
        with pytest.raises(ConfigurationError) as refusal:
            pretrain.main(tiny.flags(**packed))
        if model.packs == REFUSED:
            return {"refused": str(refusal.value)}
        assert "--packing none" in str(refusal.value)
    seen: dict[str, Any] = {"packed": model.packs == PACKS}
    seen["pretraining"], seen["resumed"] = _pretrain(scratch, data, root / "run")
    base = root / "run/final"
    seen["plain_loss_difference"] = _plain_difference(root / "run", base)
    seen["generated"] = _generated(base)
    (base / "generation_config.json").write_text(json.dumps(model.small_generation()))
    tuning = settings | {"train_data": data / "chats", "model_name_or_path": base, "max_steps": 2}
    seen["sft"] = _fine_tune(tuning, root / "sft")
    seen["lora"] = _fine_tune(tuning | {"use_peft": True}, root / "lora")
    seen["lora_generated"] = _generated(root / "lora/final")
    return seen


def _pretrain(settings: Mapping[str, object], data: Path, run: Path) -> tuple[list[float], bool]:
    """Return the losses of three steps, and whether the third is equal after a resume."""
    argv = tiny.flags(
        **settings, output_dir=run, max_steps=3, save_steps=2, eval_strategy="steps", eval_steps=3,
        eval_data=f"heldout={data / 'heldout'}", save_total_limit=2,
    )  # fmt: skip
    assert pretrain.main([*argv, "--dry_run"]) == 0
    assert not run.exists()
    assert pretrain.main(argv) == 0
    before = tiny.losses(run)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-3")
    assert pretrain.main(argv) == 0
    assert tiny.starts(run)[-1]["resumed_from"].endswith("checkpoint-2")
    return before, tiny.losses(run)[-1] == before[2]


def _fine_tune(settings: Mapping[str, object], run: Path) -> list[float]:
    assert sft_train.main(tiny.flags(**settings, output_dir=run, save_strategy="no")) == 0
    return tiny.losses(run)


def _plain_difference(run: Path, final: Path) -> float:
    """Return the difference between the run's evaluation and transformers' loss by document."""
    model: Any = _class_of(final).from_pretrained(
        final, attn_implementation="eager", dtype=torch.float32
    )
    total, targets = 0.0, 0
    with torch.no_grad():
        for document in documents(HELDOUT, seed=1):
            ids = torch.tensor([document])
            logits = model(input_ids=ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            targets += len(document) - 1
    return abs(total / targets - tiny.evaluations(run, "heldout")[3])


def _class_of(final: Path) -> Any:
    return causal_lm_class(AutoConfig.from_pretrained(final))


def _generated(final: Path) -> int:
    """Return how many tokens the exported model generates after a prompt."""
    model: Any = _class_of(final).from_pretrained(final)
    prompt = torch.arange(FIRST_WORD, FIRST_WORD + CHUNK)[None]
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=4, max_new_tokens=4
    )
    return said.shape[1] - prompt.shape[1]


def _make_tokenizer(model: Published, directory: Path) -> None:
    names = {model.ids[old]: token for token, old in model.tokens.items()}
    words = {names.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token=f"t{FIRST_WORD}"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = model.config.get("text_config", model.config) | model.config
    special = {}
    for role in ("bos", "eos", "pad"):
        found = config.get(f"{role}_token_id")
        found = found[0] if isinstance(found, list) else found
        if found is not None:
            special[f"{role}_token"] = names[model.ids[found]]
    special.setdefault("eos_token", names[0])
    special.setdefault("pad_token", special["eos_token"])
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory)


def quiet_process(cache: Path) -> AbstractContextManager[Any]:
    """Return a context for runs as in tests: one thread, on the CPU, with a separate cache."""
    torch.set_num_threads(1)
    return mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache), ACCELERATE_USE_CPU="true")
