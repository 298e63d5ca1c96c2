"""Conversion of another toolkit's config to Stoker's recipes, with notes on omitted keys."""

import re
from collections.abc import Mapping
from pathlib import Path

from utils.config.arguments import eval_splits
from utils.config.declarations import Given, SettingValues, shown
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_file
from utils.config.refusals import BEST_MODEL_JUDGES, check_forms, check_run
from utils.config.rules import MOOT, RULES
from utils.config.settings import derive_evaluation
from utils.importing.data_recipes import convert_data, limit_tokens
from utils.importing.toolkits import (
    BY_DEFAULT,
    CHANGES,
    EMPTY,
    LEFT,
    TOOLKITS,
    Conversion,
    is_off,
    listed,
)

EIGHT_BIT = re.compile(r"adamw.*(8|4)_?bit", re.I)
PLAIN_ADAMW = re.compile(r"(paged_)?adamw(_hf|_torch\w*|_apex\w*|_32bit)?")
EIGHT_BITS = "the frozen weights are bfloat16 here, or of 4 bits with load_in_4bit: true"
SHARDING = ("dp_shard_size", "fsdp", "fsdp_config", "fsdp_version")
# axolotl-contribs-mit 0.0.6: DistMuon if there is a device mesh, else Muon, scaled as Stoker's.
OTHER_MUON = (
    "does not carry over: Stoker's Muon takes AdamW's. axolotl's on several GPUs scales a step by "
    "sqrt(out / in), Stoker's by 0.2 * sqrt(the larger), here 6 to 32 times for a width of 896"
)
# Names of a model's parts before its layers: Stoker may load the text model alone.
BEFORE_LAYERS = re.compile(r"((model|language_model|text_model)\\?\.)+layers")
TRAINABLE = {"stage": ("sft", "pt"), "adapter": ("lora", "qlora", "full", "freeze")}
# Keys of configs for another kind of training, or for no training.
OTHER_METHODS = (
    "reward_model", "process_reward_model", "export_dir", "do_predict", "diffusion", "beta",
    "ppo_epochs", "reward_functions", "reward_funcs",
)  # fmt: skip


def convert(path: Path, kind: str | None = None, gpus: int = 1) -> Conversion:
    """Convert the config file at `path`. The returned Conversion has the recipes.

    kind: the config's toolkit. None means to recognize the toolkit by the config's keys. gpus: the
    number of GPUs of the original training, which decides the global batch. Raises YamlError for a
    faulty file, and ConfigurationError if the config cannot be converted.
    """
    entries = load_file(path)
    if "model_class" in entries:
        raise ConfigurationError(
            "model_class: LLaMA-Factory's v1 is not converted, its form with stage and dataset is"
        )
    marks = {each: sum(mark in entries for mark in TOOLKITS[each].marks) for each in TOOLKITS}
    kind = kind or max(marks, key=lambda each: marks[each])
    if not marks[kind]:
        raise ConfigurationError(
            f"it has none of the keys that {kind} is known by: {' '.join(TOOLKITS[kind].marks)}"
        )
    given = Conversion(kind, entries, path, gpus)
    _check_method(given)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem)
    try:
        _convert_output_dir(given, name)
        given.move("model_name_or_path")
        convert_data(given, f"data/{name}")
        _convert_weights(given)
        _convert_order(given)
        _convert_batch(given)
        limit_tokens(given)
        _convert_times(given)
        _convert_best_model(given)
        _convert_optimizer(given)
        _convert_adapter(given)
        _convert_frozen(given)
        _convert_precision(given)
        _convert_strategy(given)
        for ours, entry in list(given.given.items()):
            if ours in given.run:
                add = given.note if given.run[ours][0] == entry.value else given.change
                add(entry.source, f"other keys decide {ours}")
            elif ours in given.declared and entry.source not in {*LEFT, *CHANGES}:
                given.move(ours)
            else:
                given.leave(entry.source, entry.value, ours)
        _remove_lines_that_cannot_stay(given)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"a value is of no type that {kind} reads: {error}") from error
    return given


def _check_method(given: Conversion) -> None:
    only = "supervised fine-tuning and pretraining are here, of all weights or with LoRA"
    problems = []
    for name, possible in TRAINABLE.items():
        if (value := given.value(name)) is not None and value not in possible:
            problems.append(f"{given.given[name].source}: {value}: {only}")
    problems += [f"{key}: {only}" for key in OTHER_METHODS if given.value(key)]
    if given.value("adapter") == "freeze" and given.value("use_llama_pro"):
        problems.append("use_llama_pro: new layers between those of a model cannot be added here")
    if given.pretraining and given.value("adapter") in ("lora", "qlora"):
        problems.append("pretraining with LoRA: pretrain.py trains every weight")
    if not given.value("sources"):
        problems.append("no dataset is named: is it the config of a training?")
    if problems:
        raise ConfigurationError(problems)
    given.take("stage")


def _convert_output_dir(given: Conversion, name: str) -> None:
    """Convert output_dir. A folder that configs share (outputs/out, saves) becomes outputs/NAME."""
    folder = str(given.value("output_dir") or f"runs/{name}")
    if re.fullmatch(r"(.*/)?(\w*-?out|outputs?|saves)/?", folder):
        given.take("output_dir")
        why = f"{folder} there, where other configs write as well"
        given.run["output_dir"] = (f"outputs/{name}", why)
    given.move("output_dir")
    given.run.setdefault("output_dir", (folder, ""))


def _convert_weights(given: Conversion) -> None:
    """Convert reinit_weights: the recipe names the model's configuration instead of its weights."""
    if given.take("reinit_weights"):
        model, _ = given.run.pop("model_name_or_path")
        folder = model if Path(model).is_dir() else f"models/{Path(model).name}"
        if folder != model:
            given.commands.append(f"hf download {model} config.json --local-dir {folder}")
        given.put("model_config", f"{folder}/config.json", "reinit_weights", "reinit_weights")


def _convert_order(given: Conversion) -> None:
    """Convert the order of documents. axolotl's curriculum_sampling becomes order: sequential."""
    shuffled = given.value("shuffle_merged_datasets", True)
    packed = given.take("sample_packing_sequentially")
    if given.take("curriculum_sampling"):
        given.put("order", "sequential", "curriculum_sampling")
        if shuffled and len(given.data["sources"]) + len(given.more_data) > 1:
            why = "axolotl shuffles several datasets once; here their order stays"
            given.change("curriculum_sampling", why)
    elif given.pretraining and not shuffled:  # a stream
        given.put("order", "sequential", "shuffle_merged_datasets: false")
    elif packed and given.value("packing"):
        given.put("packing", "in_order", "sample_packing_sequentially")
        given.take("packing")


def _convert_batch(given: Conversion) -> None:
    total = given.take("total_batch_size")
    steps = given.value("gradient_accumulation_steps")
    if total or not isinstance(steps, int):  # DeepSpeed's "auto"
        given.drop("gradient_accumulation_steps", "global_batch_size decides")
    steps = steps if isinstance(steps, int) else 1
    micro = given.value("per_device_train_batch_size")
    if micro is None:
        micro = max((total or 1) // (steps * given.gpus), 1)
        given.given["per_device_train_batch_size"] = Given(micro, given.its_default)
    given.move("per_device_train_batch_size")
    given.take("gradient_accumulation_steps")
    if total:
        given.run["global_batch_size"] = (total, "batch_size, the total over all GPUs")
    else:
        shared = given.value("context_parallel") or 1
        gpus = f"{given.gpus} GPU(s)" + (f" / {shared} that share sequences" if shared > 1 else "")
        product = f"{micro} x {steps} accumulation x {gpus}: --gpus of this command"
        size = micro * steps * max(given.gpus // shared, 1)
        given.run["global_batch_size"] = (size, product)
    packed, kind = given.value("packing", False), given.value("packing_strategy")
    done = given.pretraining or "packing" in given.run
    if packed in (False, "none") and not done:
        given.put("packing", "none", "not packed there; best_fit is faster, with a smaller batch")
    elif "wrapped" in (packed, kind):
        given.take("packing_strategy")
        given.put("packing", "concat", "packing_strategy: wrapped")
    elif given.pretraining and packed is not False:
        given.drop("packing", BY_DEFAULT)
    given.take("packing")
    given.drop("packing_strategy", "documents stay whole where they are packed")


def _convert_times(given: Conversion) -> None:
    """Convert the intervals of evaluations and checkpoints."""
    if given.value("save_total_limit") == 1:
        given.given["save_total_limit"] = Given(2, "1 there; the newest may be damaged")
    if given.value("save_strategy") == "best":
        given.take("save_strategy")
        given.put("save_best", True, "save_strategy: best", "save_strategy")
    epochs = given.value("num_train_epochs", 1)
    for what in ("eval", "save"):
        key = f"{what}s_per_epoch"
        times = given.take(key)
        if times in (0, 1):
            given.put(f"{what}_strategy", "epoch" if times else "no", f"{key}: {times}", key)
        elif times is not None:
            share = round(1 / (times * max(epochs, 1)), 6)
            given.put(f"{what}_steps", share, f"{key}: {times}, as a share of all steps", key)
        if given.kind == "axolotl" and given.value(f"{what}_steps"):
            given.drop(f"{what}_strategy", f"{what}_steps decides there")
    if given.kind != "axolotl":
        return
    named = {*given.given, *given.run}
    if not {"save_strategy", "save_steps"} & named:
        given.put("save_strategy", "epoch", given.its_default)
    if {"eval_strategy", "eval_steps"} & named:
        given.put("eval_on_start", True, given.its_default)


def _convert_best_model(given: Conversion) -> None:
    """Convert metric_for_best_model. The loss of all splits becomes the first split's loss."""
    splits = list(eval_splits(given.run["eval_data"][0])) if "eval_data" in given.run else []
    metric = given.value("metric_for_best_model")
    judges = [each for each in BEST_MODEL_JUDGES if given.value(each) or each in given.run]
    if not splits or not judges or metric not in (None, "loss", "eval_loss"):
        return
    entry = given.given.pop("metric_for_best_model", None)
    if entry or len(splits) > 1:
        given.put("metric_for_best_model", f"eval_{splits[0]}_loss", "eval_loss")
    if len(splits) > 1:
        given.change(judges[0], f"{splits[0]} alone decides, the first of {len(splits)} splits")


def _convert_optimizer(given: Conversion) -> None:
    """Convert the optimizer, the learning rate schedule, wandb and the upload to the Hub."""
    if given.take("use_muon"):
        given.put("optim", "muon", "use_muon")
    meshes = given.gpus > 1 or any(not is_off(given.value(name)) for name in SHARDING)
    if given.kind == "axolotl" and given.value("optim") == "muon" and meshes:
        given.change("learning_rate", OTHER_MUON)
    if "optim" in given.given:
        entry = given.given.pop("optim")
        name = str(entry.value)
        if EIGHT_BIT.search(name):
            why = f"{name}: Adam's moments in about 2 bytes"
            given.put("optim_states", "int8", why, entry.source)
        else:
            plain = PLAIN_ADAMW.fullmatch(name)
            ours = given.declared["optim"].default if plain else name
            given.put("optim", ours, name, entry.source)
    kind, ratio = given.value("lr_scheduler_type"), given.value("cosine_min_lr_ratio")
    if ratio and kind == "cosine":
        given.take("lr_scheduler_type")
        given.take("cosine_min_lr_ratio")
        why = f"lr_scheduler: cosine with cosine_min_lr_ratio: {ratio}"
        given.put("lr_scheduler_type", "cosine_with_min_lr", why)
        given.put("lr_scheduler_kwargs", {"min_lr_rate": ratio})
    given.drop("cosine_min_lr_ratio", "of a cosine alone")
    if kind == "constant":
        given.drop("warmup_steps", "no warmup there either: lr_scheduler_type is constant")
    if given.value("lr_scheduler_kwargs") == {}:
        given.drop("lr_scheduler_kwargs", EMPTY)
    if given.kind == "axolotl" and given.value("hub_model_id"):
        given.put("push_to_hub", True, "hub_model_id")
    used, project = given.take("use_wandb"), given.take("wandb_project")
    if used or (project and used is None):
        given.put("report_to", ["wandb"], "WANDB_PROJECT in the environment names the project")


def _convert_adapter(given: Conversion) -> None:
    """Convert the settings of LoRA and of loading weights in 4 or 8 bits."""
    adapter, four = given.value("adapter"), given.value("load_in_4bit")
    if not isinstance(four, bool) and four not in (None, 4):  # LLaMA-Factory's quantization_bit
        given.change(given.given["load_in_4bit"].source, EIGHT_BITS)
        given.take("load_in_4bit")
    if given.take("load_in_8bit"):
        given.change("load_in_8bit", EIGHT_BITS)
    four = given.take("load_in_4bit") or adapter == "qlora"
    if adapter not in ("lora", "qlora") and not given.take("use_peft"):
        without = [name for name in given.given if name.startswith("lora_")]
        for name in (*without, "double_quantization", "use_bnb_nested_quant"):
            given.drop(name, "no adapter there: every weight is trained")
        return
    given.put("use_peft", True)
    if given.kind == "llamafactory":
        alpha = Given(2 * given.value("lora_r"), given.its_default)
        given.given.setdefault("lora_alpha", alpha)
    if four:
        given.put("load_in_4bit", True)
        nested = given.take("double_quantization", given.kind != "trl")
        given.put("use_bnb_nested_quant", given.take("use_bnb_nested_quant", nested))
    targets = given.value("lora_target_modules")
    if targets in ("all", "all-linear", ["all-linear"]):
        given.drop("lora_target_modules", "every linear layer is adapted by default")
    elif targets:
        source = given.given.pop("lora_target_modules").source
        is_pattern = isinstance(targets, str) and re.search(r"[^\w\s,|-]", targets)
        named = [targets] if is_pattern else listed(targets)
        names = [BEFORE_LAYERS.sub(".*layers", each) for name in named for each in
                 ([name] if is_pattern else str(name).split("|"))]  # fmt: skip
        given.put("lora_target_modules", names, "a pattern" if is_pattern else "", source)


def _convert_frozen(given: Conversion) -> None:
    """Convert the choice of weights to train: axolotl's patterns, or LLaMA-Factory's last layers.

    A config of LLaMA-Factory does not have the model's number of layers, so the recipe has the word
    LAST. The script refuses LAST until the user replaces it by layer numbers.
    """
    if patterns := given.take("train_only"):
        plain = [re.sub(r"\[\d*:?\d*\]$", "", str(each)) for each in listed(patterns)]
        if plain != listed(patterns):
            given.change("unfrozen_parameters", "ranges of rows: here whole weights are trained")
        # Both match from the start of a name. In axolotl, "." is a plain dot unless + follows.
        exact = [re.sub(r"\.(?!\+)", r"\.", each.removeprefix("^")) for each in plain]
        ours = [each.removesuffix("$") if each.endswith("$") else f"{each}.*" for each in exact]
        given.put("train_only", ours, "unfrozen_parameters", "unfrozen_parameters")
    if given.take("adapter") != "freeze":
        return
    number = given.take("freeze_trainable_layers", 2)
    layers = [f"layers.{n}" for n in range(-number)] or ["layers.LAST"]
    modules = listed(given.take("freeze_trainable_modules", "all"))
    inside = [each if name == "all" else f"{each}.{name}" for each in layers for name in modules]
    extra = listed(given.take("freeze_extra_modules") or [])
    why = f"freeze_trainable_layers: {number}"
    why += f": write each of the model's last {number} layers for LAST" if number > 0 else ""
    given.put("train_only", inside + extra, why)


def _convert_precision(given: Conversion) -> None:
    """Convert dtypes and activation checkpointing. With LoRA, bf16 means bfloat16 weights."""
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
        given.put("bf16", True, key=source)
        if given.kind == "axolotl":
            given.change(source, "axolotl's weights are bfloat16, here float32, which is more "
                         "exact and takes more memory; for theirs: dtype: bfloat16 with "
                         "stochastic_rounding: true")  # fmt: skip
    elif bf16 is not None:
        given.put("bf16", False, key=source)
    if bf16:
        given.drop("fp16", "bf16 decides")
    if given.take("resize_token_embeddings_to_32x"):
        given.put("pad_embeddings_to_multiple_of", 32, "resize_token_embeddings_to_32x")
    if isinstance(offloading := given.value("activation_offloading"), str):  # legacy, disk
        source = given.given.pop("activation_offloading").source
        given.put("activation_offloading", True, offloading, source)
    checkpointing = given.take("gradient_checkpointing")
    if checkpointing and not given.take("disable_gradient_checkpointing"):
        offloaded = "; activations are not offloaded here" if checkpointing == "offload" else ""
        why = f"auto recomputes as little as fits{offloaded}"
        given.put("activation_checkpointing", "full", why)


def _convert_strategy(given: Conversion) -> None:
    """Convert DeepSpeed's ZeRO stage, or FSDP, to the setting `strategy`."""
    deepspeed = given.take("deepspeed")
    sharding = {name: given.take(name) for name in SHARDING if name in given.given}
    stage = re.search(r"(?:z|zero|stage\D*)_?([0-3])", str(deepspeed), re.I)
    if deepspeed and stage:
        name = "multi_gpu" if stage[1] == "0" else f"zero{stage[1]}"
        given.run["strategy"] = (name, f"deepspeed: {shown(deepspeed)}")
        if given.run.pop("optim_states", None):
            given.change("optimizer", "8 bits: DeepSpeed keeps Adam's moments in its own way")
    elif deepspeed:
        given.note("deepspeed", "its ZeRO stage is not known: strategy: zero1, zero2 or zero3")
    elif any(value not in (None, False, [], {}, "", 1) for value in sharding.values()):
        given.run["strategy"] = ("fsdp2", "")
    for name, value in sharding.items():
        inner = value if isinstance(value, Mapping) else {}
        if inner.get("activation_checkpointing") or inner.get("fsdp_activation_checkpointing"):
            given.put("activation_checkpointing", "full", "fsdp_config: activation_checkpointing")
        for key in [f"{name}.{each}" for each in inner] or [name]:
            given.note(key, "strategy says how: accelerate_configs/, docs/parallelism.md")
    if re.search(r"offload(?!_params': False)", f"{deepspeed} {sharding}"):
        given.note("offload", "weights and states stay on the GPUs: docs/parallelism.md")


def _remove_lines_that_cannot_stay(given: Conversion) -> None:
    """Remove settings that have no effect or that the script would refuse, and note why."""
    name = given.path.name
    lines = {n: Given(v, name, 0) for n, (v, _) in given.run.items() if n in given.declared}
    values = SettingValues(given.declared, lines)
    derive_evaluation(values)
    refused, moot = {}, set()
    for cause, applies, names in RULES:
        for name in names.split():
            if name in values.given and values[name] and applies(values[cause]):
                del values.given[name]
                refused[name] = f"no effect, as {cause} is {shown(values[cause])}"
                moot |= {name} if (cause, applies, names) in MOOT else set()
    for fault in (*check_run(values), *check_forms(values)):
        refused[fault.split()[0]] = fault
    if "hub_model_id" in refused and "push_to_hub" in given.run:
        del given.run["push_to_hub"]
        moot.add("hub_model_id")
        refused["hub_model_id"] += "; nothing is uploaded without it"
    for name, why in refused.items():
        given.run.pop(name, None)
        add = given.note if name in moot else given.change
        add(given.made_of.get(name, name), why)
