"""Damaged folders of other tools: each trains as if intact, or is refused with the file's name."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import damaged_folders as damaged
import pytest
import tiny
from damaged_folders import FILE_CHANGES, Change, edited, replaced
from launching import quiet_environment, run_fork

import chat
import prepare_data
import pretrain
import sft_train
from utils.config.errors import ConfigurationError, ExitCode
from utils.data.tokenizers import load_tokenizer
from utils.host import foreign

pytestmark = pytest.mark.slow

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")
ADAPTER, TEMPLATE = "adapter_config.json", "chat_template.jinja"
CHATS = "{% for m in messages %}{{ m.role }} : {{ m.content }} {{ eos_token }}\n{% endfor %}"
SAMPLED = 12  # how many faults of a group are tried; --exhaustive tries all


@pytest.fixture(scope="module")
def sound(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make intact folders: base/ with all kinds of files, sharded/, adapter/; and chats.jsonl."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("sound")
    base = shutil.copytree(base_model, root / "base")
    names = {"eos_token": "<eos>", "pad_token": "<pad>"}
    (base / "special_tokens_map.json").write_text(json.dumps(names))
    (base / TEMPLATE).write_text(CHATS)
    damaged.shard(shutil.copytree(base, root / "sharded"))
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    adapter.save_pretrained(root / "adapter")
    turns = [{"role": "user", "content": "t1 t2"}, {"role": "assistant", "content": "t3 t4"}]
    (root / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    return root


# Reader, folder, and a function of the intact folder that returns its faults.
GROUPS: dict[str, tuple[str, str, Callable]] = {
    "tokenizer files": ("prepare", "base", lambda _: [
        each for file in TOKENIZER_FILES for each in damaged.damaged_files(file)]),
    "tokenizer values": ("prepare", "base", lambda folder: [
        each for file in TOKENIZER_FILES for each in damaged.damaged_values(folder, file)]),
    "vocabulary": (
        "prepare", "base", lambda folder: damaged.damaged_values(folder, TOKENIZER, "model")),
    "config files": ("train", "base", lambda _: damaged.damaged_files(CONFIG)),
    "config values": ("plan", "base", lambda folder: damaged.damaged_values(folder, CONFIG)),
    "generation files": ("train", "base", lambda _: damaged.damaged_files(GENERATION)),
    "generation values": (
        "plan", "base", lambda folder: damaged.damaged_values(folder, GENERATION)),
    "tensors": ("train", "base", lambda _: damaged.damaged_tensors("model.safetensors")),
    "weights": ("train", "base", lambda _: damaged.damaged_files("model.safetensors")),
    "index": ("train", "sharded", damaged.damaged_indexes),
    "answers": ("answer", "base", lambda folder: damaged.damaged_values(folder, GENERATION)),
    "adapter": ("answer", "adapter", lambda folder: damaged.damaged_values(folder, ADAPTER)),
    "adapter files": ("answer", "adapter", lambda _: damaged.damaged_files(ADAPTER)),
    "adapter tensors": (
        "answer", "adapter", lambda _: damaged.damaged_tensors("adapter_model.safetensors")),
}  # fmt: skip


def preparation(sound: Path, folder: Path, out: Path) -> list[str]:
    """Return the command line of a preparation with the tokenizer in a folder."""
    sources = sound / "chats.jsonl"
    return tiny.flags(tokenizer_name_or_path=folder, sources=sources, output_dir=out, num_proc=1)


@pytest.fixture
def readers(sound: Path, fine_tuning: Callable[..., list[str]]) -> dict[str, Callable[..., object]]:
    """Return functions that read a folder. The result must be the same as for an intact folder."""

    def prepare(folder: Path, out: Path) -> None:
        prepare_data.main(preparation(sound, folder, out))

    def plan(folder: Path, out: Path) -> None:
        argv = fine_tuning(out, model_name_or_path=folder, max_steps=1, save_steps=1)
        assert sft_train.main([*argv, "--dry_run"]) == 0

    def train(folder: Path, out: Path) -> list[float]:
        plan(folder, out)
        assert sft_train.main(fine_tuning(out, model_name_or_path=folder, max_steps=1)) == 0
        return tiny.losses(out)

    def answer(folder: Path, out: Path) -> None:
        chat.main([str(folder), "--prompt", "t1 t2", "--max_new_tokens", "2", "--device", "cpu"])

    return {"prepare": prepare, "plan": plan, "train": train, "answer": answer}


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies an intact folder and changes one of its files."""

    def copy(source: str, file: str, change: Change) -> Path:
        shutil.rmtree(tmp_path / "somebodys", ignore_errors=True)
        folder = shutil.copytree(sound / source, tmp_path / "somebodys" / "folder")
        change(folder / file)
        return folder

    return copy


@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_folder_works_or_is_refused_by_its_name(
    sound, readers, copied, tmp_path, monkeypatch, request, group
):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 2.0)
    reader, source, faults = GROUPS[group]
    read, damages = readers[reader], list(faults(sound / source))
    step = 1 if request.config.getoption("--exhaustive") else -(-len(damages) // SAMPLED)
    expected = read(sound / source, tmp_path / "sound")
    refused = 0
    for number, damage in enumerate(damages[::step]):
        folder = copied(source, damage.file, damage.change)
        try:
            assert read(folder, tmp_path / str(number)) == expected, damage.name
        except ConfigurationError as error:
            assert str(folder) in str(error), damage.name  # noqa: PT017 - other faults must run
            refused += 1
        except BaseException as error:
            pytest.fail(f"{damage.name}: {error!r}")
    assert refused, "nothing was damaged"


def updated(changes: dict[str, object]) -> Change:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


IDS = (4 * 10**9, 2**31, 10**8, 2**40, -1, 1.5, "5", None)
WEIGHTS = "adapter_model.safetensors"
RENAMED = damaged.TENSOR_CHANGES["header renamed"]
# Reader, folder, file, its change, and a part of the message.
REFUSED: dict[str, tuple[str, str, str, Change, str]] = {
    "adapter without weights": (
        "answer", "adapter", WEIGHTS, RENAMED, "Found missing adapter keys"),
    "half a configuration": (
        "plan", "base", CONFIG, FILE_CHANGES["cut"], r"config\.json is not JSON"),
} | {
    f"template {name}": ("prepare", "base", TEMPLATE, replaced(text.encode()), "")
    for name, text in damaged.TEMPLATES.items()
} | {
    f"token id {number}": (
        "prepare", "base", TOKENIZER, edited(("model", "vocab", "t5"), number), "")
    for number in IDS
} | {
    f"adapter: {name}": ("answer", "adapter", ADAPTER, updated(changes), f"{ADAPTER}.*{said}")
    for name, (changes, said) in damaged.ADAPTERS.items()
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_refused_with_the_reason(readers, copied, tmp_path, monkeypatch, name):
    reader, source, file, change, said = REFUSED[name]
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 1.0 if reader == "prepare" else 2.0)
    folder = copied(source, file, change)
    with pytest.raises(ConfigurationError, match=said) as refusal:
        readers[reader](folder, tmp_path / "out")
    assert refusal.value.exit_code == ExitCode.REFUSED
    assert str(folder) in str(refusal.value)
    if reader != "prepare":
        assert "A folder needs tokenizer.json" not in str(refusal.value), "no tokenizer is at fault"
    assert "antigravity" not in sys.modules


def test_slow_templates_are_accepted(readers, copied, tmp_path):
    slow = "{% for a in range(1000) %}{% for b in range(200) %}{% endfor %}{% endfor %}" + CHATS
    readers["prepare"](copied("base", TEMPLATE, replaced(slow.encode())), tmp_path / "out")
    assert (tmp_path / "out" / "train").is_dir()


def test_a_chat_spends_the_limit_of_its_template_once(readers, copied, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 1.0)
    monkeypatch.setattr(
        "utils.run.chat.ChatModel.rendered", lambda *_: pytest.fail("a second time")
    )
    folder = copied("base", TEMPLATE, replaced(damaged.TEMPLATES["loop"].encode()))
    with pytest.raises(ConfigurationError, match=rf"{folder}: its chat template takes more than"):
        readers["answer"](folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "size"),
    [("hidden_size", 10**9), ("vocab_size", 10**9), ("head_dim", 10**10), ("head_dim", 10**6)],
)
def test_sizes_that_no_memory_holds_are_refused_before_it_is_taken(
    copied, fine_tuning, pretraining, tmp_path, name, size
):
    """The error says that the sizes are too large, and not that a disk or the memory is full."""
    folder = copied("base", CONFIG, edited((name,), size))
    for more in ([], ["--dry_run"]):
        # A start compares shapes with those of the folder, or the plan comes first and predicts.
        said = rf"{re.escape(str(folder))}|GiB predicted for .* take a smaller model"
        with pytest.raises(ConfigurationError, match=said) as refusal:
            sft_train.main([*fine_tuning(tmp_path / "out", model_name_or_path=folder), *more])
        assert refusal.value.exit_code == ExitCode.REFUSED, refusal.value
    if name == "head_dim":
        argv = pretraining(tmp_path / "new", model_config=folder / CONFIG)
        with pytest.raises(ConfigurationError, match=f"{folder}.*head_dim and other sizes"):
            pretrain.main([*argv, "--dry_run"])


@pytest.mark.parametrize("number", ["7", None, 7.5, [7], True])
def test_an_id_in_vocab_json_is_a_number(tmp_path, number):
    """Any other value is refused: transformers would drop the token and tokenize differently."""
    letters = [*"abcdefgh", "<eos>"]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "unk_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    ids: dict[str, object] = {letter: place for place, letter in enumerate(letters)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    assert load_tokenizer(str(tmp_path)).get_vocab()["b"] == 1
    (tmp_path / "vocab.json").write_text(json.dumps(ids | {"b": number}))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}/vocab.json: the id of 'b' is "):
        load_tokenizer(str(tmp_path))


def _in_a_worker() -> str:
    foreign.CPU_LIMIT_S = 0.2
    try:
        with foreign.resource_limits("a template"):
            while True:
                pass
    except ConfigurationError as error:
        return error.problems[0]


def test_the_limit_holds_in_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        found = pool.submit(_in_a_worker).result()
    assert found == "a template takes more than 0.2 s of CPU time."


# Script, folder, file, and the file's replacements. The first three are always tried.
AS_SCRIPTS = [
    ("sft_train.py", "base", CONFIG, "deep"),
    ("prepare_data.py", "base", "tokenizer_config.json", "null"),
    ("chat.py", "adapter", ADAPTER, "list"),
    ("sft_train.py", "base", CONFIG, "list null binary empty digits"),
    ("sft_train.py", "base", TOKENIZER, "list object binary deep"),
    ("sft_train.py", "base", GENERATION, "list text deep"),
    ("sft_train.py", "base", "model.safetensors", "list empty binary"),
    ("sft_train.py", "sharded", "model.safetensors.index.json", "list deep text"),
    ("prepare_data.py", "base", TOKENIZER, "list null number deep"),
    ("prepare_data.py", "base", "tokenizer_config.json", "list latin text"),
    ("prepare_data.py", "base", TEMPLATE, "latin binary object"),
    ("chat.py", "base", CONFIG, "list null deep"),
    ("chat.py", "base", GENERATION, "list text"),
    ("chat.py", "adapter", ADAPTER, "object number deep"),
    ("chat.py", "adapter", WEIGHTS, "list binary"),
]


@pytest.mark.parametrize(
    ("script", "source", "file", "kinds"),
    [
        pytest.param(*case, marks=[] if number < 3 else pytest.mark.exhaustive)
        for number, case in enumerate(AS_SCRIPTS)
    ],
)
def test_a_script_refuses_it_without_a_traceback(
    sound, copied, fine_tuning, tmp_path, script, source, file, kinds
):
    for kind in kinds.split():
        folder, out = copied(source, file, FILE_CHANGES[kind]), tmp_path / "out"
        argv = {
            "sft_train.py": fine_tuning(out, model_name_or_path=folder),
            "prepare_data.py": preparation(sound, folder, out),
            "chat.py": [str(folder), "--prompt", "t1", "--device", "cpu"],
        }[script]
        done = run_fork(script, argv, quiet_environment())
        assert done.returncode == ExitCode.REFUSED, done.stdout[-3000:]
        assert "Traceback" not in done.stdout
        assert str(folder) in done.stdout.splitlines()[-1]
