"""The finished model: gathered from every rank, adapters merged, ready for from_pretrained.

PEFT's own layers merge LoRA's adapters, one module at a time: they stand on the meta device without
memory, and only the one that is merged holds tensors. Where the base's files name their tensors as
the model does, they are read, merged and written file by file, so that the host needs room for one.
"""

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from utils.checkpoints.files import FINAL
from utils.data.tokenizers import without_training_marks
from utils.model.finished_model import name_of, set_generation_settings
from utils.support.collectives import on_rank_0

logger = logging.getLogger(__name__)

ADAPTER = "adapter"
PREFIX = "base_model.model."
# What PEFT puts between the name of a module and that of its weight.
_WRAPPING = (".base_layer", ".original_module", ".token_adapter")

Source = Callable[[str], Tensor]


def export_final(trainer: Any, dtype: torch.dtype) -> Path:
    """Write ``final/`` (and ``adapter/`` after LoRA) of the trainer's run; return its path.

    All ranks call it: gathering sharded weights is collective. Rank 0 writes under another name and
    renames, so ``final/`` is whole or absent. Its tensors are of `dtype`, but for those that their
    architecture keeps in float32.
    """
    output_dir = Path(str(trainer.args.output_dir))
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    set_generation_settings(model, trainer.generation)
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


def _mergeable_files(base: Any, merger: "Merger | None") -> dict[str, Path] | None:
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


class Merger:
    """The adapted modules of a model, by the names that their weights have without adapters.

    `adapters` are the trained tensors by PEFT's names, whole, on the CPU. `shapes` maps every
    tensor of the merged model to its shape; `adapted` are those that merging changes.
    """

    def __init__(self, model: PeftModel, adapters: Mapping[str, Tensor]):
        adapting = copy.copy(model.peft_config["default"])
        live: Any = model.get_base_model()
        config = copy.deepcopy(live.config)
        with torch.device("meta"):
            self.clean: Any = type(live)(config)
            self.wrapped: Any = type(model)(type(live)(live.config), adapting)
        self.shapes = {name: value.shape for name, value in self.clean.state_dict().items()}
        self.adapters = adapters
        self.modules = dict(_outermost(self.wrapped.base_model.model))
        self.tied = {
            name: source
            for name, source in self.clean.all_tied_weights_keys.items()
            if self._stays_tied(name, source)
        }
        self.untied = self.clean.all_tied_weights_keys.keys() - self.tied.keys()
        if self.untied:
            logger.info("final/: %s is no longer tied, as trained", ", ".join(self.untied))
            config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
            self.clean.all_tied_weights_keys = dict(self.tied)
        bases = {
            bare_name(f"{key}.{name}")
            for key, module in self.modules.items()
            for name in module.state_dict()
            if f"{PREFIX}{key}.{name}" not in adapters
        }
        self.adapted = bases & self.shapes.keys() - self.tied.keys()

    def _stays_tied(self, name: str, source: str) -> bool:
        """Whether two tied tensors are so after training: both adapted as one, or neither."""
        module, other = name.rpartition(".")[0], source.rpartition(".")[0]
        own = any(bare_name(adapter).startswith(f"{module}.") for adapter in self.adapters)
        return not own and (module in self.modules) == (other in self.modules)

    def merged(self, key: str, source: Source) -> dict[str, Tensor]:
        """Return a module's tensors with its adapters merged, in float32 if they are floats."""
        module, state = copy.deepcopy(self.modules[key]), {}
        for name in module.state_dict():
            whole = f"{PREFIX}{key}.{name}"
            if whole in self.adapters:
                state[name] = self.adapters[whole].float()
            elif bare_name(f"{key}.{name}") in self.adapted:
                value = source(bare_name(f"{key}.{name}"))
                state[name] = value.to(torch.float32, copy=True)  # PEFT merges in place
        module.load_state_dict(state, strict=False, assign=True)
        return {f"{key}.{name}": value for name, value in _unwrapped(module).state_dict().items()}

    def modules_of(self, names: set[str]) -> Iterator[str]:
        """Yield the keys of the modules that have one of these tensors."""
        for key, module in self.modules.items():
            if names & {bare_name(f"{key}.{name}") for name in module.state_dict()} & self.adapted:
                yield key


def bare_name(name: str) -> str:
    """Return the name that a tensor under adapters has without them."""
    name = name.removeprefix(PREFIX)
    for part in _WRAPPING:
        name = name.replace(part, "")
    return name


def merged_state(merger: Merger, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors of the merged model; `base` are those without adapters, by bare name."""
    state = dict(base)
    for key in merger.modules_of(merger.adapted):
        state.update(merger.merged(key, lambda name: base[name]))
    return {name: state[name] for name in merger.shapes if name not in merger.tied}


def weight_files(directory: Path) -> dict[str, Path] | None:
    """Return the file of each tensor of a model's directory; None where it has no safetensors."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in named.items()}
    single = directory / SAFE_WEIGHTS_NAME
    if not single.is_file():
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def can_merge_by_file(merger: Merger, files: Mapping[str, Path]) -> bool:
    """Whether the base's files hold all adapted tensors by name, shape, and each module in one."""
    if not merger.adapted | merger.untied <= files.keys():
        return False  # named otherwise (fused experts, another prefix), or made by this run
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            for name in merger.adapted & set(file.keys()):
                if tuple(file.get_slice(name).get_shape()) != tuple(merger.shapes[name]):
                    return False
    return True


def merge_by_file(
    merger: Merger,
    files: Mapping[str, Path],
    directory: Path,
    cast: Callable[[str, Tensor], Tensor],
) -> None:
    """Write the base's files into `directory` with the adapters merged, one at a time.

    What is not adapted is copied, cast as asked; tensors that the model does not use, too.
    """
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def source(name: str) -> Tensor:
        return handles[files[name]].get_tensor(name)

    total = 0
    for path in sorted(handles):
        names = {name for name, file in files.items() if file == path}
        state = {name: cast(name, source(name)) for name in sorted(names - merger.adapted)}
        for key in merger.modules_of(names):
            for name, value in merger.merged(key, source).items():
                if name in names:
                    state[name] = cast(name, value).contiguous()
        total += sum(value.nbytes for value in state.values())
        save_file(state, directory / path.name, metadata={"format": "pt"})
    if len(handles) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: path.name for name, path in sorted(files.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's modules that are in no other one of PEFT's."""
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules():
        if key.startswith(inside) and inside:
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside = (*inside, f"{key}.")
            yield key, module


def _unwrapped(module: Any) -> nn.Module:
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    module.merge()
    return module.get_base_layer()
