"""Another toolkit's config becomes our two recipes, with a word on what differs.

    python -m utils.config.import_config axolotl.yaml [--kind axolotl] [--gpus 8] [--output_dir DIR]

Reads axolotl, LLaMA-Factory, torchtune and TRL (utils/config/toolkits.py has their keys). Prints
the recipes, or writes them into a folder; what has no counterpart is listed with the reason.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.checks import check_packages, check_run
from utils.config.declarations import Given, SettingValues, shown
from utils.config.errors import ConfigurationError
from utils.config.foreign_data import convert_data
from utils.config.recipes import YamlError, entry_text, load_file
from utils.config.settings import RULES, derive_evaluation
from utils.config.toolkits import TOOLKITS, Conversion
from utils.config.unknown_names import OTHER_NAMES, REFUSED

EIGHT_BIT = re.compile(r"adamw.*(8|4)_?bit", re.I)
PLAIN_ADAMW = re.compile(r"(paged_)?adamw(_hf|_torch\w*|_apex\w*|_32bit)?|torch\.optim\.AdamW")
TRAINABLE = {"stage": ("sft", "pt"), "adapter": ("lora", "qlora", "full")}
# Keys by which a config is one of another kind of training, or none.
OTHER_METHODS = (
    *("reward_model", "process_reward_model", "export_dir", "do_predict", "diffusion", "beta"),
    *("teacher_model._component_", "ref_checkpointer._component_", "ppo_epochs"),
    "reward_functions",
)
UNKNOWN = "unknown here, left out"


def convert(path: Path, kind: str | None = None, gpus: int = 1) -> Conversion:
    """Read a config file and convert it; ConfigurationError where no run of ours is meant."""
    try:
        entries = load_file(path)
    except YamlError as error:
        raise ConfigurationError(str(error)) from error
    entries = dict(_flat(entries))
    marks = {each: sum(mark in entries for mark in TOOLKITS[each].marks) for each in TOOLKITS}
    kind = kind or max(marks, key=lambda each: marks[each])
    if not marks[kind]:
        raise ConfigurationError(
            f"it has none of the keys that {kind} is known by: {' '.join(TOOLKITS[kind].marks)}"
        )
    conversion = Conversion(kind, entries, path.read_text(encoding="utf-8-sig"), gpus)
    _check_method(conversion)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem)
    steps = (_convert_model, _convert_batch, _convert_optimizer, _convert_adapter,
             _convert_precision, _convert_strategy)  # fmt: skip
    convert_data(conversion, name, path)
    for step in steps:
        step(conversion)
    _convert_rest(conversion, name)
    _settle(conversion)
    return conversion


def _flat(entries: Mapping[str, tuple[Any, int]]) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Yield torchtune's components as `optimizer.lr`, everything else as it is."""
    for key, (value, line) in entries.items():
        if not isinstance(value, dict) or "_component_" not in value or key.startswith("dataset"):
            yield key, (value, line)
            if not isinstance(value, dict) or "_component_" not in value:
                continue
        for name, inner in value.items():
            yield f"{key}.{name}", (inner, line)


def _check_method(given: Conversion) -> None:
    only = "supervised fine-tuning and pretraining are here, of all weights or with LoRA"
    problems = []
    for name, possible in TRAINABLE.items():
        if (value := given.value(name)) is not None and value not in possible:
            problems.append(f"{given.given[name].source}: {value}: {only}")
    problems += [f"{key}: {only}" for key in OTHER_METHODS if given.value(key)]
    if given.pretraining and given.value("adapter") in ("lora", "qlora"):
        problems.append("pretraining with LoRA: pretrain.py trains every weight")
    if not given.value("sources"):
        problems.append("no dataset is named: is it the config of a training?")
    if problems:
        raise ConfigurationError(problems)
    given.take("stage")


def _convert_model(given: Conversion) -> None:
    directory, component = given.take("directory"), given.value("component", "")
    if given.kind == "torchtune":
        named = re.search(r"tune download (\S+/\S+)", given.text)
        model = named[1] if named else Path(str(directory)).name
        given.put("model_name_or_path", model, "" if named else f"checkpoint_dir: {directory}")
        given.given.setdefault("adapter", Given("lora" if "lora" in component else "full", ""))
        if "qlora" in component:
            given.given["quantize"] = Given(4, "model._component_")
    given.take("component")
    given.move("model_name_or_path")
    model = given.run.get("model_name_or_path", ("", ""))[0]
    tokenizer = given.take("tokenizer_config") or given.take("tokenizer_name_or_path")
    given.data["tokenizer_name_or_path"] = (tokenizer or model, "")


def _convert_batch(given: Conversion) -> None:
    """Convert what makes a step: sequences, packing, and how often to evaluate and save."""
    micro = given.value("per_device_train_batch_size", 1)
    total, steps = given.take("total"), given.take("accumulation", 1)
    steps = total // micro if total else steps if isinstance(steps, int) else 1
    given.move("per_device_train_batch_size")
    given.run["global_batch_size"] = (
        micro * steps * given.gpus,
        f"{micro} x {steps} accumulation x {given.gpus} GPU(s): --gpus of this command",
    )
    if given.value("save_total_limit") == 1:
        given.given["save_total_limit"] = Given(2, "1 there; the newest may be damaged")
    if given.value("save_strategy") == "best":
        given.given["save_strategy"], given.given["save_best"] = (
            Given("steps", ""), Given(True, "save_strategy: best"),
        )  # fmt: skip
    packed = given.take("packing")
    if packed in (False, "none") and not given.pretraining:
        given.put("packing", "none", "not packed there; best_fit is faster, with a smaller batch")
    elif packed == "wrapped" or given.value("packing_strategy") == "wrapped":
        given.put("packing", "concat", "packing_strategy: wrapped")
    epochs = given.value("num_train_epochs", 1)
    for what in ("eval", "save"):
        key = f"{what}s_per_epoch"
        if (times := given.take(key)) is None:
            continue
        if times in (0, 1):
            given.put(f"{what}_strategy", "epoch" if times else "no", f"{key}: {times}")
        else:
            share = round(1 / (times * max(epochs, 1)), 6)
            given.put(f"{what}_steps", share, f"{key}: {times}, as a share of all steps")


def _convert_optimizer(given: Conversion) -> None:
    name = str(given.take("optimizer") or given.take("optim", ""))
    if EIGHT_BIT.search(name):
        given.put("optim_states", "int8", f"{name}: Adam's moments in about 2 bytes")
    elif name and not PLAIN_ADAMW.fullmatch(name):
        given.put("optim", name, name)
    schedule = str(given.value("lr_scheduler_type", ""))
    if found := re.search(r"get_(\w+)_schedule", schedule):
        given.given["lr_scheduler_type"] = Given(found[1], "lr_scheduler._component_")
    if "warmup_steps" in given.given and given.value("lr_scheduler_type") == "constant":
        given.given["lr_scheduler_type"] = Given("constant_with_warmup", "constant, with warmup")
    if ratio := given.take("min_lr"):
        given.take("lr_scheduler_type")
        given.put("lr_scheduler_type", "cosine_with_min_lr", f"cosine_min_lr_ratio: {ratio}")
        given.put("lr_scheduler_kwargs", {"min_lr_rate": ratio})
    if given.kind == "axolotl" and given.value("hub_model_id"):
        given.put("push_to_hub", True, "hub_model_id")
    if given.take("wandb_project") or given.take("use_wandb"):
        given.put("report_to", ["wandb"], "WANDB_PROJECT in the environment names the project")
    if "WandB" in str(given.take("tracker")):
        given.put("report_to", ["wandb"], "WandBLogger")


def _convert_adapter(given: Conversion) -> None:
    adapter, bits = given.take("adapter"), given.take("quantize")
    four, eight = given.take("load_in_4bit"), given.take("load_in_8bit")
    bits = 4 if bits is True or four or adapter == "qlora" else 8 if eight else bits
    if bits == 8:
        given.note("8-bit weights", "bfloat16 here, or 4 bits with load_in_4bit: true")
    targets = given.take("lora_target") or given.take("lora_target_modules")
    if adapter in ("lora", "qlora") or given.value("use_peft"):
        given.take("use_peft")
        given.put("use_peft", True)
        if given.kind == "llamafactory":
            given.given.setdefault(
                "lora_alpha", Given(2 * given.value("lora_r"), given.its_default)
            )
        if bits == 4:
            given.put("load_in_4bit", True)
            nested = given.take("double_quantization", given.kind != "trl")
            given.put("use_bnb_nested_quant", given.take("use_bnb_nested_quant", nested))
        if isinstance(targets, str) and re.fullmatch(r"\w+(\s*,\s*\w+)*", targets):
            targets = [] if targets == "all" else re.split(r"\s*,\s*", targets)
        elif isinstance(targets, str) and targets != "all-linear":
            given.note(f"lora_target_modules {targets}", "a pattern; every linear layer is adapted")
        if isinstance(targets, list) and targets:
            given.put("lora_target_modules", [t.replace("output_proj", "o_proj") for t in targets])
    else:
        for name in [name for name in given.given if name.startswith("lora_")]:
            given.take(name)


def _convert_precision(given: Conversion) -> None:
    """Convert types and recomputation; a frozen base takes two bytes a parameter."""
    bf16, pure, kind = given.take("bf16"), given.take("pure"), given.take("weights_type")
    adapted = "use_peft" in given.run
    if adapted and (bf16 or pure or kind == "bf16"):
        given.take("dtype")
        given.put("dtype", "bfloat16", "of the frozen base")
        given.put("bf16", True)
    elif pure or kind == "bf16":
        given.put("dtype", "bfloat16", "weights of 2 bytes, as there")
        given.put("stochastic_rounding", True, "or small updates are lost")
    elif bf16 and bf16 != "no":
        note = "its weights too: here dtype: bfloat16 with stochastic_rounding: true"
        given.put("bf16", True, note if given.kind == "axolotl" else "")
    given.move("fp16")
    checkpointing = given.take("checkpointing")
    if checkpointing and not given.take("no_checkpointing"):
        given.put("activation_checkpointing", "full", "auto recomputes as little as fits")
    if checkpointing == "offload":
        given.note("gradient_checkpointing: offload", "activations are not offloaded")


def _convert_strategy(given: Conversion) -> None:
    deepspeed, sharded = given.take("deepspeed"), given.take("shards", 1)
    fsdp = [given.take(name) for name in ("fsdp", "fsdp_config", "fsdp_version")]
    stage = re.search(r"(?:z|zero|stage\D*)_?([0-3])", str(deepspeed), re.I)
    if deepspeed and stage:
        name = "multi_gpu" if stage[1] == "0" else f"zero{stage[1]}"
        given.run["strategy"] = (name, f"deepspeed: {shown(deepspeed)}")
        if "optim_states" in given.run:
            del given.run["optim_states"]
            given.note("8-bit optimizer", "DeepSpeed keeps Adam's moments in its own way")
    elif any(fsdp) or sharded != 1 or (given.kind == "torchtune" and "_distributed" in given.text):
        given.run["strategy"] = ("fsdp2", "")
    if re.search(r"offload(?!_params': False)", f"{deepspeed} {fsdp}"):
        given.note("offload", "weights and states stay on the GPUs: docs/parallelism.md")


def _convert_rest(given: Conversion, name: str) -> None:
    """Move what is ours by name, and say why for every other key."""
    left = given.toolkit.left
    for ours, entry in list(given.given.items()):
        key = entry.source
        if ours in given.declared and key not in left:
            given.move(ours)
            continue
        group = f"{key.partition('.')[0]}.*"
        tables = ((left, key), (left, group), (REFUSED, ours), (OTHER_NAMES, key))
        reasons = [table[word] for table, word in tables if word in table]
        if entry.value not in (False, 0, [], {}, "none") and key != given.its_default:
            given.note(key, (reasons or [UNKNOWN])[0])
    first = {name: given.run.pop(name, None) for name in ("output_dir", "model_name_or_path")}
    first["output_dir"] = first["output_dir"] or (f"runs/{name}", "")
    given.run = {name: entry for name, entry in first.items() if entry} | given.run


def _settle(given: Conversion) -> None:
    """Leave out what another line leaves no effect, and note what the start would refuse."""
    values = SettingValues(
        given.declared,
        {n: Given(v, why, 1) for n, (v, why) in given.run.items() if n in given.declared},
    )
    derive_evaluation(values)
    for cause, applies, names in RULES:
        for name in names.split():
            if name in values.given and values[name] and applies(values[cause]):
                del values.given[name], given.run[name]
                given.note(name, f"no effect, as {cause} is {shown(values[cause])}")
    for fault in (*check_packages(values), *check_run(values)):
        name = fault.partition(" ")[0]
        given.run.pop(name, None)
        given.note(name, fault)


def recipe_texts(given: Conversion, source: Path, folder: Path) -> dict[Path, str]:
    """Return the two recipes, and a chat template that stands in the config, by file."""
    script = "pretrain.py" if given.pretraining else "sft_train.py"
    data, run = folder / f"{source.stem}_data.yaml", folder / f"{source.stem}.yaml"
    notes = "".join(f"#   {', '.join(keys)}: {why}\n" for why, keys in given.notes.items())
    texts = {
        data: f"# Made from {source.name} of {given.kind}:\n#   python prepare_data.py --config "
        f"{data}\n",
        run: f"# Made from {source.name} of {given.kind}:\n#   python {script} --config {run}\n",
    }
    if given.template:
        texts[folder / f"{source.stem}.jinja"] = given.template
        given.data["chat_template"] = (str(folder / f"{source.stem}.jinja"), "")
    for file, recipe in ((data, given.data), (run, given.run)):
        texts[file] += "".join(entry_text(key, *entry) for key, entry in recipe.items())
    if notes:
        texts[run] += f"\n# Without a counterpart, or done otherwise:\n{notes}"
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m utils.config.import_config", description=
                                     str(__doc__).partition("\n")[0])  # fmt: skip
    parser.add_argument("config", type=Path, help="the other toolkit's YAML file")
    parser.add_argument("--kind", choices=TOOLKITS, help="whose it is; told by its keys otherwise")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs it ran on, for the global batch")
    parser.add_argument("--output_dir", type=Path, help="folder for the recipes, else printed")
    given = parser.parse_args(argv)
    folder = given.output_dir or Path()
    try:
        texts = recipe_texts(convert(given.config, given.kind, given.gpus), given.config, folder)
        if given.output_dir and (there := [str(file) for file in texts if file.exists()]):
            raise ConfigurationError(f"{', '.join(there)} is there: name another --output_dir")
        for file, text in texts.items():
            if given.output_dir:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{file}\n" if given.output_dir else f"# ---- {file}\n{text}\n")
    except ConfigurationError as error:
        sys.stderr.write(f"{given.config} cannot be converted:\n{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
