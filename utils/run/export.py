"""Export of the finished model for from_pretrained, with LoRA adapters merged into the weights.

PEFT merges the adapters of one layer at a time. To save memory, all other layers stay on the meta
device.
"""

import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.checkpoints.files import FINAL
from utils.data.tokenizers import without_training_marks
from utils.model.architecture import is_multimodal
from utils.model.finished_model import (
    dtype_name,
    set_generation_settings,
    write_processor_files,
)
from utils.model.weights import dequantized, packed_layers
from utils.publish.hub import ADAPTER_FOLDER, CARD
from utils.publish.model_card import RunCard, shown_name

logger = logging.getLogger(__name__)


def export_final(trainer: Any, dtype: torch.dtype) -> None:
    """Write the finished model to final/, and a LoRA adapter to adapter/, in the run directory.

    All ranks must call this, to gather sharded weights. Rank 0 writes to a temporary directory and
    renames the directory, so final/ is never partial. The tensors are saved as `dtype`, except
    tensors that the architecture keeps in float32.
    """
    output_dir = Path(str(trainer.args.output_dir))
    model = live = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    set_generation_settings(model, trainer.generation)
    wrapped = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    state = trainer.accelerator.get_state_dict(wrapped)  # may be empty on other ranks than 0
    if trainer.is_world_process_zero():
        if isinstance(model, PeftModel):
            trained = {name for name, value in model.named_parameters() if value.requires_grad}
            adapters = {name: state[name] for name in trained}
            with _export_directory(output_dir / ADAPTER_FOLDER, trainer) as partial:
                model.save_pretrained(str(partial), state_dict=adapters)
            model, state = merged_model(model, state, dtype)
        else:
            _remove_tied_copies(model, state)
        with _export_directory(output_dir / FINAL, trainer) as partial:
            _save_model(model, state, partial, dtype)
            write_processor_files(live.processor_files, trainer.processing_class, partial)


def merged_model(
    model: PeftModel, state: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return the model without adapters (on the meta device) and its merged tensors {name: tensor}.

    state: {PEFT's name: tensor}. Adapters are merged in float32 on the CPU, one module after
    another. The merged tensors are cast to `dtype`. Tied tensors that differ after training are no
    longer tied. Weights in 4 bits are dequantized before merging, because the adapters were trained
    with the dequantized values.
    """
    live: Any = model.get_base_model()
    config = copy.deepcopy(live.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        clean: Any = type(live)(config)
        wrapped: Any = type(model)(type(live)(config), copy.copy(model.peft_config["default"]))
    clean.generation_config = live.generation_config
    clean._weight_conversions = getattr(live, "_weight_conversions", None)
    cast = _cast_function(clean, dtype)
    merged = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    packed = packed_layers(live)
    for name in [name for name in merged if name.rpartition(".weight.")[0] in packed]:
        del merged[name]  # scales of the 4-bit weights
    for key, module in list(_outermost_peft_modules(wrapped.base_model.model)):
        names = [name for name in module.state_dict() if f"{key}.{name}" in merged]
        own = {name: merged.pop(f"{key}.{name}") for name in names}
        if layer := packed.pop(f"{key}.base_layer", None):
            own["base_layer.weight"] = dequantized(layer, own["base_layer.weight"])
        if isinstance(module, TrainableTokensWrapper) and module.token_adapter.tied_adapter:
            continue  # its weight is tied to the module with the same adapter
        for name, value in _merge_adapters(module, own).state_dict().items():
            merged[f"{key}.{name}"] = cast(f"{key}.{name}", value)
    for key, layer in packed.items():
        name = f"{key}.weight"
        merged[name] = cast(name, dequantized(layer, merged[name]))
    _remove_tied_copies(clean, merged)
    return clean, merged


def _outermost_peft_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules():
        if key.startswith(inside) and inside:
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside = (*inside, f"{key}.")
            yield key, module


def _merge_adapters(module: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """Merge the adapters of a PEFT module into its base layer, and return the base layer.

    state: all tensors of the module by name.
    """
    module = copy.deepcopy(module)  # else the meta module would keep the tensors
    copies = {
        # Copy the tensors, because PEFT merges in place.
        name: value.to("cpu", torch.float32 if value.is_floating_point() else None, copy=True)
        for name, value in state.items()
    }
    module.load_state_dict(copies, strict=False, assign=True)
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    module.merge()
    return module.get_base_layer()


def _remove_tied_copies(model: Any, state: dict[str, Tensor]) -> None:
    """Remove copies of tied weights from `state`. Untie weights that differ after training."""
    tied = model.all_tied_weights_keys
    differing = set()
    for name in [name for name, source in tied.items() if {name, source} <= state.keys()]:
        if torch.equal(state[name].cpu(), state[tied[name]].cpu()):
            del state[name]
        else:
            differing.add(name)
    if differing:
        logger.info("final/: %s is no longer tied, as trained", ", ".join(sorted(differing)))
        config = model.config
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
        model.all_tied_weights_keys = {name: tied[name] for name in tied.keys() - differing}


def _save_model(
    model: PreTrainedModel, state: dict[str, Tensor], directory: Path, dtype: torch.dtype
) -> None:
    """Write the configuration and the weights to `directory`, with tensors cast to `dtype`.

    Written tensors are removed from `state`.
    """
    cast = _cast_function(model, dtype)
    for name in state:
        state[name] = cast(name, state[name])
    model.config.use_cache = True  # training on packed sequences turns it off
    model.save_pretrained(str(directory), state_dict=state)
    # Correct the type in the configuration: save_pretrained wrote the model's type in memory.
    config: Any = copy.deepcopy(model.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype_name(dtype)
    config.save_pretrained(str(directory))


def _cast_function(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def cast(name: str, value: Tensor) -> Tensor:
        in_float32 = any(part in name for part in kept)
        return value if in_float32 or not value.is_floating_point() else value.to(dtype)

    return cast


@contextmanager
def _export_directory(directory: Path, trainer: Any) -> Iterator[Path]:
    """Yield a temporary directory for a model, and rename it to `directory` after the with block.

    Before renaming, add the tokenizer and the model card, and set the permissions of files. The
    saved chat template has no {% generation %} marks, which only training needs. An older
    `directory` is deleted.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that ended during its export
    partial.mkdir(parents=True)
    yield partial
    tokenizer: Any = trainer.processing_class
    assert tokenizer is not None, "both scripts give one"
    template = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = without_training_marks(template)
    tokenizer.save_pretrained(partial)
    tokenizer.chat_template = template
    (partial / CARD).unlink(missing_ok=True)  # PEFT wrote one
    state, name = trainer.state, shown_name(directory.parent, directory.name)
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    step = int(Path(best).name.rpartition("-")[2]) if best else state.global_step
    try:
        data, multimodal = trainer.train_sequences.datasets, is_multimodal(trainer.model.config)
        RunCard(partial, name, directory.parent, step, data, multimodal=multimodal).write()
    except Exception as error:  # other versions may have written the run's files
        logger.warning("%s: no model card could be made of the run's files: %r", directory, error)
    allowed = partial.stat().st_mode & 0o666  # the permissions that the umask allows
    for file in partial.rglob("*"):  # safetensors makes files that only the owner may read
        if file.is_file():
            file.chmod(allowed)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
