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
        router = _router_settings(kwargs["model"])
        super().__init__(train_dataset=dataset, train_rows=train_rows, **kwargs)
        # SFTTrainer turned the experts' term on there: ours needs no setting of the model, whose
        # configuration is exported as it was.
        vars(kwargs["model"].config.get_text_config()).update(router)


def _router_settings(model: Any) -> dict[str, Any]:
    values = vars(model.config.get_text_config())
    return {name: value for name, value in values.items() if "router" in name}
