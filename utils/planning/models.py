"""The model of a run: loaded strictly, or built from a configuration."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings
from utils.kernels.attention import AttentionChoice
from utils.kernels.cpu_products import align_weights
from utils.kernels.probe_model import causal_lm_class
from utils.planning.adapters import freeze_unused
from utils.planning.config_files import UNUSABLE, config_from_file, read_config_file
from utils.planning.finished_model import check_generation_settings, generation_settings
from utils.planning.stages import own_checkpoint, stage_of, weights_directory
from utils.planning.strict_loading import load_strictly
from utils.planning.vocabulary import add_rows, fit_embedding

# What a library writes into config.json that says nothing of the model.
NOTES_OF_LIBRARIES = ("_name_or_path", "transformers_version")


def load_model_config(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the configuration of the model to train, before any weight is loaded.

    From scratch (``--model_config``) the vocabulary and the special tokens follow the tokenizer
    unless the file sets them; else it grows by the tokens that are new to the model. Raises
    ConfigurationError for an unreadable or unknown one, and one with too few positions.
    """
    model = settings.model
    if model.model_config is not None:
        config = config_from_file(Path(model.model_config), tokenizer)
    else:
        stage = stage_of(settings)
        config = (
            _config_of_model("init_from", str(stage))
            if stage
            else _config_of_model("model_name_or_path", _model_path(model), model.model_revision)
        )
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise ConfigurationError(
            f"the configuration of {config.model_type} has a text_config that this architecture "
            "does not know: take it out, or use the model_type that it belongs to."
        )
    config = _of_language_model(config)
    # The kernel is chosen later; a name in the file may be that of code on the Hub (CVE-2026-4372).
    config._attn_implementation_internal = None
    problems = _position_problems(config, settings.data.sequence_length)
    if problems:
        raise ConfigurationError(problems)
    check_generation_settings(settings, config)
    fit_embedding(settings, config, tokenizer)
    config.use_cache = False  # packed position_ids with a cache would let documents see each other
    return config


def _of_language_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a configuration that AutoModelForCausalLM builds a model from.

    That is the text model of Llama 4 and Qwen3.5, and all of Gemma 3.
    """
    if causal_lm_class(config).config_class is not config.sub_configs.get("text_config"):
        return config
    text = config.get_text_config(decoder=True)
    text.dtype = text.dtype or config.dtype
    return text


def _position_problems(config: PreTrainedConfig, sequence_length: int) -> list[str]:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or sequence_length <= positions:
        return []
    return [
        f"--sequence_length {sequence_length:,} is beyond the model's {positions:,} positions "
        "(max_position_embeddings): shorten it, or raise the model's positions (with a "
        "rope_scaling) in its configuration."
    ]


def weights_dtype(model: ModelArguments, config: PreTrainedConfig) -> torch.dtype:
    """Return the type the weights are kept in: float32 unless --dtype says otherwise."""
    if model.dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return getattr(torch, model.dtype) if model.dtype else torch.float32


def model_contents(settings: RunSettings) -> dict[str, Any] | None:
    """Return what the file with the model's configuration holds; None where it is not known.

    That is a model of the Hub, which its revision names; and a run with a checkpoint of its own,
    whatever became of its --init_from: that one's configuration is held to its manifest.
    """
    model = settings.model
    if model.model_config is not None:
        return read_config_file(Path(model.model_config))
    if model.init_from is None:
        directory = Path(_model_path(model))
    elif not model.use_peft and own_checkpoint(settings.training.output_dir) is not None:
        return None
    else:
        directory = weights_directory(settings)
    path = directory / "config.json"
    if not path.is_file():
        return None
    values = read_config_file(path, "init_from" if model.init_from else "model_name_or_path")
    return {name: value for name, value in values.items() if name not in NOTES_OF_LIBRARIES}


def first_other_shape(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Say which tensor has another shape in the second of two configurations; None: none has."""
    old_shapes, new_shapes = _shapes(old), _shapes(new)
    for name in [*old_shapes, *(name for name in new_shapes if name not in old_shapes)]:
        was, now = old_shapes.get(name), new_shapes.get(name)
        if was != now:
            return f"its {name} was {was or 'not there'} and would be {now or 'not there'}"
    return None


def _shapes(contents: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    values = dict(contents)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        # The class itself: from_config would split the weights over the ranks under ZeRO-3.
        built: Any = causal_lm_class(config)(config)
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


def load_model(
    settings: RunSettings,
    config: PreTrainedConfig,
    attention: AttentionChoice | None,
    new_tokens: Sequence[int],
    weights_from: str | None,
) -> PreTrainedModel:
    """Return the model with the chosen attention: random weights by --seed, or loaded strictly.

    `new_tokens` have no row in the weights: they get one (see `add_rows`), and the model remembers
    them as its attribute of that name, for LoRA. `weights_from` is the directory of the earlier
    stage that this start takes weights from. None where it takes none: Trainer loads the run's own
    checkpoint over random weights. Collective over ranks; raises ConfigurationError for weights
    that do not fit.
    """
    assert attention is not None, "only a dry run leaves it open"
    model, dtype = settings.model, weights_dtype(settings.model, config)
    weights = weights_from
    if model.init_from is None and model.model_config is None:
        weights = _model_path(model)
    if weights is None:
        torch.manual_seed(settings.training.seed)
        # The class itself: under ZeRO-3 from_config would draw other weights, rank by rank.
        built: Any = causal_lm_class(config)(config)
        built.set_attn_implementation(attention.name)
        built.generation_config = generation_settings(settings, config)
        freeze_unused(built)
        return built.to(dtype)
    published = config
    if new_tokens:
        published = copy.deepcopy(config)
        of_weights = AutoConfig.from_pretrained(weights, revision=model.model_revision)
        published.get_text_config().vocab_size = of_weights.get_text_config().vocab_size
    loaded = load_strictly(
        weights,
        exact=model.init_from is not None,
        revision=model.model_revision,
        config=published,
        dtype=dtype,
        attn_implementation=attention.name,
    )
    if new_tokens:
        add_rows(loaded, list(new_tokens), config.get_text_config().vocab_size)
        loaded.new_tokens = list(new_tokens)  # type: ignore[assignment] # no module's attribute
    loaded.generation_config = generation_settings(settings, config)
    if settings.training.device.type == "cpu":
        align_weights(loaded)
    freeze_unused(loaded)
    return loaded


def _model_path(model: ModelArguments) -> str:
    assert model.model_name_or_path is not None, "checked with the settings"
    return model.model_name_or_path


def _config_of_model(setting: str, path: str, revision: str | None = None) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, *UNUSABLE) as error:
        if (Path(path) / "final" / "config.json").is_file():
            raise ConfigurationError(
                f"--{setting} {path} is the directory of a run: its model is in "
                f"{Path(path) / 'final'}."
            ) from error
        raise ConfigurationError(
            f"no model could be found at --{setting} {path}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
