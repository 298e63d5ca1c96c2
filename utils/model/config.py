"""The configuration of the model to train, and embedding rows for new tokens of the tokenizer.

Published files have keys that their architecture does not declare. Some are old names
(`rope_theta`). The model's code reads some others (`head_dim` of Qwen3-MoE). Many have no effect.

A run uses the tokenizer that made its data. This tokenizer may differ from the model's own
tokenizer if equal ids mean equal tokens. For example, a base model may be trained with the
tokenizer of its chat model. Tokens that the model's tokenizer lacks get new rows in the embedding.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from utils.checkpoints.discovery import how_to_rewrite
from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_mapping
from utils.config.settings import RunSettings
from utils.data.tokenizers import (
    differences,
    foreign_token,
    load_tokenizer,
    render_alike,
    tokenizer_sha256,
    vocabulary_size,
)
from utils.host.foreign import library_errors, resource_limits
from utils.model.architecture import (
    accept_xlstm_kernels,
    causal_lm_class,
    check_model,
    choose_xlstm_kernels,
    is_multimodal,
    text_model_config,
)
from utils.model.finished_model import generation_settings
from utils.model.probe import probe_config, torch_operators
from utils.model.stages import stage_of, stage_tokenizer

logger = logging.getLogger(__name__)

# Libraries write these keys, so a file with one of them is published and not written by hand.
WRITTEN_BY_LIBRARIES = ("architectures", "transformers_version")
# quantization_config would quantize the model when it is loaded, but --dtype sets the type in
# training. use_mtp would make generation fail: transformers cannot predict several tokens.
IGNORED_KEYS = ("quantization_config", "use_mtp")
ROWS_MULTIPLE = 64  # for the rows of an enlarged embedding: other numbers are slow on GPUs
OTHER_INPUTS = ("pixel_values", "input_features", "image_embeds")  # inputs other than text


def load_model_config(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the configuration of the model to train. No weights are loaded.

    New tokens of the tokenizer enlarge the vocabulary. Raises ConfigurationError if transformers
    does not know the architecture, or if a sequence has more tokens than the model has positions.
    """
    accept_xlstm_kernels()
    model, length = settings.model, settings.data.sequence_length
    source = str(model.model_config or stage_of(settings) or model.model_name_or_path)
    problem = f"no model can be made of it (of a run, its final/ is one){how_to_rewrite(source)}"
    with library_errors(source, problem):
        with resource_limits(source):
            if model.model_config is not None:
                config = config_from_file(Path(source), tokenizer, model.model_config_overrides)
            else:
                config = AutoConfig.from_pretrained(
                    source, revision=model.model_revision, trust_remote_code=False
                )
        causal_lm_class(config)  # raises for models that are not decoders
        choose_xlstm_kernels(config, settings.training.device.type, length)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise ConfigurationError(f"{config.model_type} has no text_config: take it out.")
        config = text_runnable_config(config)
        text = config.get_text_config()
        # The attention is chosen later. Drop the attention that the file names, because the name
        # could refer to code on the Hub (CVE-2026-4372).
        config._attn_implementation_internal = None
        positions = getattr(text, "max_position_embeddings", None) or length
        if length and length > positions:
            raise ConfigurationError(
                f"--sequence_length {length:,} is beyond the model's {positions:,} positions "
                "(max_position_embeddings): shorten it, or give its config.json more positions: "
                "--init_from FOLDER --model_config FOLDER/config.json "
                f"--model_config.max_position_embeddings {length} "
                "--model_config.rope_scaling '{...}' (docs/howto.md, A longer context)."
            )
        generation_settings(settings, config)  # raises if they cannot be read
        fit_embedding(settings, config, tokenizer)
    config.use_cache = False  # packed position_ids with a cache would let documents see each other
    return config


def text_runnable_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return `config`, or its text model's configuration if the model does not run on text alone.

    Raises ConfigurationError if the model cannot be built, or if no part runs on text alone.
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


def read_config_file(path: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's configuration file (JSON or YAML) as a dict, changed by `overrides`.

    A mapping in `overrides` is merged into the file's mapping. Raises ConfigurationError if the
    file cannot be read, repeats a key or has no model_type.
    """
    where = f"the model's configuration {path}"
    try:
        text = path.read_text(encoding="utf-8")
        try:  # JSON as transformers reads it: tabs and Infinity are allowed
            values = json.loads(text, object_pairs_hook=_dict_of_unique_keys)
        except json.JSONDecodeError:
            values = {name: value for name, (value, _) in load_mapping(text).items()}
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read: {error.strerror}.") from error
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}{error}: it is not JSON or YAML.") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigurationError(
            f"{where} needs a model_type (for example `model_type: llama`) and that "
            "architecture's settings, as in a transformers config.json."
        )
    return PreTrainedConfig._decode_special_floats(_deep_merge(values, overrides or {}))


def _deep_merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _deep_merge(values[name], value)
        for name, value in overrides.items()
        if isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
    }
    return {**values, **overrides, **inner}


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise YamlError(f": {repeated} is given twice")
    return dict(pairs)


def config_from_file(
    path: Path, tokenizer: PreTrainedTokenizerBase, overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Build a model's configuration from the file of --model_config, with `overrides`.

    If the file has no vocabulary size or special tokens, they come from the tokenizer. Raises
    ConfigurationError for an unknown model_type and for keys without effect. Exception: if a
    library wrote the file, such as a published config.json, the file may have keys without effect.
    These keys are logged.
    """
    values = read_config_file(path, overrides)
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"--model_config {path}: transformers {transformers.__version__} has no model_type "
            f"{model_type}; custom code models are not supported: use one that it has, or a later "
            "transformers."
        )
    if left_out := [name for name in IGNORED_KEYS if values.get(name)]:
        logger.info("%s: %s is left out", path, ", ".join(left_out))
    ignored = ("model_type", *IGNORED_KEYS)
    settings = {name: value for name, value in values.items() if name not in ignored}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    defaults = {name: getattr(tokenizer, name) for name in special}
    defaults["vocab_size"] = vocabulary_size(tokenizer)
    if isinstance(settings.get("text_config"), Mapping):
        settings["text_config"] = {**defaults, **settings["text_config"]}
    else:
        settings = {**defaults, **settings}
    config = AutoConfig.for_model(model_type, **settings)
    if misplaced := _misplaced_key(overrides or {}, config):
        raise ConfigurationError(
            f"--model_config.{misplaced}: {model_type} has it in text_config: give "
            f"--model_config.text_config.{misplaced}."
        )
    unused = _unused_keys(values, config)
    by_library = any(name in values for name in WRITTEN_BY_LIBRARIES)
    if wrong := _unused_keys(overrides or {}, config) if by_library else unused:
        raise ConfigurationError(
            f"--model_config {path}: {model_type} has no setting {', '.join(wrong)}: take it out, "
            "or correct its name."
        )
    if unused:
        logger.info("%s: transformers' %s uses no %s", path, model_type, ", ".join(unused))
    return config


def _misplaced_key(overrides: Mapping[str, Any], config: PreTrainedConfig) -> str:
    """Return the first key of `overrides` that belongs under text_config, or ""."""
    text = config.get_text_config(decoder=True)
    own = {field.name for field in dataclasses.fields(config)}
    inner = (name for name in overrides if name not in own and hasattr(text, name))
    return "" if text is config else next(inner, "")


def _unused_keys(values: Mapping[str, Any], config: PreTrainedConfig) -> list[str]:
    """Return the keys of a configuration file that have no effect on the model.

    A key has an effect if the configuration's class declares the key, or if the architecture's code
    contains the key. transformers moves some keys into other settings. The configuration then has
    no such attribute, and the key counts as used. Keys of vision towers are not checked.
    """
    known = {field.name for field in dataclasses.fields(config)}
    known |= {name for name, _ in inspect.getmembers(type(config), inspect.isdatadescriptor)}
    known |= {*type(config).attribute_map, *WRITTEN_BY_LIBRARIES}
    known |= {"_name_or_path", "model_type", "torch_dtype"}  # they do not change the model
    unused = [name for name in values if name not in known and name in vars(config)]
    if unused:
        own = type(config).__module__
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        modules = {own, model.__module__ if model else own.replace("configuration_", "modeling_")}
        code = "\n".join(inspect.getsource(importlib.import_module(name)) for name in modules)
        pattern = r"""\.{0}\b|["']{0}["']"""
        unused = [name for name in unused if not re.search(pattern.format(re.escape(name)), code)]
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        if isinstance(values.get(name), Mapping) and getattr(config, name) is text:
            unused += [f"{name}.{key}" for key in _unused_keys(values[name], text)]
    return unused


def compare_with_model(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase, directory: str
) -> None:
    """Log how the run's tokenizer, loaded from `directory`, differs from the model's tokenizer.

    Raises ConfigurationError if an id means different tokens in the two tokenizers.
    """
    own = _initial_tokenizer(settings)
    if own is None or own.name_or_path == directory:
        return
    model = own.name_or_path
    if clash := foreign_token(tokenizer, own):
        raise ConfigurationError(
            f"the tokenizer in {directory} has another vocabulary than {model}: {clash}. Prepare "
            f"the data with the model's (prepare_data.py --tokenizer_name_or_path {model}) and "
            "train without --tokenizer_name_or_path, or train a model that has this vocabulary."
        )
    is_same = tokenizer_sha256(tokenizer) == tokenizer_sha256(own)
    changes = [] if is_same else differences(tokenizer, own)
    if not render_alike(tokenizer, own):
        changes.append("another chat template")
    if changes:
        listed = "; ".join(changes)
        logger.info("tokenizer: %s, not that of %s: %s; final/ gets it", directory, model, listed)


def new_token_ids(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `tokenizer` that the model's own tokenizer lacks.

    If the model has no tokenizer, return [].
    """
    own = _initial_tokenizer(settings)
    if own is None:
        return []
    return sorted(set(tokenizer.get_vocab().values()) - set(own.get_vocab().values()))


def fit_embedding(
    settings: RunSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Enlarge the configuration's vocabulary size so that new tokens get embedding rows.

    The size is rounded up to a multiple of pad_embeddings_to_multiple_of. Without this setting, the
    size is rounded up to a multiple of 64 if new tokens need rows. Some published tokenizers have
    more tokens than their model has embedding rows (Gemma 3 1B). These tokens do not count as new,
    and data with these tokens is refused.
    """
    text, new = config.get_text_config(), new_token_ids(settings, tokenizer)
    multiple, before = settings.model.pad_embeddings_to_multiple_of, text.vocab_size
    needed = max(before, new[-1] + 1) if new else before
    if multiple is not None or needed > before:
        multiple = multiple or ROWS_MULTIPLE
        text.vocab_size = -(-needed // multiple) * multiple
    rows = f"embedding: {text.vocab_size:,} rows, {before:,} before"
    if new:
        shown = ", ".join(tokenizer.convert_ids_to_tokens(new[:5])) + ", ..." * (len(new) > 5)
        logger.info(f"{rows}; {len(new)} new tokens ({shown}) begin as the mean")
    elif text.vocab_size > before:
        logger.info(rows)


@torch.no_grad()
def add_rows(model: PreTrainedModel, new: list[int], rows: int) -> None:
    """Resize the embedding and the LM head to `rows`; set new rows to the mean of the other rows.

    new: ids of new tokens. Their rows count as new, even if the published weights have these rows.
    """
    weight: Any = model.get_input_embeddings().weight
    before = getattr(weight, "ds_shape", weight.shape)[0]  # under ZeRO-3 the tensor is empty
    if rows != before:
        with torch.random.fork_rng(devices=[]):  # transformers draws random rows, replaced below
            model.resize_token_embeddings(rows, mean_resizing=False)
    new_rows = sorted({*new, *range(before, rows)})
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    values = {id(value): value for layer in layers for value in layer.parameters(recurse=False)}
    for value in values.values():  # a tied weight only once
        if value.is_meta:  # FSDP: only rank 0 has the weight
            continue
        gathered: Any = contextlib.nullcontext()
        if hasattr(value, "ds_id"):  # ZeRO-3: rank 0 may change the gathered weight
            from deepspeed import zero

            gathered = zero.GatheredParameters([value], modifier_rank=0)
        with gathered:
            known = torch.ones(value.shape[0], dtype=torch.bool, device=value.device)
            known[new_rows] = False
            value[new_rows] = value[known].float().mean(dim=0).to(value.dtype)


def _initial_tokenizer(settings: RunSettings) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that belongs to the initial weights, or None if it is missing."""
    model = settings.model.model_name_or_path or stage_tokenizer(settings)
    return None if model is None else _try_load_tokenizer(model)


@functools.lru_cache(maxsize=1)
def _try_load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Return a model's tokenizer, or None if it is missing or fails to load. Log a failure."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return None
    try:
        return load_tokenizer(model)
    except ConfigurationError as error:
        logger.info("%s has no tokenizer to compare with: %s", model, error)
        return None
