"""The initial weights of a run: published weights with a check of each tensor, or random weights.

QLoRA (arXiv 2305.14314) keeps linear layers under LoRA's adapters in 4 bits with bitsandbytes.
Checkpoints do not contain the quantized weights. Each rank quantizes the published weights again
when it loads them, with the same result every time. Layers compute with the dequantized weights.
`final/` contains the dequantized weights with the adapters merged.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed, is_fsdp_enabled
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from utils.checkpoints.discovery import how_to_rewrite, own_checkpoint
from utils.checkpoints.files import cached_digests
from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.host.atomic_files import paths_inside
from utils.host.collectives import on_every_rank, on_rank_0
from utils.host.foreign import library_errors, read_object
from utils.kernels.cpu_products import align_weights
from utils.model.adapters import freeze_by_settings, freeze_unused, linear_and_experts
from utils.model.architecture import (
    add_input_hooks,
    causal_lm_class,
    gets_gradient,
    without_weights,
)
from utils.model.attention import AttentionChoice
from utils.model.config import add_rows, read_config_file
from utils.model.finished_model import generation_settings, read_processor_files
from utils.model.stages import weights_directory

logger = logging.getLogger(__name__)

# bitsandbytes stores a float32 scale for each BLOCK of weights. With nested quantization it stores
# 8 bits for each of these scales, and a float32 scale for each GROUP of them.
BLOCK, GROUP = 64, 256
QLORA_STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp2")
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Quantized(NamedTuple):
    """The layers in 4 bits.

    weights: the number of weights in all these layers. largest: the number in the largest layer.
    """

    layers: list[str]
    weights: int
    largest: int

    def bytes_saved(self, model: ModelArguments, dtype: torch.dtype) -> int:
        """Return the bytes that 4 bits save, compared with weights of type `dtype`."""
        scale_bytes = 1 + 4 / GROUP if model.use_bnb_nested_quant else 4
        return round(self.weights * (dtype.itemsize - 1 / 2 - scale_bytes / BLOCK))


def base_weights(settings: RunSettings) -> dict[str, Any] | None:
    """Return data that identifies the base weights of a LoRA run.

    For a directory this is {"sha256": digests of the files}, or None if the directory has no known
    weight files. For a model of the Hub this is {"commit": hash}. Returns None without LoRA. Only
    rank 0 calls this. Raises ConfigurationError, OSError.
    """
    model = settings.model
    if not model.use_peft:
        return None
    directory = weights_directory(settings)
    if directory.is_dir():
        files = sorted(directory.glob("*.safetensors"))
        files = files or sorted(directory.glob("pytorch_model*.bin"))
        return {"sha256": cached_digests(files)} if files else None
    name = str(model.model_name_or_path)
    config = cached_file(name, "config.json", revision=model.model_revision)
    return {"commit": extract_commit_hash(config, None)}


def load_strictly(path: str, *, exact: bool, **arguments: Any) -> PreTrainedModel:
    """Load a model by from_pretrained and check that its tensors fit. All ranks must call this.

    Raises ConfigurationError on all ranks if the files lack a tensor or a tensor has another shape.
    exact: also raise this error if the files have a tensor that the model lacks. transformers would
    only warn.
    """
    if deepspeed.is_deepspeed_zero3_enabled():
        # Under ZeRO-3 transformers only reports missing tensors, and only raises on rank 0.
        on_rank_0(lambda: check_without_loading(path, exact=exact, **arguments))
    model, info = _load(path, arguments)
    # Under FSDP only one rank reads the file and sees the misfits.
    on_every_rank(lambda: _refuse_misfits(path, info, exact))
    return model


def check_without_loading(path: str, *, exact: bool, **arguments: Any) -> None:
    """Raise the errors of `load_strictly`, but read only the headers of the weight files."""
    # Hide ZeRO-3's settings from from_pretrained, or it would split the model over ranks.
    with mock.patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        _, info = _load(path, {**arguments, "device_map": "meta"})
    _refuse_misfits(path, info, exact)


def _load(path: str, arguments: Mapping[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model, and transformers' report of tensors that do not fit.

    Raises ConfigurationError if an index of sharded weights names files outside its folder.
    """
    with library_errors(path, f"the weights cannot be read{how_to_rewrite(path)}"):
        for index in Path(path).glob("*.index.json"):
            if index.with_name(index.name.removesuffix(".index.json")).exists():
                continue  # the index is not used
            files = read_object(index).get("weight_map")
            if not isinstance(files, dict):
                raise ConfigurationError(f"{index} has no weight_map from tensors to files.")
            paths_inside(index.parent, files.values(), index, links=True)
        loaded: Any = causal_lm_class(arguments["config"]).from_pretrained(
            path,
            **arguments,
            ignore_mismatched_sizes=True,  # `_refuse_misfits` reports all of them at once
            output_loading_info=True,
            trust_remote_code=False,
        )
    return loaded


def _refuse_misfits(path: str, info: Mapping[str, Any], exact: bool) -> None:
    problems = [f"tensor {name} is missing in {path}." for name in sorted(info["missing_keys"])]
    problems += [
        f"tensor {name} in {path} has shape {tuple(found)}, the model needs {tuple(needed)}."
        for name, found, needed in sorted(info["mismatched_keys"])
    ]
    excess = sorted(info["unexpected_keys"]) if exact else []
    problems += [f"tensor {name} in {path} has no place in the model." for name in excess]
    if problems:
        raise ConfigurationError(problems)


def weights_dtype(model: ModelArguments, config: PreTrainedConfig) -> torch.dtype:
    """Return the weights' type in memory: --dtype, or float32 if --dtype is not given.

    --dtype auto means the type in the model's configuration.
    """
    if model.dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return getattr(torch, model.dtype) if model.dtype else torch.float32


def model_contents(settings: RunSettings) -> dict[str, Any] | None:
    """Return the content of the model's configuration file, to detect changes at a resume.

    Returns None for a model of the Hub, and if the run's own checkpoint has the configuration.
    """
    model = settings.model
    if model.model_config is not None:
        return read_config_file(Path(model.model_config), model.model_config_overrides)
    continues = model.init_from is not None and not model.use_peft
    if continues and own_checkpoint(Path(str(settings.training.output_dir))) is not None:
        return None
    path = weights_directory(settings) / "config.json"
    if not path.is_file():
        return None
    notes = ("_name_or_path", "transformers_version")  # not part of the model
    return {name: value for name, value in read_config_file(path).items() if name not in notes}


def published_rows(
    settings: RunSettings, config: PreTrainedConfig, weights: str, new_tokens: Sequence[int]
) -> PreTrainedConfig:
    """Return the configuration with which from_pretrained can load `weights`, a path or Hub name.

    If `add_rows` will later add rows to the embedding, this is a copy of `config` with the
    published vocabulary size. Otherwise it is `config`.
    """
    model = settings.model
    if not new_tokens and model.pad_embeddings_to_multiple_of is None:
        return config
    published = copy.deepcopy(config)
    own = AutoConfig.from_pretrained(weights, revision=model.model_revision)
    published.get_text_config().vocab_size = own.get_text_config().vocab_size
    return published


def load_model(
    settings: RunSettings,
    config: PreTrainedConfig,
    attention: AttentionChoice,
    quantized: Quantized | None,
    new_tokens: Sequence[int],
    weights_from: str | None,
) -> PreTrainedModel:
    """Return the model with the chosen attention, with published or random weights.

    `new_tokens` are ids that the model's own tokenizer lacks. They get embedding rows (`add_rows`),
    and the model's attribute `new_tokens` stores them for LoRA. `weights_from` is the directory of
    an earlier run's weights. If neither this directory nor a base model is given, the weights are
    random, drawn with --seed. When a run resumes, Trainer loads the checkpoint's weights
    afterwards. All ranks must call this. Raises ConfigurationError for weights that do not fit.
    """
    model, dtype = settings.model, weights_dtype(settings.model, config)
    weights = weights_from or model.model_name_or_path
    if weights is None:
        torch.manual_seed(settings.training.seed)
        # Call the class: under ZeRO-3 from_config would draw different weights on each rank.
        built: Any = causal_lm_class(config)(config)
        built.set_attn_implementation(attention.name)
        built = built.to(dtype)
    else:
        published = published_rows(settings, config, weights, new_tokens)
        built = load_strictly(
            weights,
            exact=model.init_from is not None,
            revision=model.model_revision,
            config=published,
            dtype=dtype,
            attn_implementation=attention.name,
            **quantized_loading(settings, config, dtype, quantized),
        )
        if published is not config:
            add_rows(built, list(new_tokens), config.get_text_config().vocab_size)
        if new_tokens:
            built.new_tokens = list(new_tokens)
        if settings.training.device.type == "cpu":
            align_weights(built)
            for layer in packed_layers(built).values():
                # bitsandbytes would pack the weights differently for an evaluation.
                layer.support_avx512bf16_for_cpu = False
    built.generation_config = generation_settings(settings, config)
    built.processor_files = read_processor_files(settings)
    add_input_hooks(built)
    if frozen := freeze_unused(built):
        towers = [".".join(name.split(".")[:2]) for name in frozen if gets_gradient(name)]
        listed = ", ".join(dict.fromkeys(towers)) or "indexers of attention, poolers"
        logger.info("frozen: %s, which the loss does not reach", listed)
    freeze_by_settings(built, model)
    return built


def quantized_layers(model: ModelArguments, config: PreTrainedConfig) -> Quantized | None:
    """Return the layers to load in 4 bits, or None without --load_in_4bit.

    These are the text model's linear layers except the LM head. `model` is that of an AdapterPlan,
    so that lora_target_parameters has full names.
    """
    if not model.load_in_4bit:
        return None
    built: Any = without_weights(config)
    # PEFT adapts some layers as parameters, which does not work for packed weights.
    as_parameters = set(model.lora_target_parameters or ())
    sizes = {
        name: layer.weight.numel()
        for name in linear_and_experts(built)[0]
        if type(layer := built.get_submodule(name)) in (nn.Linear, Conv1D)  # bitsandbytes' rule
        and f"{name}.weight" not in as_parameters
    }
    return Quantized([*sizes], sum(sizes.values()), max(sizes.values(), default=0))


def check_quantization(settings: RunSettings, config: PreTrainedConfig, strategy: str) -> None:
    """Raise ConfigurationError if bitsandbytes quantized the published weights.

    With load_in_4bit, also raise this error if another method quantized the weights, or if the
    strategy does not support 4 bits.
    """
    model = settings.model
    method = dict(getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method == "bitsandbytes" or (method and model.load_in_4bit):
        raise ConfigurationError(
            f"the weights of {model.model_name_or_path} are quantized already ({method}): name the "
            "model that they were made of, in bfloat16, and set load_in_4bit: true"
        )
    if model.load_in_4bit and strategy not in QLORA_STRATEGIES:
        raise ConfigurationError(
            f"{settings.values.shown('load_in_4bit')} does not go with {strategy}: use "
            "accelerate_configs/multi_gpu.yaml, where each GPU has all weights, or fsdp2.yaml, "
            "which shards them"
        )


def quantized_loading(
    settings: RunSettings, config: PreTrainedConfig, dtype: torch.dtype, found: Quantized | None
) -> dict[str, Any]:
    """Return the arguments of from_pretrained that load layers in 4 bits.

    found: the layers to quantize. The result is {} for None. The matrix products of these layers
    have the type of mixed precision, or `dtype` without mixed precision.
    """
    if found is None:
        return {}
    model, training = settings.model, settings.training
    compute_dtype = COMPUTED.get(training.mixed_precision, dtype)
    modules = without_weights(config).named_modules()
    names = {name for name, module in modules if isinstance(module, (nn.Linear, Conv1D))}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        # FSDP2 only shards floating-point types.
        bnb_4bit_quant_storage=compute_dtype if is_fsdp_enabled() else torch.uint8,
        llm_int8_skip_modules=sorted(names - {*found.layers}),
    )
    return {"quantization_config": quantization, "device_map": {"": training.device}}


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """Return {name: layer} of bitsandbytes' 4-bit layers, including those that PEFT wraps."""
    modules = model.named_modules()
    return {name: module for name, module in modules if "quant_state" in vars(module)}


def dequantized(layer: Any, packed: torch.Tensor) -> torch.Tensor:
    """Return a 4-bit layer's dequantized weight on the CPU, in the shape of the published weight.

    packed: the layer's whole weight in 4 bits, gathered from the ranks
    """
    from bitsandbytes.functional import dequantize_4bit

    state = layer.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state).cpu()
    return weight.T.contiguous() if layer.source_cls is Conv1D else weight
