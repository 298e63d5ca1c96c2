"""Bad input is refused before any training, with what is wrong, and nothing is written over."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import tiny
import yaml

import pretrain
import sft_train
from utils.config.errors import ConfigurationError
from utils.launch.script import run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Run a script's main, see it refused, and return the message; nothing may be written."""

    def run(main: Callable, argv: list[str]) -> str:
        with pytest.raises(ConfigurationError) as caught:
            main(argv)
        assert not (tmp_path / "run").exists(), "a refused run wrote something"
        return str(caught.value)

    return run


def test_missing_data_is_named(refused, pretraining, tmp_path):
    message = refused(pretrain.main, pretraining(tmp_path / "run", train_data="/no/such/data"))
    assert "/no/such/data" in message


def test_all_bad_splits_are_named_at_once(refused, pretraining, tmp_path, workspace):
    empty = tiny.save(tmp_path / "empty", {"input_ids": [[5, 6], []]})
    beyond = tiny.save(tmp_path / "beyond", {"input_ids": [[5, 6], [7, 9000]]})
    argv = pretraining(
        tmp_path / "run",
        train_data=empty,
        eval_data=[f"a={beyond}", "b=/missing"],
        eval_strategy="steps",
        eval_steps=3,
    )
    message = refused(pretrain.main, argv)
    assert f"{empty}: row 1 is empty" in message
    assert f"{beyond}: row 1 holds token id 9000, but the vocabulary ends at 127" in message
    assert "/missing: no such directory" in message


def test_rows_without_loss_are_named(refused, fine_tuning, tmp_path):
    rows = {"input_ids": [[5, 6, 7], [5, 6, 7]], "completion_mask": [[0, 1, 1], [0, 0, 0]]}
    data = tiny.save(tmp_path / "masked", rows)
    message = refused(sft_train.main, fine_tuning(tmp_path / "run", train_data=data))
    assert f"{data}: row 1 has no token to learn from" in message


def test_labels_of_another_length_are_named(refused, fine_tuning, tmp_path):
    rows = {"input_ids": [[5, 6, 7], [5, 6, 7]], "labels": [[5, 6, 7], [5, 6]]}
    data = tiny.save(tmp_path / "labels", rows)
    assert "row 1" in refused(sft_train.main, fine_tuning(tmp_path / "run", train_data=data))


def test_wrong_column_types_are_named(refused, pretraining, tmp_path):
    data = tiny.save(tmp_path / "floats", {"input_ids": [[0.5, 1.5]]})
    message = refused(pretrain.main, pretraining(tmp_path / "run", train_data=data))
    assert "input_ids" in message


def test_a_model_with_a_smaller_vocabulary_is_refused(refused, pretraining, tmp_path):
    config = tiny.make_model_config(tmp_path / "model.json", vocab_size=100)
    message = refused(pretrain.main, pretraining(tmp_path / "run", model_config=config))
    assert "holds token id 127, but the vocabulary ends at 99" in message


def test_a_sequence_beyond_the_models_positions_is_refused(refused, pretraining, tmp_path):
    message = refused(pretrain.main, pretraining(tmp_path / "run", sequence_length=256))
    assert "--sequence_length 256 is beyond the model's 128 positions" in message


def test_a_long_chat_is_an_error_unless_said_otherwise(refused, fine_tuning, tmp_path):
    message = refused(sft_train.main, fine_tuning(tmp_path / "run", sequence_length=32))
    assert "more than sequence_length 32" in message


def test_unknown_keys_name_file_key_and_nearest(refused, pretraining, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rte: 1e-4\nseed: 4.5\n")
    argv = [*pretraining(tmp_path / "run"), "--config", str(recipe), "--sequence_lenth", "3"]
    message = refused(pretrain.main, argv)
    assert f"{recipe}:1" in message
    assert "learning_rate" in message
    assert f"{recipe}:2" in message
    assert "sequence_length" in message


def test_a_global_batch_that_does_not_divide_is_refused(refused, pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", global_batch_size=5)
    assert "use global_batch_size 4 or 6" in refused(pretrain.main, argv)


def test_data_smaller_than_a_global_batch_is_refused(refused, pretraining, tmp_path):
    message = refused(pretrain.main, pretraining(tmp_path / "run", global_batch_size=1000))
    assert "fewer than global_batch_size 1,000" in message


def test_an_unknown_architecture_setting_is_refused(refused, pretraining, tmp_path):
    config = tiny.make_model_config(tmp_path / "model.json", hiden_size=64)
    message = refused(pretrain.main, pretraining(tmp_path / "run", model_config=config))
    assert "llama has no setting hiden_size" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hidden_size: 3", "needs a model_type"),
        ("model_type: [", "is not JSON or YAML"),
        ("model_type: no_such_model", "no_such_model"),
    ],
)
def test_a_bad_model_config_is_refused(refused, pretraining, tmp_path, text, words):
    config = tmp_path / "model.yaml"
    config.write_text(text)
    message = refused(pretrain.main, pretraining(tmp_path / "run", model_config=config))
    assert words in message


def test_a_missing_model_config_is_named(refused, pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", model_config=tmp_path / "none.yaml")
    assert "none.yaml cannot be read" in refused(pretrain.main, argv)


def test_a_missing_model_is_named(refused, fine_tuning, tmp_path, workspace):
    argv = fine_tuning(
        tmp_path / "run",
        model_name_or_path=tmp_path / "none",
        tokenizer_name_or_path=workspace / "tokenizer",
    )
    assert "no model could be found" in refused(sft_train.main, argv)
    (tmp_path / "none" / "final").mkdir(parents=True)
    (tmp_path / "none" / "final" / "config.json").write_text("{}")
    assert f"its model is in {tmp_path / 'none' / 'final'}" in refused(sft_train.main, argv)


def test_a_model_that_lacks_a_tensor_is_refused(fine_tuning, base_model, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    damaged = tmp_path / "damaged"
    shutil.copytree(base_model, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    argv = fine_tuning(tmp_path / "run", model_name_or_path=damaged)
    with pytest.raises(ConfigurationError, match=r"layers.1.mlp.up_proj.weight is missing"):
        sft_train.main(argv)


def test_a_model_from_scratch_needs_a_tokenizer(refused, pretraining, tmp_path):
    argv = pretraining(tmp_path / "run")
    place = argv.index("--tokenizer_name_or_path")
    message = refused(pretrain.main, argv[:place] + argv[place + 2 :])
    assert "give --tokenizer_name_or_path" in message


def test_an_output_directory_with_something_else_is_left_alone(pretraining, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("all my work")
    with pytest.raises(ConfigurationError, match=r"holds no run of Stoker \(it has thesis.tex"):
        pretrain.main(pretraining(run))
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]


def test_an_output_directory_that_is_a_file_is_refused(pretraining, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        pretrain.main(pretraining(tmp_path / "run"))


def test_the_directory_of_another_run_is_refused_and_harmless_changes_are_logged(
    pretraining, fine_tuning, workspace, tmp_path, capsys
):
    run = tmp_path / "run"
    pretrain.main(pretraining(run, max_steps=3))
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigurationError, match="its sequence_length is 64, now it is 32"):
        pretrain.main(pretraining(run, max_steps=3, sequence_length=32))
    other = workspace / "heldout"
    with pytest.raises(ConfigurationError) as caught:
        pretrain.main(pretraining(run, max_steps=3, train_data=other, seed=7))
    assert {"train_data", "seed"} <= {
        problem.split(": its ")[1].split()[0] for problem in caught.value.problems[:-1]
    }
    assert "content fingerprint" in caught.value.problems[-1]
    with pytest.raises(ConfigurationError, match=r"holds a run of pretrain\.py"):
        sft_train.main(fine_tuning(run))
    assert (run / "config.yaml").read_bytes() == before
    capsys.readouterr()
    pretrain.main(pretraining(run, max_steps=6))
    assert "max_steps: 3 -> 6" in capsys.readouterr().out
    assert len(tiny.losses(run)) == 6


def test_a_finished_run_without_checkpoints_is_not_trained_over(pretraining, tmp_path):
    run = tmp_path / "run"
    argv = pretraining(run, save_strategy="no")
    drop = argv.index("--save_steps")
    argv = argv[:drop] + argv[drop + 2 :]
    pretrain.main(argv)
    with pytest.raises(ConfigurationError, match="finished run without checkpoints"):
        pretrain.main(argv)


def test_a_script_shows_the_problems_without_traceback_and_exits_with_2(
    pretraining, tmp_path, capsys
):
    argv = pretraining(tmp_path / "run", train_data="/no/such/data")
    assert run_script(lambda: pretrain.main(argv)) == 2
    shown = capsys.readouterr().err
    assert "configuration error (1 problem)" in shown
    assert "Traceback" not in shown


def test_users_own_datasets_train_as_they_are(pretraining, fine_tuning, tmp_path):
    """int64 ids by plain `datasets` code, with labels or without, also as a DatasetDict."""
    rows = tiny.documents(60, seed=5)
    labels = [[-100, *row[1:]] for row in rows]
    both = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    folder = datasets.DatasetDict({"train": both, "test": both.select(range(9))})
    folder.save_to_disk(tmp_path / "mine")
    mask = [[1] * len(row) for row in rows]
    extra = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": mask, "id": mask})
    extra.save_to_disk(tmp_path / "extra")
    evaluation = {
        "eval_data": f"test={tmp_path / 'mine'}",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    settings = {"max_steps": 1, "train_data": tmp_path / "mine", **evaluation}
    pretrain.main(pretraining(tmp_path / "a", **settings))
    sft_train.main(fine_tuning(tmp_path / "b", **settings))
    pretrain.main(pretraining(tmp_path / "c", max_steps=1, train_data=tmp_path / "extra"))
    for run in "abc":
        assert len(tiny.losses(tmp_path / run)) == 1
    saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert saved["train_data"] == [str(tmp_path / "mine")]
    untouched = {path.name for path in (tmp_path / "mine").iterdir()}
    assert untouched == {"dataset_dict.json", "test", "train"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash_attention_2", "flash_attention_2: needs an NVIDIA GPU"),
        ("flash_attention_3", "flash_attention_3: needs an NVIDIA GPU"),
        ("flex_attention", "has no backward pass on the CPU"),
        ("flash_attention_9", "flash_attention_9"),
    ],
)
def test_an_attention_that_cannot_run_here_is_refused_before_weights_load(
    name, words, refused, pretraining, tmp_path, monkeypatch
):
    monkeypatch.setattr("utils.model.weights.load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("utils.config.checks.KERNELS", {})  # as if installed
    argv = pretraining(tmp_path / "run", attn_implementation=name)
    assert words in refused(pretrain.main, argv)


def test_a_model_that_cannot_keep_packed_documents_apart_is_refused(refused, pretraining, tmp_path):
    config = tmp_path / "mamba.yaml"
    config.write_text("model_type: mamba\nhidden_size: 32\nnum_hidden_layers: 2\n")
    message = refused(pretrain.main, pretraining(tmp_path / "run", model_config=config))
    assert "mamba" in message
