"""Own callbacks, loss, order, frozen layers and data format: the examples of docs/own-code.md."""

import json
import re
from pathlib import Path

import datasets
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import prepare_data
from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.host.journal_file import read_journal
from utils.training.callbacks import OwnCallbacks

DOCUMENT = Path(__file__).parents[2] / "docs" / "own-code.md"
EXAMPLES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
FROZEN = {"freeze": ["embed_tokens", "layers.0"]}
OWN = {"callbacks": "my_callbacks:LossAverage", "loss": "my_loss:focal", "order": "sequential"}


@pytest.fixture
def own_files(tmp_path, monkeypatch) -> Path:
    """Write the files of the document into the working directory."""
    (folder := tmp_path / "own").mkdir()
    monkeypatch.chdir(folder)
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    return folder


def test_a_run_with_own_code_resumes_bit_for_bit(pretrained, own_files, tmp_path, heldout, capsys):
    settings = {**OWN, **FROZEN, **heldout}
    whole = pretrained(tmp_path / "whole", **settings)
    shown = capsys.readouterr().out
    assert "packing in_order: order sequential (--order)" in shown
    assert "loss: my_loss:focal in training, cross-entropy in evaluations" in shown
    (counted,) = re.findall(r"memory: ([\d,]+) parameters, ([\d,]+) trained", shown)
    everything, trained = (int(each.replace(",", "")) for each in counted)
    first, last = (
        load_file(whole / name / "model.safetensors") for name in ("checkpoint-3", "final")
    )
    same = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert same == {n for n in first if "embed_tokens" in n or ".layers.0." in n}
    assert trained == everything - sum(first[name].numel() for name in same)
    averages = [line["loss_average"] for line in tiny.train_lines(whole)]
    expected, found = 0.0, []
    for loss in tiny.losses(whole):
        found.append(expected := 0.9 * expected + 0.1 * loss)
    assert averages == pytest.approx(found)
    cut = pretrained(tiny.copied(whole, tmp_path / "cut", step=3), **settings)
    tiny.assert_same_run(cut, whole)
    assert [line["loss_average"] for line in tiny.train_lines(cut)] == averages
    recorded = tiny.starts(whole)[0]["own_code"]
    assert recorded["callbacks"].keys() == {"my_callbacks:LossAverage"}
    # An edited loss is refused, and other frozen layers cannot be accepted.
    (own_files / "my_loss.py").write_text(EXAMPLES["my_loss.py"] + "\n")
    again = tiny.copied(whole, tmp_path / "again", step=3)
    with pytest.raises(ConfigurationError, match=r"SHA-256 of focal is .*--accept_changes loss"):
        pretrained(again, **settings)
    with pytest.raises(ConfigurationError, match="cannot resume: its freeze is embed_tokens layer"):
        pretrained(again, **settings | {"freeze": "layers.0"})


NLL = """
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

def nll(logits, targets, positions):
    assert positions.min() >= 1 and len(logits) == len(targets) == len(positions)
    return cross_entropy(logits, targets, reduction="sum")

def mean(logits, targets, positions):
    return cross_entropy(logits, targets)

def listed(logits, targets, positions):
    return nll(logits, targets, positions)[None]

class Asking(TrainerCallback):
    def __init__(self, path):
        pass
"""


def evaluated(run: Path, figure: str) -> list[float]:
    return [line[figure] for line in read_journal(run / "metrics.jsonl") if figure in line]


@pytest.mark.parametrize(
    "kind", [{}, {"use_peft": True, "lora_r": 4, "lora_dropout": 0}], ids=["full", "lora"]
)
def test_cross_entropy_as_an_own_loss_trains_as_before(
    kind, fine_tuned, own_files, chats_heldout, tmp_path, monkeypatch
):
    (own_files / "nll.py").write_text(NLL)
    padded = {**kind, **chats_heldout, "per_device_eval_batch_size": 3}
    before = fine_tuned(tmp_path / "before", **padded, loss_head="logits")
    # Classes of multimodal models say so.
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    accumulated = {"per_device_train_batch_size": 1, "loss": "nll.py:nll"}
    after = fine_tuned(tmp_path / "after", **padded, **accumulated)
    assert tiny.losses(after) == pytest.approx(tiny.losses(before), rel=1e-4)
    for figure in ("heldout_loss", "heldout_accuracy"):
        first, second = (evaluated(each, f"eval_{figure}") for each in (before, after))
        assert len(first) == 2
        assert second == pytest.approx(first, rel=1e-4), figure


def test_what_cannot_work_is_refused_before_the_start(
    pretraining, pretrained, fine_tuning, own_files, tmp_path
):
    (own_files / "nll.py").write_text(NLL)
    for changes, said in (
        ({"loss": "nll:mean"}, "--loss nll:mean: return a sum over tokens"),
        ({"loss": "nll:nll", "loss_head": "fused"}, r"does not go with loss_head fused"),
        ({"loss": "nll:gone"}, "nll:gone: AttributeError"),
        ({"loss": "nll:listed"}, "--loss nll:listed: return a sum over tokens"),
        ({"callbacks": "nll:nll"}, "--callbacks nll:nll: no class of TrainerCallback"),
        ({"callbacks": "nll:Asking"}, "--callbacks nll:Asking: missing a required argument"),
        ({"freeze": "layer.9"}, "--freeze layer.9: nothing in the model has this name"),
        ({"train_only": "norm", "freeze": "model"}, "leave no weight to train"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            pretrained(tmp_path / "refused", **changes)
    for parse, argv, said in (
        (parse_pretraining, pretraining(tmp_path / "r", loss="no_such:f"), "there is no file no_s"),
        (parse_pretraining, pretraining(tmp_path / "r", callbacks="torch"), "expected my_module:N"),
        (parse_pretraining, pretraining(tmp_path / "r", order="sequential", packing="best_fit"),
         "give packing: in_order"),
        (parse_fine_tuning, fine_tuning(tmp_path / "r", use_peft=True, freeze="lm_head"),
         "freeze lm_head .* has no effect: use_peft"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=said):
            parse(argv, "")


def test_a_callback_gets_its_own_state_if_others_come_and_go(own_files):
    text = EXAMPLES["my_callbacks.py"]
    (own_files / "other.py").write_text(text)
    names = ["my_callbacks:LossAverage", "other:LossAverage"]
    both = OwnCallbacks(names)
    for number, callback in enumerate(both.made.values()):
        callback.average = number + 1
    saved = json.loads(json.dumps(both.state()))
    (one := OwnCallbacks(names[1:])).restore(saved)
    assert one.made[names[1]].average == 2
    OwnCallbacks([]).restore(saved)


STATES = """
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

class AtStart(TrainerCallback, ExportableState):
    best = torch.tensor(1.0)
    def state(self):
        return {"args": {}, "attributes": {"steps": 0, "best": self.best}}

class AtTheFirstStep(AtStart):
    best = None
    def on_step_end(self, args, state, control, **kwargs):
        print(f"took step {state.global_step}")
        self.best = {"loss": torch.tensor(1.0)}
"""


@pytest.mark.parametrize(
    ("name", "key", "steps"),
    [("AtStart", "['best']", 0), ("AtTheFirstStep", "['best']['loss']", 1)],
)
def test_a_state_that_is_no_json_is_refused_long_before_the_first_checkpoint(
    pretrained, own_files, tmp_path, capsys, name, key, steps
):
    (own_files / "states.py").write_text(STATES)
    with pytest.raises(ConfigurationError) as refused:
        pretrained(tmp_path / "run", callbacks=f"states:{name}", logging_steps=99)
    problem = f"--callbacks states:{name}: its state()['attributes']{key} cannot be saved"
    assert problem in refused.value.problems[0]
    assert capsys.readouterr().out.count("took step") == steps


@pytest.fixture
def characters(tmp_path) -> Path:
    """Make a tokenizer whose ids are the codes of ASCII characters."""
    vocabulary = {chr(code): code for code in range(1, 128)} | {"<eos>": 0}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(tmp_path / "characters")
    return tmp_path / "characters"


def test_a_data_format_of_your_own(own_files, characters, tmp_path):
    rows = [{"question": "why", "answers": ["so"], "rating": number % 4} for number in range(8)]
    (own_files / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = tiny.flags(
        sources="my.jsonl", format="my_format:question", output_dir=tmp_path / "data",
        tokenizer_name_or_path=characters,
    )  # fmt: skip
    prepare_data.main(argv)
    train = datasets.load_from_disk(tmp_path / "data" / "train")
    text = "Question: why\nAnswer: so"
    for row in train:
        assert "".join(chr(token) for token in row["input_ids"] if token) == text
        assert sum(row["completion_mask"]) >= len(" so")
    assert len(train) == 2
    faulty = own_files / "faulty_format.py"
    faulty.write_text(EXAMPLES["my_format.py"].replace("['answers']", "['reply']"))
    argv[argv.index("my_format:question")] = "faulty_format.py:question"
    argv[argv.index(str(tmp_path / "data"))] = str(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"my\.jsonl.*KeyError: 'reply'"):
        prepare_data.main(argv)
