"""The weights of a run, loaded strictly or drawn at random, and the identity of base weights."""

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from utils.checkpoints.discovery import how_to_rewrite
from utils.checkpoints.files import cached_digests
from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.host.atomic_files import paths_inside
from utils.host.collectives import on_every_rank, on_rank_0
from utils.host.foreign import foreign, limits, read_object
from utils.kernels.cpu_products import align_weights
from utils.model.adapters import check_model, freeze_unused
from utils.model.architecture import (
    WITHOUT_GRADIENT,
    causal_lm_class,
    gets_gradient,
    give_token_types,
    is_multimodal,
    text_model_config,
)
from utils.model.attention import AttentionChoice
from utils.model.config import add_rows, config_from_file, fit_embedding, read_config_file
from utils.model.finished_model import generation_settings, read_published_files
from utils.model.probe import probe_config, torch_operators
from utils.model.quantization import Quantized, compute_alike, quantized_loading
from utils.model.stages import own_checkpoint, stage_of, weights_directory
from utils.model.xlstm import accept_kernel_names, choose_kernels, follow_training

logger = logging.getLogger(__name__)

OTHER_INPUTS = ("pixel_values", "input_features", "image_embeds")  # inputs other than text


def base_weights(settings: RunSettings) -> dict[str, Any] | None:
    """Identify the base weights of a LoRA run. Return None without LoRA.

    The run's checkpoints hold only the adapters. For a directory: {"sha256": digest of each file by
    name}; for a model on the Hub: {"commit": ...}. provenance.json stores the result. Only rank 0
    calls this, because it may read all files. Raises ConfigurationError and OSError.
    """
    model = settings.model
    if not model.use_peft:
        return None
    directory = weights_directory(settings)
    if directory.is_dir():
        safe, pickled = (
            "*.safetensors",
            "pytorch_model*.bin",
        )  # pickles count only without safetensors
        files = sorted(directory.glob(safe)) or sorted(directory.glob(pickled))
        return {"sha256": cached_digests(files)} if files else None
    name = str(model.model_name_or_path)
    config = cached_file(name, "config.json", revision=model.model_revision)
    return {"commit": extract_commit_hash(config, None)}


def load_strictly(path: str, *, exact: bool, **arguments: Any) -> PreTrainedModel:
    """Load a model by from_pretrained and check that its tensors fit; collective over ranks.

    Raises ConfigurationError on all ranks, where transformers would only warn. The error lists
    every tensor that is missing or has another shape, and with `exact` every surplus tensor.
    """
    if deepspeed.is_deepspeed_zero3_enabled():
        # Under ZeRO-3 transformers only reports missing tensors, and only raises on rank 0.
        on_rank_0(lambda: check_without_loading(path, exact=exact, **arguments))
    model, info = _load(path, arguments)
    # Under FSDP only one rank reads the file and sees the misfits.
    on_every_rank(lambda: _refuse_misfits(path, info, exact))
    return model


def check_without_loading(path: str, *, exact: bool, **arguments: Any) -> None:
    """Raise the errors of `load_strictly`, reading only the headers of the weight files."""
    # Hide ZeRO-3 from from_pretrained, which would split the model.
    with mock.patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        _, info = _load(path, {**arguments, "device_map": "meta"})
    _refuse_misfits(path, info, exact)


def _load(path: str, arguments: Mapping[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model, and transformers' report of tensors that do not fit."""
    with foreign(path, f"the weights cannot be read{how_to_rewrite(path)}"):
        check_index(path)
        loaded: Any = causal_lm_class(arguments["config"]).from_pretrained(
            path,
            **arguments,
            ignore_mismatched_sizes=True,  # `_refuse_misfits` reports all of them at once
            output_loading_info=True,
            trust_remote_code=False,
        )
    return loaded


def check_index(path: str) -> None:
    """Raise ConfigurationError if an index of sharded weights names files outside its folder."""
    for index in Path(path).glob("*.index.json"):
        if not index.with_name(index.name.removesuffix(".index.json")).exists():  # else not used
            files = read_object(index).get("weight_map")
            if not isinstance(files, dict):
                raise ConfigurationError(f"{index} has no weight_map from tensors to files.")
            paths_inside(index.parent, files.values(), index, links=True)


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


def load_model_config(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the configuration of the model to train; no weights are loaded.

    New tokens enlarge its vocabulary. Raises ConfigurationError if the configuration is unreadable
    or unknown, or has too few positions.
    """
    accept_kernel_names()
    source = str(
        settings.model.model_config or stage_of(settings) or settings.model.model_name_or_path
    )
    problem = f"no model can be made of it (of a run, its final/ is one){how_to_rewrite(source)}"
    with foreign(source, problem):
        return _checked_config(settings, source, tokenizer)


def _checked_config(
    settings: RunSettings, source: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    config = _given_config(settings, source, tokenizer)
    causal_lm_class(config)  # raises for models that are not decoders
    choose_kernels(config, settings.training.device.type, settings.data.sequence_length)
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise ConfigurationError(f"{config.model_type} has no text_config: take it out.")
    config = runnable(config)
    for name, value in vars(config.get_text_config()).items():
        if "drop" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, not a probability")
    # The attention is chosen later. Drop the file's name for it, which could refer to code on the
    # Hub (CVE-2026-4372).
    config._attn_implementation_internal = None
    length = settings.data.sequence_length
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or length
    if length > positions:
        raise ConfigurationError(
            f"--sequence_length {length:,} is beyond the model's {positions:,} positions "
            "(max_position_embeddings): shorten it, or raise the model's positions (with a "
            "rope_scaling) in its configuration."
        )
    generation_settings(settings, config)  # raises if they cannot be read, before weights load
    fit_embedding(settings, config, tokenizer)
    config.use_cache = False  # packed position_ids with a cache would let documents see each other
    return config


def runnable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the whole model, or of its text model if only that runs.

    Raises ConfigurationError for a model that cannot be built or that needs images with every text.
    """
    text = text_model_config(config)
    check_model(config)
    if not is_multimodal(config):
        return config
    try:
        with torch_operators():
            probe_config(config)
    except ConfigurationError as error:
        if text is None and any(name in str(error) for name in OTHER_INPUTS):
            raise ConfigurationError(
                f"model type {config.model_type!r} does not run on text alone ({error}): use a "
                "model that does."
            ) from error
        if text is None:
            return config  # perhaps only the small probe model does not run
        logger.warning(
            "%s: only its text model is trained, and final/ will hold no other part, as the whole "
            "does not run on text: %s", config.model_type, error,
        )  # fmt: skip
        text.dtype = text.dtype or config.dtype
        return text
    return config


def _given_config(
    settings: RunSettings, source: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    with limits(source):
        if settings.model.model_config is not None:
            return config_from_file(Path(source), tokenizer)
        return AutoConfig.from_pretrained(
            source, revision=settings.model.model_revision, trust_remote_code=False
        )


def weights_dtype(model: ModelArguments, config: PreTrainedConfig) -> torch.dtype:
    """Return the weights' type in memory: --dtype (auto: the configuration's type) or float32."""
    if model.dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return getattr(torch, model.dtype) if model.dtype else torch.float32


def model_contents(settings: RunSettings) -> dict[str, Any] | None:
    """Return the model's configuration file, or None if a revision or manifest identifies it."""
    model = settings.model
    if model.model_config is not None:
        return read_config_file(Path(model.model_config))
    continues = model.init_from is not None and not model.use_peft
    if continues and own_checkpoint(settings.training.output_dir) is not None:
        return None
    path = weights_directory(settings) / "config.json"
    if not path.is_file():
        return None
    notes = ("_name_or_path", "transformers_version")  # not part of the model
    return {name: value for name, value in read_config_file(path).items() if name not in notes}


def published_rows(
    settings: RunSettings, config: PreTrainedConfig, weights: str, new_tokens: Sequence[int]
) -> PreTrainedConfig:
    """Return the configuration for loading `weights`.

    If embedding rows are added after loading, it is a copy with the published vocabulary size.
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
    """Build the model with the chosen attention; draw its weights by --seed, or load them strictly.

    `new_tokens` are ids without an embedding row in the weights. They get one (see `add_rows`), and
    the model's attribute `new_tokens` stores them for LoRA. `weights_from` is the directory of an
    earlier stage, or None if Trainer will load the run's own checkpoint over random weights.
    Collective over ranks. Raises ConfigurationError for weights that do not fit.
    """
    model, dtype = settings.model, weights_dtype(settings.model, config)
    weights = weights_from or model.model_name_or_path
    if weights is None:
        torch.manual_seed(settings.training.seed)
        # Call the class: under ZeRO-3 from_config would draw different weights on each rank.
        made: Any = causal_lm_class(config)(config)
        made.set_attn_implementation(attention.name)
        made = made.to(dtype)
    else:
        published = published_rows(settings, config, weights, new_tokens)
        made = load_strictly(
            weights,
            exact=model.init_from is not None,
            revision=model.model_revision,
            config=published,
            dtype=dtype,
            attn_implementation=attention.name,
            **quantized_loading(settings, config, dtype, quantized),
        )
        if published is not config:
            add_rows(made, list(new_tokens), config.get_text_config().vocab_size)
        if new_tokens:
            made.new_tokens = list(new_tokens)
        if settings.training.device.type == "cpu":
            align_weights(made)
            compute_alike(made)
    made.generation_config = generation_settings(settings, config)
    made.published = read_published_files(settings, config)
    follow_training(made)
    give_token_types(made)
    if frozen := freeze_unused(made):
        parts = [".".join(name.split(".")[:2]) for name in frozen if gets_gradient(name)]
        inner = WITHOUT_GRADIENT.intersection(".".join(frozen).split("."))
        listed = ", ".join([*dict.fromkeys(parts), *(f"*.{name}" for name in sorted(inner))])
        logger.info("frozen: %s, which the loss does not reach", listed)
    return made
