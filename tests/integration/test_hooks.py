"""Methods of transformers and TRL that we override: their signatures, and that they are called.

When a test fails after an update, look at the library's change before you change the test.
"""

import inspect

import pytest
import tiny
from transformers import Trainer
from trl import SFTTrainer

import pretrain
import sft_train
from utils.training.saving import SavingTrainer
from utils.training.trainer import PackedTrainer

# Expected parameters, without self.
SIGNATURES = {
    "get_train_dataloader": "",
    "get_eval_dataloader": "eval_dataset",
    "_prepare_inputs": "inputs",
    "get_batch_samples": "epoch_iterator num_batches device",
    "training_step": "model inputs num_items_in_batch",
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


def test_every_overridden_hook_is_listed_here():
    own = {
        name
        for name in vars(SavingTrainer) | vars(PackedTrainer)
        if callable(getattr(PackedTrainer, name, None)) and hasattr(Trainer, name)
    }
    assert own - {"__init__"} == set(SIGNATURES)


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_the_libraries_hooks_have_the_signature_we_override(base, name):
    parameters = inspect.signature(getattr(base, name)).parameters
    if (base, name) == (SFTTrainer, "training_step"):  # it passes all on to Trainer's
        assert list(parameters) == ["self", "args", "kwargs"]
    else:
        assert list(parameters) == ["self", *SIGNATURES[name].split()]


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain, sft_train])
def test_a_run_goes_through_every_hook(
    script, pretraining, fine_tuning, workspace, tmp_path, monkeypatch
):
    called: set[str] = set()

    def noted(name: str, real):
        return lambda *args, **kwargs: called.add(name) or real(*args, **kwargs)

    for name in SIGNATURES:
        monkeypatch.setattr(PackedTrainer, name, noted(name, getattr(PackedTrainer, name)))
    command_line, split = (
        (pretraining, "heldout") if script is pretrain else (fine_tuning, "chats_heldout")
    )
    argv = command_line(
        tmp_path / "run",
        max_steps=1,
        save_steps=1,
        eval_data=f"heldout={workspace / split}",
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end="true",
        metric_for_best_model="eval_heldout_loss",
    )
    script.main(argv)
    resumed = {"_load_rng_state", "_load_from_checkpoint"}
    assert called == set(SIGNATURES) - resumed, "they are for a resumed run"
    (line,) = tiny.train_lines(tmp_path / "run")
    # SFTTrainer would log one rank's tokens as the total, and write a model card at every save.
    assert not line.keys() & {"num_tokens", "entropy", "mean_token_accuracy"}
    assert not list((tmp_path / "run").glob("checkpoint-*/README.md"))


# Lines of Trainer's methods in the order that PackedTrainer and the callbacks rely on.
ORDER = {
    "_inner_training_loop": [
        "self._tr_loss = torch.tensor(0.0", "self._total_loss_scalar = 0.0",
        "self._globalstep_last_logged = self.state.global_step",
        "self.callback_handler.on_train_begin(", "if args.eval_on_start:",
        "self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)", "self._run_epoch(",
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
        "self.state.global_step > self._globalstep_last_logged",
        "self._globalstep_last_logged = self.state.global_step", "if self.control.should_evaluate:",
        "self._evaluate(trial, ignore_keys_for_eval)", "self._determine_best_metric(",
        "if self.control.should_save:", "self._save_checkpoint(model, trial)",
        "self.callback_handler.on_save(",
    ],
    "_save_checkpoint": [
        "run_dir = self._get_output_dir(",
        "output_dir = os.path.join(run_dir, checkpoint_folder)", "self.save_model(output_dir",
        "self.state.best_global_step", "self._save_rng_state(output_dir)",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
        "rotate_checkpoints(",
    ],
    "_load_from_checkpoint": ["PreTrainedConfig.from_json_file(config_file)"],
    "_prepare_for_training": ["deepspeed_load_checkpoint("],
    "_finalize_training": [
        "self.log(metrics)", "if self.args.load_best_model_at_end", "self._load_best_model()",
        "self.args.save_total_limit == 1", "self.callback_handler.on_train_end(",
    ],
    "_load_best_model": ["deepspeed_load_checkpoint("],
}  # fmt: skip


@pytest.mark.parametrize("method", ORDER)
def test_trainer_does_things_in_the_order_that_stopping_relies_on(method):
    source = inspect.getsource(getattr(Trainer, method))
    places = [source.index(line) for line in ORDER[method]]
    assert places == sorted(places)
