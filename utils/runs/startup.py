"""The process before the run: log lines, tokens, signals, and a launch that is what was asked."""

import logging
import os

from utils.cluster.decisions import gathered
from utils.cluster.environment import configure_logging, global_rank
from utils.cluster.launch import LaunchFacts, check_launch, requested_strategy
from utils.cluster.signals import install_stop_signals
from utils.cluster.tokens import load_env_file
from utils.config.errors import UnfitClusterError
from utils.config.run_settings import RunSettings
from utils.training.safe_loading import guard_loading

logger = logging.getLogger(__name__)


def start_process(settings: RunSettings) -> LaunchFacts:
    """Set up logging, tokens, signals and loading, check the launch; the settings are parsed.

    A dry run on a login node stands for the launch that WORLD_SIZE and the accelerate variables
    describe. Raises ConfigurationError.
    """
    configure_logging()
    for note in settings.notes:
        logger.info("settings: %s", note)
    load_env_file()
    if not settings.run.dry_run:
        install_stop_signals()
        launch = check_launch()
        check_same_precision(settings, launch)
        guard_loading(launch.strategy)
        return launch
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return LaunchFacts(
        rank=global_rank(),
        world_size=world_size,
        strategy=requested_strategy(os.environ, world_size),
        hosts=(),
        device=_device_type(),
    )


def check_same_precision(settings: RunSettings, launch: LaunchFacts) -> None:
    """Refuse ranks that compute in different types; collective over ranks.

    Left open, bf16 follows from the CPU, and hosts may differ. Raises UnfitClusterError.
    """
    if launch.world_size == 1:
        return
    values = settings.values
    answers = gathered((values["bf16"], values.shown("bf16")))
    for rank, (bf16, shown) in enumerate(answers):
        if bf16 != answers[0][0]:
            raise UnfitClusterError(
                f"the ranks would compute in different types: {answers[0][1]} on "
                f"{launch.hosts[0]} (rank 0), {shown} on {launch.hosts[rank]} (rank {rank}): set "
                "bf16 yourself, or take nodes of one kind."
            )


def _device_type() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else "cpu"
