"""The trainer of pretrain.py."""

from transformers import Trainer

from utils.training.packed_trainer import PackedTrainerMixin


class PretrainTrainer(PackedTrainerMixin, Trainer):
    """Next-token pretraining on packed documents."""
