"""A model's configuration file: read strictly, built, and compared with what the model took of it.

Published files hold more than an architecture takes: names of older versions, notes of other
libraries, settings of code on the Hub. transformers renames some (`rope_theta`), the model reads
some that no signature names (`head_dim` of Qwen3-MoE), and the rest has no effect.
"""

import dataclasses
import importlib
import inspect
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_mapping
from utils.data.tokenizers import vocabulary_size
from utils.model.architecture import first_line

logger = logging.getLogger(__name__)

# What transformers raises for values that an architecture cannot have.
UNUSABLE = (ValueError, TypeError, KeyError, StrictDataclassError)
# What libraries write into every published file; one of them tells it from a file somebody wrote.
WRITTEN_BY_LIBRARIES = ("architectures", "transformers_version")
# These say nothing of the model that is built.
NOTES = (*WRITTEN_BY_LIBRARIES, "_name_or_path", "model_type", "torch_dtype")
# These would make the model another one when it is loaded, or generation fail.
LEFT_OUT = {
    "quantization_config": "the model trains in the type that --dtype names",
    "use_mtp": "transformers' model has no layers that predict several tokens",
}


def read_config_file(path: Path, setting: str = "model_config") -> dict[str, Any]:
    """Return what a model's configuration file holds, JSON or YAML.

    Raises ConfigurationError, with the line where it is known, for a file that cannot be read, for
    a key given twice, and where there is no model_type.
    """
    where = f"--{setting} {path}"
    try:
        values = _values(path.read_text(encoding="utf-8"), where)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read: {error.strerror}.") from error
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}{error}: it is not JSON or YAML.") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigurationError(
            f"{where} needs a model_type (for example `model_type: llama`) and that "
            "architecture's settings, as in a transformers config.json."
        )
    return PreTrainedConfig._decode_special_floats(values)


def _values(text: str, where: str) -> Any:
    """Read JSON as transformers does (with tabs and Infinity), else YAML."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigurationError(f"{where}: {', '.join(repeated)} is given twice.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        return {name: value for name, (value, _) in load_mapping(text).items()}


def config_from_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration that a file describes, for a model from scratch.

    Vocabulary and special tokens follow the tokenizer unless the file sets them. Raises
    ConfigurationError for values that the architecture cannot have, and for keys that nothing uses
    in a file somebody wrote; those of a published one are logged.
    """
    values = read_config_file(path)
    model_type = values["model_type"]
    defaults = {
        "vocab_size": vocabulary_size(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model_type not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"--model_config {path}: transformers {transformers.__version__} has no model_type "
            f"{model_type}; custom code models are not supported: use one that it has, or a later "
            "transformers."
        )
    settings = {name: value for name, value in values.items() if name != "model_type"}
    for name, why in LEFT_OUT.items():
        if settings.pop(name, None):
            logger.info("%s: %s is left out: %s", path, name, why)
    if isinstance(settings.get("text_config"), Mapping):
        settings["text_config"] = {**defaults, **settings["text_config"]}
    else:
        settings = {**defaults, **settings}
    try:
        config = AutoConfig.for_model(model_type, **settings)
    except UNUSABLE as error:
        raise ConfigurationError(f"--model_config {path}: {first_line(error)}") from error
    unused = _unused(values, config)
    if unused and any(name in values for name in WRITTEN_BY_LIBRARIES):
        logger.info("%s: transformers' %s uses no %s", path, model_type, ", ".join(unused))
    elif unused:
        raise ConfigurationError(
            f"--model_config {path}: {model_type} has no setting {', '.join(unused)}: take it out, "
            "or correct its name."
        )
    return config


def _unused(values: Mapping[str, Any], config: PreTrainedConfig) -> list[str]:
    """Return the keys of a file that the configuration built from it keeps and nothing reads.

    A key counts as used if it is a setting of the class, if it became part of another one (so it
    is no attribute of its own), or if the code of the architecture reads it. Those of a vision
    tower have no part in training a language model.
    """
    known = {field.name for field in dataclasses.fields(config)}
    known |= {name for name, _ in inspect.getmembers(type(config), inspect.isdatadescriptor)}
    known |= {*type(config).attribute_map, *NOTES}
    unused = [name for name in values if name not in known and name in vars(config)]
    if unused:
        code = _source(config)
        read = r"""\.{0}\b|["']{0}["']"""
        unused = [name for name in unused if not re.search(read.format(re.escape(name)), code)]
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        if isinstance(values.get(name), Mapping) and getattr(config, name) is text:
            unused += [f"{name}.{key}" for key in _unused(values[name], text)]
    return unused


def _source(config: PreTrainedConfig) -> str:
    """Return the code of an architecture: the modules of its configuration and its model."""
    own = type(config).__module__
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = {own, model.__module__ if model else own.replace("configuration_", "modeling_")}
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in names)
