"""Training that goes on from a checkpoint of another number of ranks."""

import logging
from pathlib import Path
from typing import Any

from transformers import Trainer
from typing_extensions import override

from utils.checkpoints.manifest import read_manifest
from utils.training.random_states import derive_states, file_name, load_states, save_states
from utils.training.zero_resharding import repair_stage_3, universal_checkpoint

logger = logging.getLogger(__name__)


class ElasticTrainerMixin(Trainer):
    """Keeps exact random states on as many ranks, derives them on more or fewer; reshards ZeRO.

    Put before a Trainer class. Samples and accumulation follow from the settings
    (utils/data/order.py, utils/config/batch.py), DDP and FSDP2 load on any number of ranks by
    themselves. The hooks' contract is held by tests/integration/test_hooks.py.
    """

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        """Save this rank's random states, of its own device alone."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_states(Path(output_dir) / self._random_states_file(), self.args.device)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with the random states of this rank, or with new ones of its own."""
        if checkpoint is None:
            return
        ranks, step = read_manifest(Path(checkpoint)).world_size, self.state.global_step
        if ranks == self.args.world_size:
            load_states(Path(checkpoint) / self._random_states_file(), self.args.device)
            return
        derive_states(self.args.seed, step, self.args.process_index)
        logger.info(
            "the checkpoint is of %d ranks, now there are %d: random states (dropout) are new, by "
            "seed %d, step %d and rank; samples and global batches stay what they are",
            ranks,
            self.args.world_size,
            self.args.seed,
            step,
        )

    def _random_states_file(self) -> str:
        return file_name(self.args.process_index, self.args.world_size)

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare model and optimizer and load the checkpoint; under ZeRO resharded if need be."""
        if not self.is_deepspeed_enabled or resume_from_checkpoint is None:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        with universal_checkpoint(Path(resume_from_checkpoint), self.args.world_size) as other:
            if other is None:
                return super()._prepare_for_training(
                    max_steps, train_dataloader, resume_from_checkpoint
                )
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
            prepared = super()._prepare_for_training(max_steps, train_dataloader, str(other))
            engine: Any = self.model_wrapped
            if engine.zero_optimization_stage() == 3:
                repair_stage_3(engine.optimizer.optimizer, other)
            config["checkpoint"]["load_universal"] = False
            engine._config.load_universal_checkpoint = False
            return prepared

    @override
    def _load_best_model(self) -> None:
        """Load it, under ZeRO resharded if other ranks saved it."""
        best = self.state.best_model_checkpoint
        if not self.is_deepspeed_enabled or best is None:
            super()._load_best_model()
            return
        with universal_checkpoint(Path(best), self.args.world_size) as other:
            if other is not None:
                self.state.best_model_checkpoint = str(other)
                engine: Any = self.model_wrapped
                engine._config.load_universal_checkpoint = True
            super()._load_best_model()
        self.state.best_model_checkpoint = best
