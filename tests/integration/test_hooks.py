"""The hooks of transformers and TRL that we override: their signatures, and that they are called.

When one fails after an update of a library, look at what moved before changing the test.
"""

import inspect

import pytest
import tiny
from transformers import Trainer
from trl import SFTTrainer

import pretrain
import sft_train
from utils.training.trainers import FineTuneTrainer, PackedTrainerMixin, PretrainTrainer

SIGNATURES = {
    "get_train_dataloader": ["self"],
    "get_eval_dataloader": ["self", "eval_dataset"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "evaluation_loop": [
        "self",
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ],
    "log": ["self", "logs", "start_time"],
    "_save": ["self", "output_dir", "state_dict"],
    "_issue_warnings_after_load": ["self", "load_result"],
}


def test_every_overridden_hook_is_listed_here():
    own = {name for name in vars(PackedTrainerMixin) if callable(getattr(PackedTrainerMixin, name))}
    assert own - {"__init__", "create_model_card"} == set(SIGNATURES)


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_the_libraries_hooks_have_the_signature_we_override(base, name):
    assert list(inspect.signature(getattr(base, name)).parameters) == SIGNATURES[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "main", "command_line"),
    [
        (PretrainTrainer, pretrain.main, "pretraining"),
        (FineTuneTrainer, sft_train.main, "fine_tuning"),
    ],
)
def test_a_run_goes_through_every_hook(
    trainer_class, main, command_line, request, workspace, tmp_path, monkeypatch
):
    called: set[str] = set()

    def note(name: str) -> None:
        real = getattr(PackedTrainerMixin, name)

        def noted(self, *args, **kwargs):
            called.add(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(PackedTrainerMixin, name, noted)

    for name in SIGNATURES:
        note(name)
    split = "heldout" if trainer_class is PretrainTrainer else "chats_heldout"
    argv = request.getfixturevalue(command_line)(
        tmp_path / "run",
        max_steps=1,
        save_steps=1,
        eval_data=f"heldout={workspace / split}",
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end="true",
        metric_for_best_model="eval_heldout_loss",
    )
    main(argv)
    assert called == set(SIGNATURES)
    assert len(tiny.losses(tmp_path / "run")) == 1


@pytest.mark.slow
def test_trl_adds_no_metric_and_no_file_of_its_own(fine_tuning, tmp_path):
    """SFTTrainer would log the tokens of one row as all, and write a model card at every save."""
    from utils.callbacks.journal import read_journal

    run = tmp_path / "run"
    sft_train.main(fine_tuning(run, max_steps=2, save_steps=1))
    keys = set().union(*read_journal(run / "metrics.jsonl"))
    assert not keys & {"num_tokens", "entropy", "mean_token_accuracy"}
    assert not list(run.rglob("README.md"))
