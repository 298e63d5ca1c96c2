"""The trainer of sft_train.py. pretrain.py imports neither this module nor TRL."""

from typing import Any

from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl import SFTTrainer, get_peft_config
from typing_extensions import override

from utils.plan.run_data import RunData
from utils.plan.run_plan import RunPlan
from utils.training.callbacks import Callbacks
from utils.training.trainer import PackedTrainer


class FineTuneTrainer(PackedTrainer, SFTTrainer):
    """A PackedTrainer for supervised fine-tuning. TRL's SFTTrainer prepares model and adapters."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        args: TrainingArguments,
        plan: RunPlan,
        data: RunData,
        callbacks: Callbacks,
    ):
        adapters: Any = get_peft_config(plan.adapters.model) if plan.adapters else None
        if adapters is not None and (new := getattr(model, "new_tokens", None)):
            adapters.trainable_token_indices = _new_token_rows(adapters, model, list(new)) or None
        # SFTTrainer inspects one record of this dataset. The training batches come from `data`.
        dataset = load_from_disk(str(data.train.datasets[0].folder))
        assert isinstance(dataset, Dataset), "open_token_dataset resolves to one split"
        config = vars(model.config.get_text_config())
        router = {name: value for name, value in config.items() if "router" in name}
        everything = (model, tokenizer, args, plan, data, callbacks)
        super().__init__(*everything, train_dataset=dataset, peft_config=adapters)
        # SFTTrainer turned on the load-balancing loss in the configuration. Undo this: our own loss
        # does not use the setting, and final/ gets the configuration unchanged.
        config.update(router)
        if plan.quantized is not None:
            adapted: Any = self.model
            for weight in adapted.parameters():
                if weight.requires_grad:  # undo SFTTrainer's cast to bfloat16
                    weight.data = weight.data.float()

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: config.yaml and provenance.json describe a run directory."""


def _new_token_rows(adapters: Any, model: Any, new: list[int]) -> dict[str, list[int]]:
    """Return {name of the embedding or head module: ids of new tokens}. PEFT trains these rows.

    Modules in LoRA's modules_to_save are left out, because PEFT trains all of their rows. A head
    that is tied to the embedding is left out as well.
    """
    layers = [model.get_input_embeddings()]
    if model.get_output_embeddings().weight is not layers[0].weight:  # it is not tied
        layers.append(model.get_output_embeddings())
    fully_trained = adapters.modules_to_save or ()
    return {
        name: list(new)
        for name, module in model.named_modules()
        if any(module is layer for layer in layers) and name.rpartition(".")[2] not in fully_trained
    }
