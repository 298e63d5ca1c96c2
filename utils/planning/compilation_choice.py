"""Whether layers are compiled: as the settings say; else where a GPU trains what is proved."""

import copy
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from utils.checkpoints.run_record import PROVENANCE, earlier_starts
from utils.cluster.decisions import gathered, on_rank_0
from utils.cluster.launch import LaunchFacts
from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings
from utils.kernels.compilation import marked_layers, prepare_compilation
from utils.kernels.probe_model import causal_lm_class, has_experts

logger = logging.getLogger(__name__)

OLDEST = 8  # compute capability: Triton's code in bfloat16


def choose_compilation(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, elsewhere: bool
) -> bool:
    """Say, and return, whether layers are compiled.

    Left open, it is on where a GPU trains and nothing speaks against it, and a run that goes on
    keeps it: compiled layers round otherwise. Collective: ranks do alike. `elsewhere`: this only
    looks at a run that trains on another machine. Raises ConfigurationError where what is asked
    for, or was begun, cannot be.
    """
    if settings.model.compile is None:
        compiled, why = _settled(settings, config, launch, elsewhere)
    else:
        compiled, why = settings.model.compile, ""
    if compiled:
        where = prepare_compilation(launch.strategy, compiles_here=not elsewhere)
        hint = "; the compute node needs a C++ compiler" if elsewhere else ""
        logger.info("compile: %slayer by layer, static shapes, kept in %s%s", why, where, hint)
    elif why:
        logger.info("compile: %s", why)
    return compiled


def _settled(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, elsewhere: bool
) -> tuple[bool, str]:
    """Return what nobody said, and a word on why; none where nobody would ask."""
    output_dir = Path(str(settings.training.output_dir))
    starts = on_rank_0(lambda: earlier_starts(output_dir / PROVENANCE))
    if starts and starts[-1].get("compiled"):
        try:
            prepare_compilation(launch.strategy, compiles_here=not elsewhere)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the layers of the run in {output_dir} were compiled, here they cannot be: {error}"
            ) from error
        return True, "as in the last start of this run, "
    if elsewhere:
        return False, "settled on the compute node, on where a GPU trains"
    if launch.device != "cuda":
        return False, ""
    if starts:
        return False, "off, as in the last start of this run"
    hindrances = gathered(next(_hindrances(config, launch), ""))
    hindrance = next(filter(None, hindrances), "")
    return (False, f"off, as {hindrance}") if hindrance else (True, "auto, ")


def _hindrances(config: PreTrainedConfig, launch: LaunchFacts) -> Iterator[str]:
    """Yield why nobody should compile unasked."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") == "1":
        yield "TORCHDYNAMO_DISABLE is set"
    if torch.cuda.get_device_capability()[0] < OLDEST:
        yield f"the GPU's compute capability is below {OLDEST}.0"
    if importlib.util.find_spec("triton") is None:
        yield "triton is not installed"
    if has_experts(config):
        yield "each expert of this model gets as many tokens as are routed to it"
    model_class = causal_lm_class(config)
    with torch.device("meta"):
        layers = marked_layers(model_class(copy.deepcopy(config)))
    if not layers:
        yield f"transformers marks no layers in {model_class.__name__}"
    try:
        prepare_compilation(launch.strategy)
    except ConfigurationError as error:
        yield str(error)
