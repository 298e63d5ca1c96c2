"""Damaged folders of other tools: each trains as if intact, or is refused with the file's name."""

import functools
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import damaged_folders as damaged
import pytest
import tiny
from damaged_folders import Damage
from forked_ranks import Ranks
from launching import ROOT, quiet_environment

import chat
import prepare_data
import pretrain
import sft_train
from utils.config.errors import ConfigurationError, ExitCode
from utils.data.tokenizers import load_tokenizer
from utils.host import foreign
from utils.model.adapters import _odd_settings

pytestmark = pytest.mark.slow

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
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
    (base / "chat_template.jinja").write_text(CHATS)
    damaged.shard(shutil.copytree(base, root / "sharded"))
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    adapter.save_pretrained(root / "adapter")
    turns = [{"role": "user", "content": "t1 t2"}, {"role": "assistant", "content": "t3 t4"}]
    (root / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    return root


def groups(root: Path) -> dict[str, tuple[str, str, Iterator[Damage]]]:
    """Return groups of faults: the reader, the folder, and the faults."""
    base, index = root / "base", damaged.damaged_indexes(root / "sharded")
    values = functools.partial(damaged.damaged_values, base)
    files = itertools.chain.from_iterable
    of_adapter = damaged.damaged_values(root / "adapter", "adapter_config.json")
    return {
        "tokenizer files": ("prepare", "base", files(map(damaged.damaged_files, TOKENIZER_FILES))),
        "tokenizer values": ("prepare", "base", files(map(values, TOKENIZER_FILES))),
        "vocabulary": ("prepare", "base", values("tokenizer.json", "model")),
        "config files": ("train", "base", damaged.damaged_files("config.json")),
        "config values": ("plan", "base", values("config.json")),
        "generation files": ("train", "base", damaged.damaged_files("generation_config.json")),
        "generation values": ("plan", "base", values("generation_config.json")),
        "tensors": ("train", "base", damaged.damaged_tensors("model.safetensors")),
        "weights": ("train", "base", damaged.damaged_files("model.safetensors")),
        "index": ("train", "sharded", index),
        "answers": ("answer", "base", values("generation_config.json")),
        "adapter": ("answer", "adapter", of_adapter),
        "adapter files": ("answer", "adapter", damaged.damaged_files("adapter_config.json")),
        "adapter tensors": (
            "answer", "adapter", damaged.damaged_tensors("adapter_model.safetensors"),
        ),
    }  # fmt: skip


GROUPS = [
    "tokenizer files", "tokenizer values", "vocabulary", "config files", "config values",
    "generation files", "generation values", "tensors", "weights", "index", "answers", "adapter",
    "adapter files", "adapter tensors",
]  # fmt: skip


@pytest.fixture
def readers(sound: Path, fine_tuning: Callable[..., list[str]]) -> dict[str, Callable[..., object]]:
    """Return functions that read a folder. The result must be the same as for an intact folder."""

    def prepare(folder: Path, out: Path) -> None:
        prepare_data.main(command(sound, folder, out))

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


def command(sound: Path, folder: Path, out: Path) -> list[str]:
    """Return the command line of a preparation with the tokenizer in a folder."""
    sources = sound / "chats.jsonl"
    return tiny.flags(tokenizer_name_or_path=folder, sources=sources, output_dir=out, num_proc=1)


def copied(sound: Path, source: str, damage: Damage, place: Path) -> Path:
    folder = shutil.copytree(sound / source, place / "somebodys" / "folder")
    damage.apply(folder)
    return folder


@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_folder_works_or_is_refused_by_its_name(
    sound, readers, tmp_path, monkeypatch, request, group
):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 2.0)
    reader, source, found = groups(sound)[group]
    read, damages = readers[reader], list(found)
    step = 1 if request.config.getoption("--exhaustive") else -(-len(damages) // SAMPLED)
    expected = read(sound / source, tmp_path / "sound")
    refused = 0
    for number, damage in enumerate(damages[::step]):
        place = tmp_path / str(number)
        folder = copied(sound, source, damage, place)
        said = ""
        try:
            assert read(folder, place / "out") == expected, damage.name
        except ConfigurationError as error:
            said = str(error)
            refused += 1
        except BaseException as error:
            pytest.fail(f"{damage.name}: {error!r}")
        assert not said or str(folder) in said, f"{damage.name}: {said}"
        shutil.rmtree(place)
    assert refused, "nothing was damaged"


@pytest.mark.parametrize("name", damaged.TEMPLATES)
def test_a_chat_template_that_cannot_work_is_refused(sound, readers, tmp_path, monkeypatch, name):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 1.0)
    write = functools.partial(
        damaged.write, "chat_template.jinja", damaged.TEMPLATES[name].encode()
    )
    folder = copied(sound, "base", Damage(name, write), tmp_path)
    with pytest.raises(ConfigurationError) as refusal:
        readers["prepare"](folder, tmp_path / "out")
    assert str(folder) in str(refusal.value)


def test_a_slow_chat_template_works(sound, readers, tmp_path):
    slow = "{% for a in range(1000) %}{% for b in range(200) %}{% endfor %}{% endfor %}" + CHATS
    damage = Damage("slow", functools.partial(damaged.write, "chat_template.jinja", slow.encode()))
    readers["prepare"](copied(sound, "base", damage, tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "train").is_dir()


@pytest.mark.parametrize("number", [4 * 10**9, 2**31, 10**8, 2**40, -1, 1.5, "5", None])
def test_a_token_of_an_impossible_id_is_refused(sound, readers, tmp_path, number):
    keys = ("model", "vocab", "t5")
    damage = Damage("id", functools.partial(damaged.set_key, "tokenizer.json", keys, number))
    folder = copied(sound, "base", damage, tmp_path)
    with pytest.raises(ConfigurationError, match=str(folder)):
        readers["prepare"](folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "size"),
    [("hidden_size", 10**9), ("vocab_size", 10**9), ("head_dim", 10**10), ("head_dim", 10**6)],
)
def test_sizes_that_no_memory_holds_are_refused_before_it_is_taken(
    sound, fine_tuning, pretraining, tmp_path, name, size
):
    """The error says that the sizes are too large, and not that a disk or the memory is full."""
    damage = Damage("size", functools.partial(damaged.set_key, "config.json", (name,), size))
    folder = copied(sound, "base", damage, tmp_path)
    for more in ([], ["--dry_run"]):
        with pytest.raises(ConfigurationError) as refusal:
            sft_train.main([*fine_tuning(tmp_path / "out", model_name_or_path=folder), *more])
        assert refusal.value.exit_code == ExitCode.REFUSED, refusal.value
        assert str(folder) in str(refusal.value)
    if name == "head_dim":
        argv = pretraining(tmp_path / "new", model_config=folder / "config.json")
        with pytest.raises(ConfigurationError, match=f"{folder}.*head_dim and other sizes"):
            pretrain.main([*argv, "--dry_run"])


@pytest.mark.parametrize("share", [1.5, -0.1])
def test_a_dropout_is_a_probability(sound, readers, tmp_path, share):
    keys = ("attention_dropout",)
    damage = Damage("dropout", functools.partial(damaged.set_key, "config.json", keys, share))
    folder = copied(sound, "base", damage, tmp_path)
    with pytest.raises(ConfigurationError, match=f"attention_dropout is {share}, not a probabil"):
        readers["plan"](folder, tmp_path / "out")


def test_an_adapter_without_its_weights_is_refused(sound, readers, tmp_path):
    (*_, renamed) = (
        each
        for each in damaged.damaged_tensors("adapter_model.safetensors")
        if each.name.endswith("renamed")
    )
    folder = copied(sound, "adapter", renamed, tmp_path)
    with pytest.raises(ConfigurationError, match="Found missing adapter keys"):
        readers["answer"](folder, tmp_path / "out")


# Wrong settings of an adapter, and the part of their refusal after the file's name.
ADAPTERS: dict[str, tuple[dict[str, object], str]] = {
    "huge": ({"r": 10**9}, r"takes 477 GiB, .* sizes are right \(r 1000000000, "),
    "huge for a layer": ({"rank_pattern": {"q_proj": 10**9}}, "rank_pattern {'q_proj': 10000000"),
    "beyond integers": ({"r": 10**30}, "Overflow"),
    "huge prompt": (
        {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 10**9},
        "num_virtual_tokens 1000000000",
    ),
    "another rank": ({"r": 3}, "it does not fit its weights or its base: .* size mismatch"),
    "another layer": ({"target_modules": ["v_proj"]}, "its weights or its base: Found missing"),
    "text": ({"r": "64"}, "r is '64'"),
    "null": ({"r": None}, "r is None"),
    "list": ({"lora_alpha": [1]}, r"lora_alpha is \[1\]"),
    "number": ({"target_modules": 5, "bias": 7}, "target_modules is 5, bias is 7"),
    "not a number": ({"lora_dropout": float("nan"), "r": -1}, "positive integer value but"),
    "unknown kind": ({"peft_type": "NOPE"}, "peft_type is 'NOPE', which PEFT does not have"),
    "endless pattern": ({"target_modules": "(.+)+x"}, "takes more than 2 s of CPU time"),
    "code": ({"megatron_config": {"x": 1}, "megatron_core": "antigravity"}, "is not run"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_settings_of_an_adapter_that_cannot_be_right_are_named(
    sound, readers, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 2.0)
    changes, said = ADAPTERS[name]
    folder = shutil.copytree(sound / "adapter", tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigurationError, match=f"{file}.*{said}") as refusal:
        readers["answer"](folder, tmp_path / "out")
    assert refusal.value.exit_code == ExitCode.REFUSED
    assert "antigravity" not in sys.modules


def test_the_settings_of_a_sound_adapter_are_of_the_types_that_peft_declares(sound):
    assert _odd_settings(sound / "adapter" / "adapter_config.json") == []


def test_a_broken_configuration_brings_no_advice_about_tokenizers(sound, readers, tmp_path):
    damage = Damage("cut", functools.partial(damaged.cut_short, "config.json"))
    folder = copied(sound, "base", damage, tmp_path)
    with pytest.raises(ConfigurationError, match=r"config.json is not JSON") as refusal:
        readers["plan"](folder, tmp_path / "out")
    assert "A folder needs tokenizer.json" not in str(refusal.value)


def test_a_chat_spends_the_limit_of_its_template_once(sound, readers, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "CPU_LIMIT_S", 1.0)
    write = functools.partial(
        damaged.write, "chat_template.jinja", damaged.TEMPLATES["loop"].encode()
    )
    folder = copied(sound, "base", Damage("loop", write), tmp_path)
    monkeypatch.setattr(
        "utils.run.chat.ChatModel.rendered", lambda *_: pytest.fail("a second time")
    )
    with pytest.raises(ConfigurationError, match=rf"{folder}: its chat template takes more than"):
        readers["answer"](folder, tmp_path / "out")


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


def _in_a_worker(seconds: float) -> str:
    foreign.CPU_LIMIT_S = seconds
    try:
        with foreign.limits("a template"):
            while True:
                pass
    except ConfigurationError as error:
        return error.problems[0]


def test_the_limit_holds_in_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(_in_a_worker, 0.2).result()
    assert found == "a template takes more than 0.2 s of CPU time."


# Script, folder, file, and the file's replacement.
AS_SCRIPTS = [
    ("sft_train.py", "base", "config.json", "deep"),
    ("prepare_data.py", "base", "tokenizer_config.json", "null"),
    ("chat.py", "adapter", "adapter_config.json", "list"),
    *(
        pytest.param(script, folder, file, kind, marks=pytest.mark.exhaustive)
        for script, folder, file, kinds in (
            ("sft_train.py", "base", "config.json", ("list", "null", "binary", "empty", "digits")),
            ("sft_train.py", "base", "tokenizer.json", ("list", "object", "binary", "deep")),
            ("sft_train.py", "base", "generation_config.json", ("list", "text", "deep")),
            ("sft_train.py", "base", "model.safetensors", ("list", "empty", "binary")),
            ("sft_train.py", "sharded", "model.safetensors.index.json", ("list", "deep", "text")),
            ("prepare_data.py", "base", "tokenizer.json", ("list", "null", "number", "deep")),
            ("prepare_data.py", "base", "tokenizer_config.json", ("list", "latin", "text")),
            ("prepare_data.py", "base", "chat_template.jinja", ("latin", "binary", "object")),
            ("chat.py", "base", "config.json", ("list", "null", "deep")),
            ("chat.py", "base", "generation_config.json", ("list", "text")),
            ("chat.py", "adapter", "adapter_config.json", ("object", "number", "deep")),
            ("chat.py", "adapter", "adapter_model.safetensors", ("list", "binary")),
        )
        for kind in kinds
    ),
]


@pytest.mark.parametrize(("script", "source", "file", "kind"), AS_SCRIPTS)
def test_a_script_refuses_it_without_a_traceback(
    sound, fine_tuning, tmp_path, script, source, file, kind
):
    damage = Damage(kind, functools.partial(damaged.write, file, damaged.CONTENTS[kind]))
    folder, out = copied(sound, source, damage, tmp_path), tmp_path / "out"
    argv = {
        "sft_train.py": fine_tuning(out, model_name_or_path=folder),
        "prepare_data.py": command(sound, folder, out),
        "chat.py": [str(folder), "--prompt", "t1", "--device", "cpu"],
    }[script]
    done = Ranks(ROOT / script, argv, [quiet_environment()]).wait(timeout_s=600)
    assert done.returncode == ExitCode.REFUSED, done.stdout[-3000:]
    assert "Traceback" not in done.stdout
    assert str(folder) in done.stdout.splitlines()[-1]
