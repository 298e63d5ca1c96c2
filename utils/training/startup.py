"""The process before the run: log lines, tokens, signals, and a launch that is what was asked."""

import os

from utils.cluster.environment import configure_logging, global_rank
from utils.cluster.launch import LaunchFacts, check_launch, requested_strategy
from utils.cluster.signals import install_stop_signals
from utils.cluster.tokens import load_env_file
from utils.config.run_settings import RunSettings


def start_process(settings: RunSettings) -> LaunchFacts:
    """Set up logging, tokens and signals and check the launch; call it after parsing the settings.

    A dry run on a login node stands for the launch that WORLD_SIZE and the accelerate variables
    describe. Raises ConfigurationError.
    """
    configure_logging()
    load_env_file()
    if not settings.run.dry_run:
        install_stop_signals()
        return check_launch()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return LaunchFacts(
        rank=global_rank(),
        world_size=world_size,
        strategy=requested_strategy(os.environ, world_size),
        hosts=(),
        device=_device_type(),
    )


def _device_type() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else "cpu"
