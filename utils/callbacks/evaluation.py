"""Early stopping, and samples of the model's text at each evaluation."""

import copy
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from utils.callbacks.journal import Journal
from utils.host.redaction import redacted
from utils.model.probe import fork_random

if TYPE_CHECKING:
    from utils.prepare.encoding import Prompt

UNIMPROVED = "unimproved_evaluations"  # key in Stoker's part of trainer_state.json

# Settings of a generation configuration that greedy decoding does not use.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")

logger = logging.getLogger(__name__)


class FinishedEarlyError(Exception):
    """Error on all ranks before the first step: early stopping had already ended the run."""


class EarlyStopping(TrainerCallback):
    """A callback that ends the run after `patience` evaluations in a row without improvement.

    transformers' EarlyStoppingCallback (`judge`) compares the metric metric_for_best_model. Trainer
    does not call `judge`, because `judge` would count each split and each interrupted evaluation,
    and would lose the count on a resume. Instead, the trainer calls `take_evaluation`.
    """

    def __init__(self, patience: int, threshold: float):
        self.judge = EarlyStoppingCallback(patience, threshold)

    @property
    def ended(self) -> bool:
        """Return whether `patience` evaluations in a row brought no improvement."""
        return self.judge.early_stopping_patience_counter >= self.judge.early_stopping_patience

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the number of evaluations without improvement from a checkpoint (`saved`)."""
        self.judge.early_stopping_patience_counter = saved.get(UNIMPROVED, 0)

    def state(self) -> dict[str, Any]:
        """Return {"unimproved_evaluations": count} for a checkpoint."""
        return {UNIMPROVED: self.judge.early_stopping_patience_counter}

    def take_evaluation(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        metrics: dict[str, float],
    ) -> bool:  # fmt: skip
        """Count an evaluation by its metrics; return whether early stopping ends the run.

        Call this before Trainer updates the best metric.
        """
        self.judge.on_evaluate(args, state, control, metrics)
        if self.ended and state.is_world_process_zero:
            logger.info(
                "early stopping after step %d: %s was %.4f at best, no better in %d evaluations",
                state.global_step, args.metric_for_best_model, state.best_metric,
                self.judge.early_stopping_patience,
            )  # fmt: skip
        return self.ended

    @override
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Raise FinishedEarlyError if early stopping had already ended the resumed run."""
        if self.ended:
            raise FinishedEarlyError

    @override
    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """After early stopping, cancel Trainer's log, evaluation and save at the epoch's end."""
        if self.ended:
            control.should_log = control.should_evaluate = control.should_save = False


class Samples:
    """Completions of fixed prompts, written to the log, metrics.jsonl and wandb.

    The trainer calls `generate` at the beginning of each evaluation. Decoding is greedy. All ranks
    generate the same text, because FSDP2 and ZeRO-3 gather weights with a collective. Training is
    not affected: the RNG state and the model's attention are restored, and compiled layers run
    uncompiled.
    """

    def __init__(self, prompts: "Sequence[Prompt]", max_new_tokens: int, journal: Journal):
        self.prompts, self.max_new_tokens, self.journal = prompts, max_new_tokens, journal

    def generate(self, trainer: Any) -> None:
        """Generate a completion of each prompt and log all of them. All ranks must call this."""
        if not self.prompts:
            return
        tokenizer, rows = trainer.processing_class, []
        with _generation_mode(trainer, self.max_new_tokens):
            for prompt in self.prompts:
                ids = torch.tensor([prompt.token_ids], device=trainer.args.device)
                output = trainer.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
                completion = tokenizer.decode(output[0, ids.shape[1] :])
                rows.append({"prompt": prompt.text, "completion": completion})
        if not trainer.is_world_process_zero():
            return
        step, rows = trainer.state.global_step, redacted(rows)
        for row in rows:
            quoted = {name: json.dumps(text, ensure_ascii=False) for name, text in row.items()}
            logger.info("sample (step %d): %s -> %s", step, quoted["prompt"], quoted["completion"])
        self.journal.write({"event": "samples", "step": step, "samples": rows})
        wandb = sys.modules.get("wandb")
        run = getattr(wandb, "run", None)
        if wandb is not None and run is not None:
            data = [[step, *row.values()] for row in rows]
            table = wandb.Table(columns=["step", "prompt", "completion"], data=data)
            run.log({"samples": table, "train/global_step": step})


@contextmanager
def _generation_mode(trainer: Any, max_new_tokens: int) -> Iterator[None]:
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    configuration, attention = base.generation_config, base.config._attn_implementation
    was_training, packed = model.training, attention not in ("sdpa", "eager")
    settings = copy.deepcopy(trainer.generation)
    settings.update(**dict.fromkeys(SAMPLING), max_length=None, max_new_tokens=max_new_tokens)
    settings.do_sample, settings.use_cache = False, True  # published settings may differ
    tokenizer = trainer.processing_class
    settings.pad_token_id = next(
        (each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0
    )
    random_states = fork_random(trainer.args.device)
    with torch.no_grad(), random_states, torch.compiler.set_stance("force_eager"):
        try:
            base.generation_config = settings
            if packed:
                base.set_attn_implementation("eager")
            model.eval()
            yield
        finally:
            if packed:
                base.set_attn_implementation(attention)
            base.generation_config = configuration
            model.train(was_training)
