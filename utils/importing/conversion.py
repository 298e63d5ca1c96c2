"""Converts every key of another toolkit's config to lines of our recipes, or notes why not."""

import re
from collections.abc import Mapping
from pathlib import Path

from utils.config.declarations import Given, SettingValues, shown
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_file
from utils.config.refusals import check_forms, check_packages, check_run
from utils.config.rules import RULES
from utils.config.settings import derive_evaluation
from utils.importing.sources import convert_data, listed
from utils.importing.toolkits import (
    BY_DEFAULT,
    ELSEWHERE,
    EMPTY,
    LEFT,
    OFF,
    TOOLKITS,
    Conversion,
    is_off,
)

EIGHT_BIT = re.compile(r"adamw.*(8|4)_?bit", re.I)
PLAIN_ADAMW = re.compile(r"(paged_)?adamw(_hf|_torch\w*|_apex\w*|_32bit)?")
TRAINABLE = {"stage": ("sft", "pt"), "adapter": ("lora", "qlora", "full")}
CHECKPOINTING = ("activation_checkpointing", "fsdp_activation_checkpointing")
# Keys of configs for another kind of training, or for no training.
OTHER_METHODS = (
    "reward_model", "process_reward_model", "export_dir", "do_predict", "diffusion", "beta",
    "ppo_epochs", "reward_functions", "reward_funcs",
)  # fmt: skip


def convert(path: Path, kind: str | None = None, gpus: int = 1) -> Conversion:
    """Convert a config file. Raises YamlError, and ConfigurationError for unsupported trainings."""
    entries = load_file(path)
    marks = {each: sum(mark in entries for mark in TOOLKITS[each].marks) for each in TOOLKITS}
    kind = kind or max(marks, key=lambda each: marks[each])
    if not marks[kind]:
        raise ConfigurationError(
            f"it has none of the keys that {kind} is known by: {' '.join(TOOLKITS[kind].marks)}"
        )
    conversion = Conversion(kind, entries, path, gpus)
    _check_method(conversion)
    try:
        _convert_all(conversion)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"a value is of no type that {kind} reads: {error}") from error
    return conversion


def _convert_all(conversion: Conversion) -> None:
    path = conversion.path
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem)
    conversion.move("output_dir")
    conversion.run.setdefault("output_dir", (f"runs/{name}", ""))
    conversion.move("model_name_or_path")
    convert_data(conversion, f"data/{name}")
    _convert_batch(conversion)
    _convert_times(conversion)
    _convert_optimizer(conversion)
    _convert_adapter(conversion)
    _convert_precision(conversion)
    _convert_strategy(conversion)
    _convert_rest(conversion)
    _settle(conversion)
    _account(conversion)


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


def _convert_batch(given: Conversion) -> None:
    """Convert batch sizes and packing."""
    total = given.take("total_batch_size")
    steps = given.take("gradient_accumulation_steps")
    if steps is not None and (total or not isinstance(steps, int)):  # DeepSpeed's "auto"
        why = "batch_size is the total" if total else "1: no number there"
        given.note("gradient_accumulation_steps", why)
        steps = steps if isinstance(steps, int) else None
    micro = given.value("per_device_train_batch_size")
    if micro is None:
        micro = max((total or 1) // ((steps or 1) * given.gpus), 1)
        given.given["per_device_train_batch_size"] = Given(micro, given.its_default)
    given.move("per_device_train_batch_size")
    steps = steps or 1
    product = f"{micro} x {steps} accumulation x {given.gpus} GPU(s): --gpus of this command"
    if total:
        given.run["global_batch_size"] = (total, "batch_size, the total over all GPUs")
    else:
        given.run["global_batch_size"] = (micro * steps * given.gpus, product)
    packed, kind = given.take("packing", False), given.take("packing_strategy")
    if packed in (False, "none") and not given.pretraining:
        given.put("packing", "none", "not packed there; best_fit is faster, with a smaller batch")
    elif packed == "wrapped" or kind == "wrapped":
        given.put("packing", "concat", "packing_strategy: wrapped")
        kind = None
    if given.pretraining and packed is not False:
        given.note("sample_packing" if given.kind == "axolotl" else "packing", BY_DEFAULT)
    if kind:
        given.note("packing_strategy", "documents stay whole where they are packed")


def _convert_times(given: Conversion) -> None:
    """Convert how often to evaluate and save."""
    if given.value("save_total_limit") == 1:
        given.given["save_total_limit"] = Given(2, "1 there; the newest may be damaged")
    if given.value("save_strategy") == "best":
        given.take("save_strategy")
        given.put("save_best", True, "save_strategy: best", "save_strategy")
    epochs = given.value("num_train_epochs", 1)
    for what in ("eval", "save"):
        key = f"{what}s_per_epoch"
        if (times := given.take(key)) is not None:
            if times in (0, 1):
                given.put(f"{what}_strategy", "epoch" if times else "no", f"{key}: {times}", key)
            else:
                share = round(1 / (times * max(epochs, 1)), 6)
                given.put(f"{what}_steps", share, f"{key}: {times}, as a share of all steps", key)
        if given.kind == "axolotl" and given.value(f"{what}_steps"):
            given.drop(f"{what}_strategy", f"{what}_steps decides there")
    if given.kind != "axolotl":
        return
    if not {"save_strategy", "save_steps"} & {*given.given, *given.run}:
        given.put("save_strategy", "epoch", given.its_default)
    if {"eval_strategy", "eval_steps"} & {*given.given, *given.run}:
        given.put("eval_on_start", True, given.its_default)


def _convert_optimizer(given: Conversion) -> None:
    entry = given.given.pop("optim", None)
    name, source = (str(entry.value), entry.source) if entry else ("", "")
    if EIGHT_BIT.search(name):
        given.put("optim_states", "int8", f"{name}: Adam's moments in about 2 bytes", source)
    elif PLAIN_ADAMW.fullmatch(name):
        given.put("optim", given.declared["optim"].default, name, source)
    elif entry:
        given.put("optim", name, name, source)
    _convert_schedule(given)
    if given.kind == "axolotl" and given.value("hub_model_id"):
        given.put("push_to_hub", True, "hub_model_id")
    wandb = {name: given.take(name) for name in ("use_wandb", "wandb_project")}
    if wandb["use_wandb"] or (wandb["wandb_project"] and wandb["use_wandb"] is None):
        given.put("report_to", ["wandb"], "WANDB_PROJECT in the environment names the project")


def _convert_schedule(given: Conversion) -> None:
    kind, ratio = given.value("lr_scheduler_type"), given.value("cosine_min_lr_ratio")
    if ratio and kind == "cosine":
        given.take("lr_scheduler_type"), given.take("cosine_min_lr_ratio")
        why = f"lr_scheduler: cosine with cosine_min_lr_ratio: {ratio}"
        given.put("lr_scheduler_type", "cosine_with_min_lr", why)
        given.put("lr_scheduler_kwargs", {"min_lr_rate": ratio})
    else:
        given.drop("cosine_min_lr_ratio", "of a cosine alone")
    if kind == "constant":
        given.drop("warmup_steps", "no warmup there either: lr_scheduler_type is constant")
    if given.value("lr_scheduler_kwargs") == {}:
        given.drop("lr_scheduler_kwargs", EMPTY)


def _convert_adapter(given: Conversion) -> None:
    adapter, bits = given.take("adapter"), given.take("load_in_4bit")  # LLaMA-Factory: 4 or 8
    eight = given.take("load_in_8bit")
    bits = 4 if bits is True or adapter == "qlora" else bits or (8 if eight else None)
    if bits == 8:
        given.note(
            "load_in_8bit" if eight else "quantization_bit",
            "bfloat16 here, or 4 bits with load_in_4bit: true",
        )
    if adapter not in ("lora", "qlora") and not given.take("use_peft"):
        without = [name for name in given.given if name.startswith("lora_")]
        for name in (*without, "double_quantization", "use_bnb_nested_quant"):
            given.drop(name, "no adapter there: every weight is trained")
        return
    given.put("use_peft", True)
    if given.kind == "llamafactory":
        alpha = Given(2 * given.value("lora_r"), given.its_default)
        given.given.setdefault("lora_alpha", alpha)
    if bits == 4:
        given.put("load_in_4bit", True)
        nested = given.take("double_quantization", given.kind != "trl")
        given.put("use_bnb_nested_quant", given.take("use_bnb_nested_quant", nested))
    _convert_targets(given)


def _convert_targets(given: Conversion) -> None:
    targets = given.value("lora_target_modules")
    if isinstance(targets, str) and re.search(r"[^\w\s,-]", targets):
        given.drop("lora_target_modules", f"{targets}: a pattern; every linear layer is adapted")
    elif targets in ("all", "all-linear", ["all-linear"]):
        given.drop("lora_target_modules", "every linear layer is adapted by default")
    elif targets:
        source = given.given.pop("lora_target_modules").source
        given.put("lora_target_modules", listed(targets), key=source)


def _convert_precision(given: Conversion) -> None:
    """Convert number types and recomputation. With bf16, LoRA's base weights become bfloat16."""
    source = given.given["bf16"].source if "bf16" in given.given else "bf16"
    bf16, pure = given.take("bf16"), given.take("pure_bf16")
    pure = pure or bf16 == "full"
    if "use_peft" in given.run and (bf16 or pure):
        given.drop("dtype", "bfloat16 of the frozen base, with bf16")
        given.put("dtype", "bfloat16", "of the frozen base")
        given.put("bf16", True, key=source)
    elif pure:
        given.put("dtype", "bfloat16", "weights of 2 bytes, as there")
        given.put("stochastic_rounding", True, "or small updates are lost")
    elif bf16 and bf16 != "no":
        note = "its weights too: here dtype: bfloat16 with stochastic_rounding: true"
        given.put("bf16", True, note if given.kind == "axolotl" else "", source)
    elif bf16 is not None:
        given.put("bf16", False, key=source)
    if bf16 and given.value("fp16"):
        given.drop("fp16", "bf16 decides")
    given.move("fp16")
    if given.take("resize_token_embeddings_to_32x"):
        key = "resize_token_embeddings_to_32x"
        given.put("pad_embeddings_to_multiple_of", 32, key, key)
    checkpointing = given.take("gradient_checkpointing")
    if checkpointing and not given.take("disable_gradient_checkpointing"):
        given.put("activation_checkpointing", "full", "auto recomputes as little as fits")
    if checkpointing == "offload":
        given.note("gradient_checkpointing: offload", "activations are not offloaded")


def _convert_strategy(given: Conversion) -> None:
    deepspeed = given.take("deepspeed")
    names = ("dp_shard_size", "fsdp", "fsdp_config", "fsdp_version")
    sharding = {name: given.take(name) for name in names if name in given.given}
    stage = re.search(r"(?:z|zero|stage\D*)_?([0-3])", str(deepspeed), re.I)
    if deepspeed and stage:
        name = "multi_gpu" if stage[1] == "0" else f"zero{stage[1]}"
        given.run["strategy"] = (name, f"deepspeed: {shown(deepspeed)}")
        if "optim_states" in given.run:
            del given.run["optim_states"]
            given.note("optimizer", "8 bits: DeepSpeed keeps Adam's moments in its own way")
    elif deepspeed:
        given.note("deepspeed", "its ZeRO stage is not known: strategy: zero1, zero2 or zero3")
    elif any(value not in (None, False, [], {}, "", 1) for value in sharding.values()):
        given.run["strategy"] = ("fsdp2", "")
    for name, value in sharding.items():
        inner = value if isinstance(value, Mapping) else {}
        if any(inner.get(key) for key in CHECKPOINTING):
            given.put("activation_checkpointing", "full", "fsdp_config: activation_checkpointing")
        for key in [f"{name}.{each}" for each in inner] or [name]:
            given.note(key, "strategy says how: accelerate_configs/, docs/parallelism.md")
    if re.search(r"offload(?!_params': False)", f"{deepspeed} {sharding}"):
        given.note("offload", "weights and states stay on the GPUs: docs/parallelism.md")


def _convert_rest(given: Conversion) -> None:
    """Move keys that are settings of ours, and note the reason for every other key."""
    for ours, entry in list(given.given.items()):
        key = entry.source
        if ours in given.declared and key not in LEFT:
            given.move(ours)
        else:
            given.leave(key, entry.value, ours)


def _account(given: Conversion) -> None:
    """Add a note for each key of the config that neither became a line nor has a note."""
    notes = {key.partition(".")[0] for keys in given.notes.values() for key in keys}
    named = notes | {*given.made_of.values()}
    for key, (value, _) in given.entries.items():
        if key not in named:
            given.note(key, OFF if is_off(value) else ELSEWHERE)


def _settle(given: Conversion) -> None:
    """Remove lines that other lines make ineffective, and lines that the start would refuse."""
    values = SettingValues(
        given.declared,
        {n: Given(v, why, 1) for n, (v, why) in given.run.items() if n in given.declared},
    )
    derive_evaluation(values)
    for cause, applies, names in RULES:
        for name in names.split():
            if name in values.given and values[name] and applies(values[cause]):
                del values.given[name]
                given.note(_key(given, name), f"no effect, as {cause} is {shown(values[cause])}")
    for fault in (*check_packages(values), *check_run(values), *check_forms(values)):
        name, word = fault.split()[:2]
        value, comment = given.run.get(name, (None, ""))
        key = _key(given, name)
        refused = word.rstrip(":")
        if isinstance(value, list) and refused in value and len(value) > 1:
            given.run[name] = ([each for each in value if each != refused], comment)
            given.made_of[name] = key
        given.note(key, fault)


def _key(given: Conversion, name: str) -> str:
    """Remove a line from the training recipe; return the key that it was made from."""
    given.run.pop(name, None)
    return given.made_of.pop(name, name)
