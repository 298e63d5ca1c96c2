"""What `final/` will say beside its weights: how to generate, and the type of the tensors.

Settled in the plan, so that what cannot be saved is found before any weight is loaded.
"""

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from utils.checkpoints.files import PROVENANCE, earlier_starts
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.loader import PackedDataset
from utils.model.architecture import first_line
from utils.model.stages import stage_of

# transformers ignores these unless do_sample is true, and refuses to save them then.
SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def generation_settings(
    settings: RunSettings, config: PreTrainedConfig
) -> tuple[GenerationConfig, str]:
    """Return how the finished model generates, and what was repaired of it, for the user.

    As published, or as transformers derives it. It would refuse to save some published settings,
    after hours of training: sampling flags without do_sample get it, as transformers proposes, and
    what has no effect is left out. Raises ConfigurationError for what is never valid.
    """
    generation, origin = _published(settings, config)
    changes = []
    if generation.do_sample is None and _objections(generation, origin) & SAMPLING:
        generation.do_sample = True
        changes.append("do_sample: true")
    for name in sorted(_objections(generation, origin)):
        changes.append(f"no {name} (it is {getattr(generation, name)})")
        setattr(generation, name, getattr(GenerationConfig(), name))
    _objections(generation, origin, repaired=True)
    if not changes:
        return generation, ""
    return generation, (
        f"{origin}: transformers refuses to save its generation settings as they are: final/ gets "
        f"them with {', '.join(changes)}"
    )


def with_stops(generation: GenerationConfig, ends: list[int]) -> GenerationConfig:
    """Return a copy that stops at these tokens too, which training put at the end of answers."""
    made = copy.deepcopy(generation)
    known = made.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    if stops := list(dict.fromkeys([*known, *ends])):
        made.eos_token_id = stops if len(stops) > 1 else stops[0]
    return made


def finished_generation(
    model: Any, tokenizer: PreTrainedTokenizerBase, data: PackedDataset
) -> GenerationConfig | None:
    """Return the settings of a model that stops where this data taught it to."""
    if not model.can_generate():
        return None
    turns = [each.description.preparation.get("end_of_turn_token_id") for each in data.datasets]
    ends = [tokenizer.eos_token_id, *turns]
    return with_stops(model.generation_config, [end for end in ends if end is not None])


def set_generation_settings(model: Any, generation: GenerationConfig | None) -> None:
    """Let the model be saved with these: Trainer and SFTTrainer write special tokens into them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if generation is not None:
        base.generation_config = copy.deepcopy(generation)


def saved_dtype(
    settings: RunSettings, config: PreTrainedConfig, trained: torch.dtype
) -> torch.dtype:
    """Return the type of the tensors in `final/`: --save_dtype, else that of the base model.

    A model from random weights keeps `trained`, the type it is trained in. With `--init_from` what
    the first start found counts: later ones read the configuration of the run's own checkpoints.
    """
    model = settings.model
    if model.save_dtype != "auto":
        return getattr(torch, model.save_dtype)
    if model.init_from is not None:
        for start in earlier_starts(Path(str(settings.training.output_dir)) / PROVENANCE):
            if "save_dtype" in start:
                return getattr(torch, start["save_dtype"])
    elif model.model_config is not None:
        return trained
    return config.dtype if config.dtype in SAVED_DTYPES else trained


def name_of(dtype: torch.dtype) -> str:
    """Return the name that settings and config.json have for a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _published(settings: RunSettings, config: PreTrainedConfig) -> tuple[GenerationConfig, str]:
    """Return the settings that came with the weights, else those of a configuration, and whose."""
    model = settings.model
    source = str(stage_of(settings)) if model.init_from is not None else model.model_name_or_path
    config = copy.deepcopy(config)
    config.use_cache = True  # off while training on packed documents, which says nothing
    derived = GenerationConfig.from_model_config(config), config.model_type
    if source is None or (model.model_config is not None and model.init_from is None):
        return derived
    revision = model.model_revision or "main"
    try:
        return GenerationConfig.from_pretrained(source, revision=revision), source
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and not (Path(source) / GENERATION_CONFIG_NAME).is_file():
            return derived
        raise ConfigurationError(
            f"{source}: its {GENERATION_CONFIG_NAME} cannot be read ({first_line(error)}): mend "
            "it or delete it."
        ) from error


def _objections(generation: GenerationConfig, origin: str, repaired: bool = False) -> set[str]:
    """Return the settings that cannot be saved beside others; raises for what stays invalid."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        named = set(re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE))
        if named and not repaired:
            return named
        raise ConfigurationError(
            f"{origin}: transformers cannot save its generation settings ({first_line(error)}): "
            f"mend or delete its {GENERATION_CONFIG_NAME}."
        ) from error
    return set()
