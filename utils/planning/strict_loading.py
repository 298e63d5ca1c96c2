"""Loads a model whose directory has just its tensors, or says which it lacks or has too many."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed

from utils.cluster.decisions import on_every_rank, on_rank_0
from utils.config.errors import ConfigurationError


def load_strictly(path: str, *, exact: bool, **arguments: Any) -> PreTrainedModel:
    """Load as from_pretrained does with these arguments; collective over ranks.

    Raises ConfigurationError on all ranks with every tensor that the directory lacks or has in
    another shape, and with `exact` those in excess: transformers would put random weights there, or
    drop it, and only warn. A weight that is tied to another one is not missing.
    """
    if deepspeed.is_deepspeed_zero3_enabled():
        # There transformers looks for missing tensors alone, and raises on the first rank.
        on_rank_0(lambda: check_without_loading(path, exact=exact, **arguments))
    model, info = _load(path, arguments)
    # Where one rank alone reads the file (FSDP), it alone sees what is wrong.
    on_every_rank(lambda: _refuse_misfits(path, info, exact=exact))
    return model


def _load(path: str, arguments: Mapping[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            **arguments,
            ignore_mismatched_sizes=True,  # all of them are refused here
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # the storage's
        said = str(error).splitlines()[0]
        raise ConfigurationError(f"the weights in {path} cannot be read: {said}") from error
    return loaded


def check_without_loading(path: str, *, exact: bool, **arguments: Any) -> None:
    """Raise what `load_strictly` would; of the weights' files just the headers are read."""
    with _whole_models():
        _, info = _load(path, {**arguments, "device_map": "meta"})
    _refuse_misfits(path, info, exact=exact)


@contextlib.contextmanager
def _whole_models() -> Iterator[None]:
    """Let from_pretrained forget for a while that ZeRO-3 splits what it builds."""
    # The setter takes the object alone, and who holds that differs by how DeepSpeed was set up.
    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def _refuse_misfits(path: str, info: Mapping[str, Any], *, exact: bool) -> None:
    problems = [f"tensor {name} is missing in {path}." for name in sorted(info["missing_keys"])]
    problems += [
        f"tensor {name} in {path} has shape {tuple(found)}, the model needs {tuple(needed)}."
        for name, found, needed in sorted(info["mismatched_keys"])
    ]
    if exact:
        problems += [
            f"tensor {name} in {path} has no place in the model."
            for name in sorted(info["unexpected_keys"])
        ]
    if problems:
        raise ConfigurationError(problems)
