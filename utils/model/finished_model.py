"""Generation settings, tensor type and processor files of a run's finished model, `final/`.

All of these are read before weights load, so that errors appear at the start of the run.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from utils.checkpoints.files import OLD_TEMPLATE, PROCESSOR_FILES
from utils.checkpoints.record import RunRecord
from utils.config.settings import RunSettings
from utils.data.loader import PackedDataset
from utils.data.tokenizers import vocabulary_size
from utils.host.foreign import library_errors
from utils.model.stages import stage_of

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def generation_settings(settings: RunSettings, config: PreTrainedConfig) -> GenerationConfig:
    """Return the base model's published generation settings, or else defaults from `config`.

    Raises ConfigurationError if the published settings cannot be read or are invalid.
    """
    source = str(stage_of(settings) or settings.model.model_name_or_path or "")
    if file := _find_file(source, GENERATION_CONFIG_NAME, settings):
        with library_errors(file, "it cannot be used", "Mend it or delete it."):
            found = GenerationConfig.from_pretrained(
                source, revision=settings.model.model_revision or "main"
            )
            check_token_ids(found)
            return found
    config = copy.deepcopy(config)
    config.use_cache = True  # `load_model_config` turned it off for training
    return GenerationConfig.from_model_config(config)


def check_token_ids(found: GenerationConfig) -> None:
    """Raise ValueError unless each setting in TOKEN_IDS has an id, a list of ids or None."""
    for name in TOKEN_IDS:
        value = getattr(found, name)
        ids = value if isinstance(value, list) else [0 if value is None else value]
        if not all(type(each) is int for each in ids):
            raise ValueError(f"{name} is {value!r}, not a token's id or a list of ids")


def finished_generation(
    model: Any, tokenizer: PreTrainedTokenizerBase, data: PackedDataset, padded: bool = False
) -> GenerationConfig | None:
    """Return the model's generation settings, with stops at tokens that end answers in `data`.

    padded: whether the embedding has more rows than the tokenizer has tokens. Generation then never
    chooses an id without a token. Returns None if the model cannot generate.
    """
    if not model.can_generate():
        return None
    result = copy.deepcopy(model.generation_config)
    known = result.eos_token_id if isinstance(result.eos_token_id, list) else [result.eos_token_id]
    turns = [each.description.preparation.get("end_of_turn_token_id") for each in data.datasets]
    ends = dict.fromkeys([*known, tokenizer.eos_token_id, *turns])
    if stops := [end for end in ends if end is not None]:
        result.eos_token_id = stops if len(stops) > 1 else stops[0]
    if padded:
        unused = range(vocabulary_size(tokenizer), model.config.get_text_config().vocab_size)
        result.suppress_tokens = sorted({*(result.suppress_tokens or ()), *unused}) or None
    # transformers refuses to save inconsistent settings (a temperature without do_sample) unless
    # their hash shows that they were loaded like this.
    result._original_object_hash = hash(result)
    return result


def read_processor_files(settings: RunSettings) -> dict[str, bytes]:
    """Return {file name: content} of the base model's processor files. All ranks must call this."""
    source = str(stage_of(settings) or settings.model.model_name_or_path or "")
    paths = {name: _find_file(source, name, settings) for name in PROCESSOR_FILES}
    return {name: path.read_bytes() for name, path in paths.items() if path is not None}


def write_processor_files(files: Mapping[str, bytes], tokenizer: Any, directory: Path) -> None:
    """Write the processor's files. If the tokenizer has a chat template, omit OLD_TEMPLATE."""
    for name, content in files.items():
        if name != OLD_TEMPLATE or not tokenizer.chat_template:
            (directory / name).write_bytes(content)


def _find_file(source: str, name: str, settings: RunSettings) -> Path | None:
    """Return the path of the file `name` of a model, or None if there is no such file.

    source: the model's folder or its name on the Hub
    """
    path = source and cached_file(
        source, name, revision=settings.model.model_revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return Path(path) if path else None


def set_generation_settings(model: Any, generation: GenerationConfig | None) -> None:
    """Set the model's generation settings before a save, because Trainer has changed them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if generation is not None:
        base.generation_config = copy.deepcopy(generation)


def saved_dtype(
    settings: RunSettings, config: PreTrainedConfig, trained: torch.dtype
) -> torch.dtype:
    """Return the tensor type of `final/`: --save_dtype, or the base model's type.

    trained: the type of the weights in training. A model that began with random weights is saved in
    this type. A resumed run with `--init_from` keeps its recorded type, because `config` may come
    from the run's own checkpoint.
    """
    model = settings.model
    if model.save_dtype != "auto":
        return getattr(torch, model.save_dtype)
    if model.init_from is not None:
        for start in RunRecord(Path(str(settings.training.output_dir))).starts:
            if "save_dtype" in start:
                return getattr(torch, start["save_dtype"])
    elif model.model_config is not None:
        return trained
    return config.dtype if config.dtype in SAVED_DTYPES else trained


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in settings and in config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
