"""Answers to unknown names: refused settings, other toolkits' names, typing errors.

A table maps an answer (a reason or our name) to the names that get the answer, in one string.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Turn a table (answer -> names in one string) into a mapping (name -> answer)."""
    return {name: answer for answer, names in table.items() for name in names.split()}


# Fields of the libraries that keep their defaults; the reason completes "... cannot be set here:".
REFUSED = by_name({
    "strategy says how processes share the model, as in strategy: fsdp2": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "final/ is uploaded once, at the end of the run: push_to_hub with hub_model_id": ""
    "hub_always_push hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "it makes a dense attention mask on packed sequences: --compile true compiles layer by layer":
    "torch_compile torch_compile_backend torch_compile_mode",
    "the script always trains, evaluates as eval_strategy says, keeps no predictions, and logs "
    "tokens and memory": "batch_eval_metrics do_eval do_predict do_train eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "include_num_input_tokens_seen prediction_loss_only skip_memory_metrics",
    "a run saves all that it needs, as save_steps says and when it is stopped, and resumes by "
    "itself": "enable_jit_checkpoint ignore_data_skip save_on_each_node "
    "save_only_model",
    "it follows from global_batch_size, which is per_device_train_batch_size x gradient "
    "accumulation x ranks: give that": "auto_find_batch_size gradient_accumulation_steps",
    "the loader divides full global batches of packed sequences over the ranks, in an order that "
    "follows from seed": "accelerator_config data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context eval_packing label_names length_column_name "
    "packing_strategy pad_to_multiple_of padding_free remove_unused_columns shuffle_dataset "
    "train_sampling_strategy",
    "the loss is the negative log-likelihood of the next token, the mean over the global batch": ""
    "average_tokens_across_devices label_smoothing_factor loss_type",
    "Liger's kernels are not tested with packed sequences": "liger_kernel_config use_liger_kernel",
    "the launcher gives the rank through the environment": "local_rank",
    "code that comes with a model is not run": "trust_remote_code",
    "with a cache, packed documents would attend to each other": "use_cache",
    "prepare_data.py tokenizes the data, applies the chat template and marks what is trained on": ""
    "assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc "
    "dataset_text_field",
    "special tokens come from the tokenizer: --tokenizer_name_or_path": "eos_token pad_token",
    "set --sequence_length, and --on_overlong for longer documents": "max_length truncation_mode",
    "models are set by --model_name_or_path, --dtype and their like": "model_init_kwargs",
    "8 bits are not supported: load_in_4bit: true takes half as much, dtype: bfloat16 twice": ""
    "load_in_8bit",
    "it shards weights in 4 bits, which is not supported: multi_gpu.yaml keeps them on each GPU": ""
    "bnb_4bit_quant_storage",
    "LoRA here is for causal language models": "lora_task_type",
})  # fmt: skip


@cache
def other_names() -> dict[str, str]:
    """Return other toolkits' names of settings, each with our name or with advice."""
    import yaml  # the launcher imports this module before it knows whether packages are there

    return by_name(yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8")))


def unknown_name(written: str, known: Iterable[str]) -> str:
    """Return why a setting is refused, or our name for the setting that was probably meant.

    `written` is "--lr" on a command line and "lr" in a recipe.
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    if name in REFUSED:
        return f"{written} cannot be set here: {REFUSED[name]}"
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    answers = {each: f"{dashes}{each} cannot be set here: {why}" for each, why in REFUSED.items()}
    for other, ours in other_names().items():
        if ours in known:
            answers[other] = f"here it is {dashes}{ours}"
        elif not ours.isidentifier():
            answers[other] = ours
    plain = name.rpartition(".")[2]  # other toolkits have sections, as in training.steps
    exact = answers.get(plain)
    answers |= {each: f"did you mean {dashes}{each}?" for each in known}
    near = get_close_matches(plain, answers, n=1, cutoff=0.9)
    near = near or get_close_matches(plain, known, n=1, cutoff=0.8)
    advice = answers[near[0]] if near else "--help all lists all settings"
    return f"unknown setting {written}: {exact or advice}"
