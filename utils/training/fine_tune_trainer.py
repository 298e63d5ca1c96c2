"""The trainer of sft_train.py; apart, for pretraining need not import TRL's."""

from typing import Any

from datasets import Dataset, load_from_disk
from trl import SFTTrainer

from utils.data.packed_rows import PackedDataset
from utils.training.packed_trainer import PackedTrainerMixin


class FineTuneTrainer(PackedTrainerMixin, SFTTrainer):
    """Supervised fine-tuning, full or LoRA: SFTTrainer's model wiring on packed conversations."""

    def __init__(self, *, train_rows: PackedDataset, **kwargs: Any):
        # SFTTrainer looks at one record of a datasets.Dataset; the rows come from train_rows.
        dataset = load_from_disk(str(train_rows.datasets[0].path))
        assert isinstance(dataset, Dataset), "open_token_dataset resolves to one split"
        super().__init__(train_dataset=dataset, train_rows=train_rows, **kwargs)
        self._stop_at_the_end_of_a_turn()

    def _stop_at_the_end_of_a_turn(self) -> None:
        """Let the finished model's `generate` stop where the chats taught it to."""
        model: Any = self.model
        generation = model.generation_config
        known = generation.eos_token_id
        stops = [known] if isinstance(known, int) else list(known or [])
        ends = [dataset.end_of_turn_token_id for dataset in self.train_rows.datasets]
        stops += [end for end in dict.fromkeys(ends) if end is not None and end not in stops]
        generation.eos_token_id = stops or None
