"""The finished model: gathered from every rank, adapters merged, ready for from_pretrained."""

import shutil
from pathlib import Path

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from utils.checkpoints.run_record import FINAL

ADAPTER = "adapter"


def export_final(trainer: Trainer) -> Path:
    """Write ``final/`` (and ``adapter/`` after LoRA) of the trainer's run; return its path.

    All ranks call it: gathering sharded weights is collective. Rank 0 writes under another name and
    renames, so ``final/`` is whole or absent.
    """
    output_dir = Path(str(trainer.args.output_dir))
    state = _gathered_state(trainer)
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        if isinstance(model, PeftModel):
            _write(output_dir / ADAPTER, model, state, trainer)
            merged = _merged(model, state)
            _write(output_dir / FINAL, merged, merged.state_dict(), trainer)
        else:
            _write(output_dir / FINAL, model, state, trainer)
    trainer.accelerator.wait_for_everyone()
    return output_dir / FINAL


def _gathered_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the full state on rank 0 (other ranks may get an empty one)."""
    wrapped = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    return trainer.accelerator.get_state_dict(wrapped)


def _merged(model: PeftModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """Return the base model with the adapters added to its weights.

    Under FSDP and ZeRO-3 the parameters of ``model`` are shards, so the whole ones are put back
    into a copy that was never wrapped.
    """
    base_config = model.get_base_model().config
    base = type(model.get_base_model())(base_config)
    whole = type(model)(base, model.peft_config["default"])
    whole.load_state_dict(state, assign=True)
    merged = whole.merge_and_unload()
    merged.generation_config = model.get_base_model().generation_config
    return merged


def _write(
    directory: Path, model: PreTrainedModel | PeftModel, state: dict[str, Tensor], trainer: Trainer
) -> None:
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that ended while it was exporting
    if isinstance(model, PreTrainedModel):
        model.config.use_cache = True  # off while training on packed rows
    model.save_pretrained(str(partial), state_dict=state)
    tokenizer = trainer.processing_class
    assert tokenizer is not None, "both scripts give one"
    tokenizer.save_pretrained(partial)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
