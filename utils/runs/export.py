"""The finished model: gathered from every rank, adapters merged, ready for from_pretrained."""

import copy
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from utils.checkpoints.run_record import FINAL
from utils.cluster.decisions import on_rank_0
from utils.data.tokenizers import without_training_marks
from utils.planning.finished_model import name_of
from utils.runs.merging import (
    Merger,
    bare_name,
    can_merge_by_file,
    merge_by_file,
    merged_state,
    weight_files,
)
from utils.training.model_descriptions import set_generation_settings

logger = logging.getLogger(__name__)

ADAPTER = "adapter"


def export_final(trainer: Any, dtype: torch.dtype) -> Path:
    """Write ``final/`` (and ``adapter/`` after LoRA) of the trainer's run; return its path.

    All ranks call it: gathering sharded weights is collective. Rank 0 writes under another name and
    renames, so ``final/`` is whole or absent. Its tensors are of `dtype`, but for those that their
    architecture keeps in float32.
    """
    output_dir = Path(str(trainer.args.output_dir))
    set_generation_settings(trainer, trainer.generation)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PeftModel):
        _export_adapted(trainer, model, output_dir, dtype)
    else:
        state = _gathered_state(trainer)
        if trainer.is_world_process_zero():
            with _directory(output_dir / FINAL, trainer) as partial:
                _save(model, state, partial, dtype)
    trainer.accelerator.wait_for_everyone()
    return output_dir / FINAL


def _export_adapted(
    trainer: Trainer, model: PeftModel, output_dir: Path, dtype: torch.dtype
) -> None:
    """Write the adapters as PEFT does, and the model with them merged into its weights."""
    adapters = _trained_state(model)
    base: Any = model.get_base_model()
    merger = Merger(model, adapters) if trainer.is_world_process_zero() else None
    files = on_rank_0(lambda: _mergeable_files(base, merger))
    state = {} if files is not None else _gathered_state(trainer)
    if merger is None:
        return
    with _directory(output_dir / ADAPTER, trainer) as partial:
        model.save_pretrained(str(partial), state_dict=dict(adapters))
    with _directory(output_dir / FINAL, trainer) as partial:
        clean: Any = merger.clean
        clean.generation_config = base.generation_config
        clean._weight_conversions = getattr(base, "_weight_conversions", None)
        if files is None:
            bare = {bare_name(name): value for name, value in state.items() if name not in adapters}
            _save(clean, merged_state(merger, bare), partial, dtype)
            return
        _save(clean, {}, partial, dtype)
        (partial / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        merge_by_file(merger, files, partial, _caster(clean, dtype))


def _gathered_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the full state on rank 0 (other ranks may get an empty one)."""
    wrapped = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    return trainer.accelerator.get_state_dict(wrapped)


def _trained_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the trained tensors whole, on the CPU: the base's stay where they are. Collective."""
    return {
        name: _whole(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _whole(parameter: Tensor) -> Tensor:
    """Return all of a parameter, of which FSDP2 and ZeRO-3 leave each rank a part."""
    if hasattr(parameter, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.detach().cpu()


def _mergeable_files(base: Any, merger: Merger | None) -> dict[str, Path] | None:
    """Return the files that the base was loaded from, by tensor; None to merge in memory."""
    assert merger is not None, "asked on rank 0"
    path = str(base.name_or_path)
    commit = getattr(base.config, "_commit_hash", None)
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME) if path else ():
        found = cached_file(
            path, name, _commit_hash=commit, local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if found is not None:
            files = weight_files(Path(found).parent)
            whole = files is not None and all(file.is_file() for file in files.values())
            return files if whole and can_merge_by_file(merger, files or {}) else None
    return None


def _save(
    model: PreTrainedModel, state: dict[str, Tensor], directory: Path, dtype: torch.dtype
) -> None:
    """Write configuration and tensors; `state` is emptied on the way."""
    cast = _caster(model, dtype)
    for tied, source in model.all_tied_weights_keys.items():
        if tied in state and source in state and torch.equal(state[tied], state[source]):
            del state[tied]
    for name in state:
        state[name] = cast(name, state[name])
    model.config.use_cache = True  # off while training on packed rows
    model.save_pretrained(str(directory), state_dict=state)
    # save_pretrained writes down the type that the model has in memory.
    config: Any = copy.deepcopy(model.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = name_of(dtype)
    config.save_pretrained(str(directory))


def _caster(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    kept = [
        name
        for names in (model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict)
        for name in names or ()
    ]
    in_float32 = re.compile("|".join(map(re.escape, kept))) if kept else None

    def cast(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point() or (in_float32 and in_float32.search(name)):
            return value
        return value.to(dtype)

    return cast


@contextmanager
def _directory(directory: Path, trainer: Trainer) -> Iterator[Path]:
    """Yield a directory to write into, which then gets a tokenizer, its modes and its name."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that ended while it was exporting
    partial.mkdir(parents=True)
    yield partial
    tokenizer = trainer.processing_class
    assert tokenizer is not None, "both scripts give one"
    _save_tokenizer(tokenizer, partial)
    os.umask(umask := os.umask(0o077))
    for file in partial.rglob("*"):  # safetensors makes files that the owner alone may read
        if file.is_file():
            file.chmod(0o666 & ~umask)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the tokenizer with the chat template of training, without what only training needs."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = without_training_marks(template)
    tokenizer.save_pretrained(directory)
    tokenizer.chat_template = template
