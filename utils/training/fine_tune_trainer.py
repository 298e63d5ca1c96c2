"""The trainer of sft_train.py; apart, for pretraining need not import TRL's."""

from typing import Any

from datasets import Dataset, load_from_disk
from peft import PeftConfig
from trl import SFTTrainer

from utils.data.sequences import PackedDataset
from utils.training.trainer import PackedTrainerMixin


class FineTuneTrainer(PackedTrainerMixin, SFTTrainer):
    """Supervised fine-tuning, full or LoRA: SFTTrainer's model wiring on packed conversations."""

    def __init__(
        self, *, train_rows: PackedDataset, peft_config: PeftConfig | None = None, **kwargs: Any
    ):
        if peft_config is not None:
            _train_new_tokens(peft_config, kwargs["model"])
        # SFTTrainer looks at one record of a datasets.Dataset; the rows come from train_rows.
        dataset = load_from_disk(str(train_rows.datasets[0].path))
        assert isinstance(dataset, Dataset), "open_token_dataset resolves to one split"
        router = _router_settings(kwargs["model"])
        super().__init__(
            train_dataset=dataset, train_rows=train_rows, peft_config=peft_config, **kwargs
        )
        # SFTTrainer turned the experts' term on there: ours needs no setting of the model, whose
        # configuration is exported as it was.
        vars(kwargs["model"].config.get_text_config()).update(router)


def _router_settings(model: Any) -> dict[str, Any]:
    values = vars(model.config.get_text_config())
    return {name: value for name, value in values.items() if "router" in name}


def _train_new_tokens(adapters: Any, model: Any) -> None:
    """Let LoRA train the rows of tokens that are new to the model, in embedding and last layer."""
    new = getattr(model, "new_tokens", None)
    if not new:
        return
    layers = [model.get_input_embeddings()]
    if model.get_output_embeddings().weight is not layers[0].weight:  # PEFT follows a tied one
        layers.append(model.get_output_embeddings())
    whole = adapters.modules_to_save or ()
    names = {
        name: list(new)
        for name, module in model.named_modules()
        if any(module is layer for layer in layers) and name.rpartition(".")[2] not in whole
    }
    adapters.trainable_token_indices = names or None
