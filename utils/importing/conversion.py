"""Conversion of another toolkit's config to Stoker's recipes, with notes on omitted keys."""

import re
from collections.abc import Mapping
from pathlib import Path

from utils.config.arguments import eval_splits
from utils.config.declarations import SettingValue, SettingValues, shown
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_file
from utils.config.refusals import NEED_BEST_METRIC, check_forms, check_run
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
SHARDING_KEYS = ("dp_shard_size", "fsdp", "fsdp_config", "fsdp_version")
# axolotl-contribs-mit 0.0.6 has DistMuon for device meshes. Only its Muon scales like Stoker's.
OTHER_MUON = (
    "does not carry over: Stoker's Muon takes AdamW's. axolotl's on several GPUs scales a step by "
    "sqrt(out / in), Stoker's by 0.2 * sqrt(the larger), here 6 to 32 times for a width of 896"
)
# The part of a weight's name up to "layers". It differs if Stoker loads only the text model.
BEFORE_LAYERS = re.compile(r"((model|language_model|text_model)\\?\.)+layers")
TRAINABLE = {"stage": ("sft", "pt"), "adapter": ("lora", "qlora", "full", "freeze")}
# Keys of configs for other training methods, or for commands that do not train.
OTHER_METHODS = (
    "reward_model", "process_reward_model", "export_dir", "do_predict", "diffusion", "beta",
    "ppo_epochs", "reward_functions", "reward_funcs",
)  # fmt: skip


def convert(path: Path, kind: str | None = None, gpus: int = 1) -> Conversion:
    """Convert the config file at `path`. The returned Conversion has the recipes.

    kind: the toolkit, or None to detect it. gpus: the original GPUs, which decide the global batch.
    Raises YamlError for a faulty file, ConfigurationError for an unsupported config.
    """
    entries = load_file(path)
    if "model_class" in entries:
        raise ConfigurationError(
            "model_class: LLaMA-Factory's v1 is not converted, its form with stage and dataset is"
        )
    matches = {each: sum(mark in entries for mark in TOOLKITS[each].marks) for each in TOOLKITS}
    kind = kind or max(matches, key=lambda each: matches[each])
    if not matches[kind]:
        raise ConfigurationError(
            f"it has none of the keys that {kind} is known by: {' '.join(TOOLKITS[kind].marks)}"
        )
    state = Conversion(kind, entries, path, gpus)
    _check_training_method(state)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem)
    try:
        _convert_output_dir(state, name)
        state.move("model_name_or_path")
        convert_data(state, f"data/{name}")
        _convert_weights(state)
        _convert_order(state)
        _convert_batch(state)
        limit_tokens(state)
        _convert_intervals(state)
        _convert_best_model(state)
        _convert_optimizer(state)
        _convert_adapter(state)
        _convert_train_only(state)
        _convert_precision(state)
        _convert_strategy(state)
        for ours, entry in list(state.given.items()):
            if ours in state.run:
                add = state.note if state.run[ours][0] == entry.value else state.change
                add(entry.source, f"other keys decide {ours}")
            elif ours in state.declared and entry.source not in {*LEFT, *CHANGES}:
                state.move(ours)
            else:
                state.leave(entry.source, entry.value, ours)
        _remove_unusable_settings(state)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"a value is of no type that {kind} reads: {error}") from error
    return state


def _check_training_method(state: Conversion) -> None:
    only = "supervised fine-tuning and pretraining are here, of all weights or with LoRA"
    problems = []
    for name, possible in TRAINABLE.items():
        if (value := state.value(name)) is not None and value not in possible:
            problems.append(f"{state.given[name].source}: {value}: {only}")
    problems += [f"{key}: {only}" for key in OTHER_METHODS if state.value(key)]
    if state.value("adapter") == "freeze" and state.value("use_llama_pro"):
        problems.append("use_llama_pro: new layers between those of a model cannot be added here")
    if state.pretraining and state.value("adapter") in ("lora", "qlora"):
        problems.append("pretraining with LoRA: pretrain.py trains every weight")
    if not state.value("sources"):
        problems.append("no dataset is named: is it the config of a training?")
    if problems:
        raise ConfigurationError(problems)
    state.take("stage")


def _convert_output_dir(state: Conversion, name: str) -> None:
    """Convert output_dir. A folder for many runs (outputs/out, saves) becomes outputs/NAME."""
    folder = str(state.value("output_dir") or f"runs/{name}")
    if re.fullmatch(r"(.*/)?(\w*-?out|outputs?|saves)/?", folder):
        state.take("output_dir")
        why = f"{folder} there, where other configs write as well"
        state.run["output_dir"] = (f"outputs/{name}", why)
    state.move("output_dir")
    state.run.setdefault("output_dir", (folder, ""))


def _convert_weights(state: Conversion) -> None:
    """Convert reinit_weights: the recipe names the model's configuration instead of its weights."""
    if state.take("reinit_weights"):
        model, _ = state.run.pop("model_name_or_path")
        folder = model if Path(model).is_dir() else f"models/{Path(model).name}"
        if folder != model:
            state.commands.append(f"hf download {model} config.json --local-dir {folder}")
        state.put("model_config", f"{folder}/config.json", "reinit_weights", "reinit_weights")


def _convert_order(state: Conversion) -> None:
    """Convert the order of documents. axolotl's curriculum_sampling becomes `order: sequential`."""
    shuffled = state.value("shuffle_merged_datasets", True)
    packed = state.take("sample_packing_sequentially")
    if state.take("curriculum_sampling"):
        state.put("order", "sequential", "curriculum_sampling")
        if shuffled and len(state.data["sources"]) + len(state.more_data) > 1:
            why = "axolotl shuffles several datasets once; here their order stays"
            state.change("curriculum_sampling", why)
    elif state.pretraining and not shuffled:  # axolotl streams pretraining data
        state.put("order", "sequential", "shuffle_merged_datasets: false")
    elif packed and state.value("packing"):
        state.put("packing", "in_order", "sample_packing_sequentially")
        state.take("packing")


def _convert_batch(state: Conversion) -> None:
    total = state.take("total_batch_size")
    steps = state.value("gradient_accumulation_steps")
    if total or not isinstance(steps, int):  # DeepSpeed's "auto"
        state.drop("gradient_accumulation_steps", "global_batch_size decides")
    steps = steps if isinstance(steps, int) else 1
    micro = state.value("per_device_train_batch_size")
    if micro is None:
        micro = max((total or 1) // (steps * state.gpus), 1)
        state.given["per_device_train_batch_size"] = SettingValue(micro, state.its_default)
    state.move("per_device_train_batch_size")
    state.take("gradient_accumulation_steps")
    if total:
        state.run["global_batch_size"] = (total, "batch_size, the total over all GPUs")
    else:
        shared = state.value("context_parallel") or 1
        gpus = f"{state.gpus} GPU(s)" + (f" / {shared} that share sequences" if shared > 1 else "")
        product = f"{micro} x {steps} accumulation x {gpus}: --gpus of this command"
        size = micro * steps * max(state.gpus // shared, 1)
        state.run["global_batch_size"] = (size, product)
    packed, kind = state.value("packing", False), state.value("packing_strategy")
    done = state.pretraining or "packing" in state.run
    if packed in (False, "none") and not done:
        state.put("packing", "none", "not packed there; best_fit is faster, with a smaller batch")
    elif "wrapped" in (packed, kind):
        state.take("packing_strategy")
        state.put("packing", "concat", "packing_strategy: wrapped")
    elif state.pretraining and packed is not False:
        state.drop("packing", BY_DEFAULT)
    state.take("packing")
    state.drop("packing_strategy", "documents stay whole where they are packed")


def _convert_intervals(state: Conversion) -> None:
    """Convert the intervals of evaluations and checkpoints."""
    if state.value("save_total_limit") == 1:
        state.given["save_total_limit"] = SettingValue(2, "1 there; the newest may be damaged")
    if state.value("save_strategy") == "best":
        state.take("save_strategy")
        state.put("save_best", True, "save_strategy: best", "save_strategy")
    epochs = state.value("num_train_epochs", 1)
    for what in ("eval", "save"):
        key = f"{what}s_per_epoch"
        times = state.take(key)
        if times in (0, 1):
            state.put(f"{what}_strategy", "epoch" if times else "no", f"{key}: {times}", key)
        elif times is not None:
            share = round(1 / (times * max(epochs, 1)), 6)
            state.put(f"{what}_steps", share, f"{key}: {times}, as a share of all steps", key)
        if state.kind == "axolotl" and state.value(f"{what}_steps"):
            state.drop(f"{what}_strategy", f"{what}_steps decides there")
    if state.kind != "axolotl":
        return
    named = {*state.given, *state.run}
    if not {"save_strategy", "save_steps"} & named:
        state.put("save_strategy", "epoch", state.its_default)
    if {"eval_strategy", "eval_steps"} & named:
        state.put("eval_on_start", True, state.its_default)


def _convert_best_model(state: Conversion) -> None:
    """Convert metric_for_best_model: `eval_loss` becomes `eval_SPLIT_loss` of the first split."""
    splits = list(eval_splits(state.run["eval_data"][0])) if "eval_data" in state.run else []
    metric = state.value("metric_for_best_model")
    judges = [each for each in NEED_BEST_METRIC if state.value(each) or each in state.run]
    if not splits or not judges or metric not in (None, "loss", "eval_loss"):
        return
    entry = state.given.pop("metric_for_best_model", None)
    if entry or len(splits) > 1:
        state.put("metric_for_best_model", f"eval_{splits[0]}_loss", "eval_loss")
    if len(splits) > 1:
        state.change(judges[0], f"{splits[0]} alone decides, the first of {len(splits)} splits")


def _convert_optimizer(state: Conversion) -> None:
    """Convert the optimizer, the learning rate schedule, wandb and the upload to the Hub."""
    if state.take("use_muon"):
        state.put("optim", "muon", "use_muon")
    has_mesh = state.gpus > 1 or any(not is_off(state.value(name)) for name in SHARDING_KEYS)
    if state.kind == "axolotl" and state.value("optim") == "muon" and has_mesh:
        state.change("learning_rate", OTHER_MUON)
    if "optim" in state.given:
        entry = state.given.pop("optim")
        name = str(entry.value)
        if EIGHT_BIT.search(name):
            why = f"{name}: Adam's moments in about 2 bytes"
            state.put("optim_states", "int8", why, entry.source)
        else:
            plain = PLAIN_ADAMW.fullmatch(name)
            ours = state.declared["optim"].default if plain else name
            state.put("optim", ours, name, entry.source)
    kind, ratio = state.value("lr_scheduler_type"), state.value("cosine_min_lr_ratio")
    if ratio and kind == "cosine":
        state.take("lr_scheduler_type")
        state.take("cosine_min_lr_ratio")
        why = f"lr_scheduler: cosine with cosine_min_lr_ratio: {ratio}"
        state.put("lr_scheduler_type", "cosine_with_min_lr", why)
        state.put("lr_scheduler_kwargs", {"min_lr_rate": ratio})
    state.drop("cosine_min_lr_ratio", "of a cosine alone")
    if kind == "constant":
        state.drop("warmup_steps", "no warmup there either: lr_scheduler_type is constant")
    if state.value("lr_scheduler_kwargs") == {}:
        state.drop("lr_scheduler_kwargs", EMPTY)
    if state.kind == "axolotl" and state.value("hub_model_id"):
        state.put("push_to_hub", True, "hub_model_id")
    used, project = state.take("use_wandb"), state.take("wandb_project")
    if used or (project and used is None):
        state.put("report_to", ["wandb"], "WANDB_PROJECT in the environment names the project")


def _convert_adapter(state: Conversion) -> None:
    """Convert the settings of LoRA and of loading weights in 4 or 8 bits."""
    adapter, bits = state.value("adapter"), state.value("load_in_4bit")
    if not isinstance(bits, bool) and bits not in (None, 4):  # LLaMA-Factory's quantization_bit
        state.change(state.given["load_in_4bit"].source, EIGHT_BITS)
        state.take("load_in_4bit")
    if state.take("load_in_8bit"):
        state.change("load_in_8bit", EIGHT_BITS)
    in_4bit = state.take("load_in_4bit") or adapter == "qlora"
    if adapter not in ("lora", "qlora") and not state.take("use_peft"):
        lora_names = [name for name in state.given if name.startswith("lora_")]
        for name in (*lora_names, "double_quantization", "use_bnb_nested_quant"):
            state.drop(name, "no adapter there: every weight is trained")
        return
    state.put("use_peft", True)
    if state.kind == "llamafactory":
        alpha = SettingValue(2 * state.value("lora_r"), state.its_default)
        state.given.setdefault("lora_alpha", alpha)
    if in_4bit:
        state.put("load_in_4bit", True)
        nested = state.take("double_quantization", state.kind != "trl")
        state.put("use_bnb_nested_quant", state.take("use_bnb_nested_quant", nested))
    targets = state.value("lora_target_modules")
    if targets in ("all", "all-linear", ["all-linear"]):
        state.drop("lora_target_modules", "every linear layer is adapted by default")
    elif targets:
        source = state.given.pop("lora_target_modules").source
        is_pattern = isinstance(targets, str) and re.search(r"[^\w\s,|-]", targets)
        names = [targets]
        if not is_pattern:
            names = [name for part in listed(targets) for name in str(part).split("|")]
        names = [BEFORE_LAYERS.sub(".*layers", name) for name in names]
        state.put("lora_target_modules", names, "a pattern" if is_pattern else "", source)


def _convert_train_only(state: Conversion) -> None:
    """Convert the choice of weights to train: axolotl's patterns, or LLaMA-Factory's last layers.

    A config of LLaMA-Factory does not tell how many layers the model has. So the recipe has the
    word LAST in place of layer numbers, and the script refuses LAST until the user replaces it.
    """
    if patterns := state.take("train_only"):
        plain = [re.sub(r"\[\d*:?\d*\]$", "", str(each)) for each in listed(patterns)]
        if plain != listed(patterns):
            state.change("unfrozen_parameters", "ranges of rows: here whole weights are trained")
        # Both axolotl and Stoker match a prefix. axolotl reads "." as a plain dot unless + follows.
        exact = [re.sub(r"\.(?!\+)", r"\.", each.removeprefix("^")) for each in plain]
        ours = [each.removesuffix("$") if each.endswith("$") else f"{each}.*" for each in exact]
        state.put("train_only", ours, "unfrozen_parameters", "unfrozen_parameters")
    if state.take("adapter") != "freeze":
        return
    number = state.take("freeze_trainable_layers", 2)
    layers = [f"layers.{n}" for n in range(-number)] or ["layers.LAST"]
    modules = listed(state.take("freeze_trainable_modules", "all"))
    in_layers = [each if name == "all" else f"{each}.{name}" for each in layers for name in modules]
    extra = listed(state.take("freeze_extra_modules") or [])
    why = f"freeze_trainable_layers: {number}"
    why += f": write each of the model's last {number} layers for LAST" if number > 0 else ""
    state.put("train_only", in_layers + extra, why)


def _convert_precision(state: Conversion) -> None:
    """Convert dtypes and activation checkpointing. With LoRA, `bf16` also sets the base's dtype."""
    source = state.given["bf16"].source if "bf16" in state.given else "bf16"
    bf16, pure = state.take("bf16"), state.take("pure_bf16")
    pure = pure or bf16 == "full"
    if "use_peft" in state.run and (bf16 or pure):
        state.drop("dtype", "bfloat16 of the frozen base, with bf16")
        state.put("dtype", "bfloat16", "of the frozen base")
        state.put("bf16", True, key=source)
    elif pure:
        state.put("dtype", "bfloat16", "weights of 2 bytes, as there")
        state.put("stochastic_rounding", True, "or small updates are lost")
    elif bf16 and bf16 != "no":
        state.put("bf16", True, key=source)
        if state.kind == "axolotl":
            state.change(source, "axolotl's weights are bfloat16, here float32, which is more "
                         "exact and takes more memory; for theirs: dtype: bfloat16 with "
                         "stochastic_rounding: true")  # fmt: skip
    elif bf16 is not None:
        state.put("bf16", False, key=source)
    if bf16:
        state.drop("fp16", "bf16 decides")
    if state.take("resize_token_embeddings_to_32x"):
        state.put("pad_embeddings_to_multiple_of", 32, "resize_token_embeddings_to_32x")
    if isinstance(offloading := state.value("activation_offloading"), str):  # legacy, disk
        source = state.given.pop("activation_offloading").source
        state.put("activation_offloading", True, offloading, source)
    checkpointing = state.take("gradient_checkpointing")
    if checkpointing and not state.take("disable_gradient_checkpointing"):
        offloaded = "; activations are not offloaded here" if checkpointing == "offload" else ""
        why = f"auto recomputes as little as fits{offloaded}"
        state.put("activation_checkpointing", "full", why)


def _convert_strategy(state: Conversion) -> None:
    """Convert DeepSpeed's ZeRO stage, or FSDP, to the setting `strategy`."""
    deepspeed = state.take("deepspeed")
    sharding = {name: state.take(name) for name in SHARDING_KEYS if name in state.given}
    stage = re.search(r"(?:z|zero|stage\D*)_?([0-3])", str(deepspeed), re.I)
    if deepspeed and stage:
        name = "multi_gpu" if stage[1] == "0" else f"zero{stage[1]}"
        state.run["strategy"] = (name, f"deepspeed: {shown(deepspeed)}")
        if state.run.pop("optim_states", None):
            state.change("optimizer", "8 bits: DeepSpeed keeps Adam's moments in its own way")
    elif deepspeed:
        state.note("deepspeed", "its ZeRO stage is not known: strategy: zero1, zero2 or zero3")
    elif any(value not in (None, False, [], {}, "", 1) for value in sharding.values()):
        state.run["strategy"] = ("fsdp2", "")
    for name, value in sharding.items():
        inner = value if isinstance(value, Mapping) else {}
        if inner.get("activation_checkpointing") or inner.get("fsdp_activation_checkpointing"):
            state.put("activation_checkpointing", "full", "fsdp_config: activation_checkpointing")
        for key in [f"{name}.{each}" for each in inner] or [name]:
            state.note(key, "strategy says how: accelerate_configs/, docs/parallelism.md")
    if re.search(r"offload(?!_params': False)", f"{deepspeed} {sharding}"):
        state.note("offload", "weights and states stay on the GPUs: docs/parallelism.md")


def _remove_unusable_settings(state: Conversion) -> None:
    """Remove settings that have no effect or that the script would refuse, and note why."""
    name = state.path.name
    lines = {n: SettingValue(v, name, 0) for n, (v, _) in state.run.items() if n in state.declared}
    values = SettingValues(state.declared, lines)
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
    if "hub_model_id" in refused and "push_to_hub" in state.run:
        del state.run["push_to_hub"]
        moot.add("hub_model_id")
        refused["hub_model_id"] += "; nothing is uploaded without it"
    for name, why in refused.items():
        state.run.pop(name, None)
        add = state.note if name in moot else state.change
        add(state.source_keys.get(name, name), why)
