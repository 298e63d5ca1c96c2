"""Every key of another toolkit's config becomes lines of our recipes, or a note with the reason."""

import re
from pathlib import Path

from utils.config.checks import check_packages, check_run
from utils.config.declarations import Given, SettingValues, shown
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_file
from utils.config.settings import RULES, derive_evaluation
from utils.config.unknown_names import OTHER_NAMES, REFUSED
from utils.importing.sources import convert_data, listed
from utils.importing.toolkits import LEFT, TOOLKITS, Conversion

EIGHT_BIT = re.compile(r"adamw.*(8|4)_?bit", re.I)
PLAIN_ADAMW = re.compile(r"(paged_)?adamw(_hf|_torch\w*|_apex\w*|_32bit)?")
TRAINABLE = {"stage": ("sft", "pt"), "adapter": ("lora", "qlora", "full")}
# Keys by which a config is one of another kind of training, or none.
OTHER_METHODS = (
    "reward_model", "process_reward_model", "export_dir", "do_predict", "diffusion", "beta",
    "ppo_epochs", "reward_functions",
)  # fmt: skip
UNKNOWN = "unknown here, left out"


def convert(path: Path, kind: str | None = None, gpus: int = 1) -> Conversion:
    """Convert a config file; YamlError, or ConfigurationError if it is no training of ours."""
    entries = load_file(path)
    marks = {each: sum(mark in entries for mark in TOOLKITS[each].marks) for each in TOOLKITS}
    kind = kind or max(marks, key=lambda each: marks[each])
    if not marks[kind]:
        raise ConfigurationError(
            f"it has none of the keys that {kind} is known by: {' '.join(TOOLKITS[kind].marks)}"
        )
    conversion = Conversion(kind, entries, path, gpus)
    _check_method(conversion)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem)
    conversion.move("output_dir")
    conversion.run.setdefault("output_dir", (f"runs/{name}", ""))
    conversion.move("model_name_or_path")
    convert_data(conversion, f"data/{name}")
    _convert_batch(conversion)
    _convert_optimizer(conversion)
    _convert_adapter(conversion)
    _convert_precision(conversion)
    _convert_strategy(conversion)
    _convert_rest(conversion)
    _settle(conversion)
    return conversion


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
    """Convert what makes a step: sequences, packing, and how often to evaluate and save."""
    micro = given.value("per_device_train_batch_size", 1)
    steps = given.take("gradient_accumulation_steps", 1)
    steps = steps if isinstance(steps, int) else 1  # DeepSpeed's "auto"
    given.move("per_device_train_batch_size")
    given.run["global_batch_size"] = (
        micro * steps * given.gpus,
        f"{micro} x {steps} accumulation x {given.gpus} GPU(s): --gpus of this command",
    )
    if given.value("save_total_limit") == 1:
        given.given["save_total_limit"] = Given(2, "1 there; the newest may be damaged")
    if given.value("save_strategy") == "best":
        given.take("save_strategy")
        given.put("save_best", True, "save_strategy: best")
    packed = given.take("packing", False)
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
    name = str(given.take("optim", ""))
    if EIGHT_BIT.search(name):
        given.put("optim_states", "int8", f"{name}: Adam's moments in about 2 bytes")
    elif name and not PLAIN_ADAMW.fullmatch(name):
        given.put("optim", name, name)
    if "warmup_steps" in given.given and given.value("lr_scheduler_type") == "constant":
        given.given["lr_scheduler_type"] = Given("constant_with_warmup", "constant, with warmup")
    if ratio := given.take("cosine_min_lr_ratio"):
        given.take("lr_scheduler_type")
        given.put("lr_scheduler_type", "cosine_with_min_lr", f"cosine_min_lr_ratio: {ratio}")
        given.put("lr_scheduler_kwargs", {"min_lr_rate": ratio})
    if given.kind == "axolotl" and given.value("hub_model_id"):
        given.put("push_to_hub", True, "hub_model_id")
    if given.take("wandb_project") or given.take("use_wandb"):
        given.put("report_to", ["wandb"], "WANDB_PROJECT in the environment names the project")


def _convert_adapter(given: Conversion) -> None:
    adapter, bits = given.take("adapter"), given.take("load_in_4bit")  # or quantization_bit: 8
    eight = given.take("load_in_8bit")
    bits = 4 if bits is True or adapter == "qlora" else bits or (8 if eight else None)
    if bits == 8:
        given.note("8-bit weights", "bfloat16 here, or 4 bits with load_in_4bit: true")
    targets = given.take("lora_target_modules")
    if adapter in ("lora", "qlora") or given.value("use_peft"):
        given.take("use_peft")
        given.put("use_peft", True)
        if given.kind == "llamafactory":
            alpha = Given(2 * given.value("lora_r"), given.its_default)
            given.given.setdefault("lora_alpha", alpha)
        if bits == 4:
            given.put("load_in_4bit", True)
            nested = given.take("double_quantization", given.kind != "trl")
            given.put("use_bnb_nested_quant", given.take("use_bnb_nested_quant", nested))
        if isinstance(targets, str) and re.search(r"[^\w\s,-]", targets):
            given.note(f"lora_target_modules {targets}", "a pattern; every linear layer is adapted")
        elif targets and targets not in ("all", "all-linear"):
            given.put("lora_target_modules", listed(targets))
    else:
        given.given = {k: v for k, v in given.given.items() if not k.startswith("lora_")}


def _convert_precision(given: Conversion) -> None:
    """Convert types and recomputation; a frozen base takes two bytes a parameter."""
    bf16, pure = given.take("bf16"), given.take("pure_bf16")
    if "use_peft" in given.run and (bf16 or pure):
        given.take("dtype")
        given.put("dtype", "bfloat16", "of the frozen base")
        given.put("bf16", True)
    elif pure:
        given.put("dtype", "bfloat16", "weights of 2 bytes, as there")
        given.put("stochastic_rounding", True, "or small updates are lost")
    elif bf16 and bf16 != "no":
        note = "its weights too: here dtype: bfloat16 with stochastic_rounding: true"
        given.put("bf16", True, note if given.kind == "axolotl" else "")
    given.move("fp16")
    checkpointing = given.take("gradient_checkpointing")
    if checkpointing and not given.take("disable_gradient_checkpointing"):
        given.put("activation_checkpointing", "full", "auto recomputes as little as fits")
    if checkpointing == "offload":
        given.note("gradient_checkpointing: offload", "activations are not offloaded")


def _convert_strategy(given: Conversion) -> None:
    deepspeed, sharded = given.take("deepspeed"), given.take("dp_shard_size", 1)
    fsdp = [given.take(name) for name in ("fsdp", "fsdp_config", "fsdp_version")]
    stage = re.search(r"(?:z|zero|stage\D*)_?([0-3])", str(deepspeed), re.I)
    if deepspeed and stage:
        name = "multi_gpu" if stage[1] == "0" else f"zero{stage[1]}"
        given.run["strategy"] = (name, f"deepspeed: {shown(deepspeed)}")
        if "optim_states" in given.run:
            del given.run["optim_states"]
            given.note("8-bit optimizer", "DeepSpeed keeps Adam's moments in its own way")
    elif any(fsdp) or sharded != 1:
        given.run["strategy"] = ("fsdp2", "")
    if re.search(r"offload(?!_params': False)", f"{deepspeed} {fsdp}"):
        given.note("offload", "weights and states stay on the GPUs: docs/parallelism.md")


def _convert_rest(given: Conversion) -> None:
    """Move what is ours by name, and say why for every other key."""
    for ours, entry in list(given.given.items()):
        key = entry.source
        if ours in given.declared and key not in LEFT:
            given.move(ours)
        elif entry.value not in (False, 0, [], {}, "none") and key != given.its_default:
            given.note(key, LEFT.get(key, REFUSED.get(ours, OTHER_NAMES.get(key, UNKNOWN))))


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
