"""Methods of transformers and TRL that we override: their signatures and their order.

When a test fails after an update, look at the library's change before you change the test.
"""

import inspect

import pytest
from transformers import Trainer
from trl import SFTTrainer

from utils.training.saving import SavingTrainer
from utils.training.trainer import PackedTrainer

# Expected parameters, without self.
SIGNATURES = {
    "get_train_dataloader": "",
    "get_eval_dataloader": "eval_dataset",
    "_prepare_inputs": "inputs",
    "get_batch_samples": "epoch_iterator num_batches device",
    "floating_point_ops": "inputs",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "log": "logs start_time",
    "save_model": "output_dir _internal_call",
    "_issue_warnings_after_load": "load_result",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
    "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained "
    "steps_trained_in_current_epoch",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial "
    "epoch ignore_keys_for_eval start_time learning_rate",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_save_checkpoint": "model trial",
    "_get_output_dir": "trial",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "_save_rng_state": "output_dir",
    "_load_rng_state": "checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
}


def test_the_libraries_hooks_have_the_signatures_that_we_override():
    own = {
        name
        for name in vars(SavingTrainer) | vars(PackedTrainer)
        if callable(getattr(PackedTrainer, name, None)) and hasattr(Trainer, name)
    }
    assert own - {"__init__"} == set(SIGNATURES)
    for base in (Trainer, SFTTrainer):
        for name, expected in SIGNATURES.items():
            parameters = inspect.signature(getattr(base, name)).parameters
            assert list(parameters) == ["self", *expected.split()], (base, name)


# Lines of Trainer's methods in the order that PackedTrainer and the callbacks rely on.
ORDER = {
    "_inner_training_loop": [
        "self._globalstep_last_logged = self.state.global_step",
        "self.callback_handler.on_train_begin(", "if args.eval_on_start:", "self._run_epoch(",
        "return self._finalize_training(",
    ],
    "_run_epoch": [
        "self._load_rng_state(resume_from_checkpoint)", "self.get_batch_samples(",
        "self.callback_handler.on_step_begin(", "tr_loss_step = self.training_step(",
        "self._get_grad_norm(", "self.callback_handler.on_pre_optimizer_step(",
        "self.optimizer.step()", "self.callback_handler.on_optimizer_step(",
        "if not self.accelerator.optimizer_step_was_skipped:", "self.state.global_step += 1",
        "self.callback_handler.on_step_end(", "self._maybe_log_save_evaluate(",
    ],
    "_maybe_log_save_evaluate": [
        "self._globalstep_last_logged = self.state.global_step", "if self.control.should_evaluate:",
        "self._evaluate(trial, ignore_keys_for_eval)", "self._determine_best_metric(",
        "if self.control.should_save:", "self._save_checkpoint(model, trial)",
        "self.callback_handler.on_save(",
    ],
    "_save_checkpoint": [
        "self._get_output_dir(", "self.save_model(output_dir", "self.state.best_global_step",
        "self._save_rng_state(output_dir)", "self.state.save_to_json(", "rotate_checkpoints(",
    ],
    "_finalize_training": [
        "self.log(metrics)", "if self.args.load_best_model_at_end", "self._load_best_model()",
        "self.callback_handler.on_train_end(",
    ],
}  # fmt: skip


@pytest.mark.parametrize("method", ORDER)
def test_trainer_does_things_in_the_order_that_stopping_relies_on(method):
    source = inspect.getsource(getattr(Trainer, method))
    places = [source.index(line) for line in ORDER[method]]
    assert places == sorted(places)
