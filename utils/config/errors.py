"""The errors that are the user's or the machine's to mend, and the exit codes of all endings."""

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """How a process ended, for the user and for the scripts in slurm/.

    Those requeue a job on STOPPED and LOST_RANK alone: only there does starting again help.
    """

    DONE = 0
    REFUSED = 2  # settings or data that cannot work
    UNFIT = 69  # this machine, or what was allocated of the cluster, cannot run it
    STORAGE = 74  # no space, no inodes, no permission; everything older is intact
    STOPPED = 75  # stopped early with a checkpoint: start again to go on
    LOST_RANK = 76  # a rank hung or was killed by a signal
    NO_PROGRESS = 77  # three restarts reached no new checkpoint
    NOT_FINITE = 78  # a loss, gradient or weight that is NaN or infinite


class ConfigurationError(ValueError):
    """Settings or data that cannot work: what was given, why it cannot work, what to do.

    Carries every fault found, so that one start shows them all. Scripts print it without a
    traceback on rank 0 and exit with `exit_code`.
    """

    exit_code = ExitCode.REFUSED
    kind = "configuration error"
    ending = "refused"  # how the launcher calls it: the run was refused, or it failed

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class UnfitClusterError(ConfigurationError):
    """Nodes, devices or network that cannot run what was asked; names the host."""

    exit_code = ExitCode.UNFIT
    kind = "cluster error"


class StorageError(ConfigurationError):
    """Storage that has no room or cannot be written to; names the host and the directory."""

    exit_code = ExitCode.STORAGE
    kind = "storage error"


class NoProgressError(ConfigurationError):
    """A job that starts again and again without reaching a new checkpoint."""

    exit_code = ExitCode.NO_PROGRESS
    kind = "no progress"


class NotFiniteError(ConfigurationError):
    """A step whose loss, gradient or weights are not finite; names its documents."""

    exit_code = ExitCode.NOT_FINITE
    kind = "not finite"
    ending = "failed"


# Settings of transformers and TRL that cannot act in Stoker or endanger a run, each with the way.

_HUB = "nothing is uploaded while training; upload final/ afterwards with `hf upload`"
_COMPILE = (
    "compiling the whole model makes a dense attention mask and loses the flash kernel on packed "
    "sequences: --compile true compiles it layer by layer"
)
_LAUNCH = "the strategy belongs to the accelerate config: accelerate launch --config_file FILE"
_LOSS_ONLY = "evaluation computes loss and perplexity of each split and keeps no predictions"
_ROWS = "packed rows have one length and come in an order of Stoker's own"
_SCRIPT = "pretrain.py and sft_train.py always train, and evaluate when eval_strategy says so"
_RESUME = "a run resumes by itself from the last checkpoint in its output_dir"

REFUSED_TRAINING_SETTINGS = {
    "accelerator_config": "the loader divides global batches over the ranks itself",
    "auto_find_batch_size": "it would change the global batch: set per_device_train_batch_size",
    "average_tokens_across_devices": (
        "it stays on: otherwise the loss would depend on the number of ranks"
    ),
    "batch_eval_metrics": _LOSS_ONLY,
    "data_seed": "the order of the data follows from seed",
    "dataloader_drop_last": "every global batch is full: the order of the data has no last batch",
    "dataloader_in_order": "the order of the data is part of the promise that runs repeat exactly",
    "dataloader_multiprocessing_context": "the loader's workers are started by its own method",
    "deepspeed": _LAUNCH,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "do_train": _SCRIPT,
    "enable_jit_checkpoint": (
        "its ranks do not agree on the step to save; checkpoints come from save_steps"
    ),
    "eval_accumulation_steps": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "fsdp": _LAUNCH,
    "fsdp_config": _LAUNCH,
    "gradient_accumulation_steps": (
        "it follows from global_batch_size (sequences per optimizer step over all ranks), which is "
        "per_device_train_batch_size x gradient accumulation x ranks: give that"
    ),
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "hub_token": (
        "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or "
        "into .env"
    ),
    "ignore_data_skip": "a resumed run goes on with exactly the next sample",
    "include_for_metrics": _LOSS_ONLY,
    "include_num_input_tokens_seen": (
        "it waits for the device at every step; the tokens seen are logged without it"
    ),
    "label_names": "the labels of packed rows are named labels",
    "label_smoothing_factor": "the loss is the negative log-likelihood of the next token",
    "length_column_name": _ROWS,
    "liger_kernel_config": "Liger's kernels are not tested with packed sequences",
    "local_rank": "the launcher gives the rank through the environment",
    "parallelism_config": _LAUNCH,
    "prediction_loss_only": _LOSS_ONLY,
    "push_to_hub": _HUB,
    "remove_unused_columns": "packed rows hold what the model needs and nothing else",
    "resume_from_checkpoint": _RESUME,
    "save_on_each_node": "all nodes share one output_dir",
    "save_only_model": "a checkpoint without the optimizer cannot be resumed",
    "skip_memory_metrics": "memory is logged anyway, at no cost",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "train_sampling_strategy": _ROWS,
    "trust_remote_code": "code that comes with a model is not run",
    "use_cache": "with a cache, packed documents would attend to each other",
    "use_liger_kernel": "Liger's kernels are not tested with packed sequences",
}

_PREPARED = "the data is tokenized beforehand, by prepare_data.py"
_MASKED = "the loss mask comes with the token dataset; prepare_data.py makes it"
_PACKED = "documents are packed as --packing says"
_LENGTH = "set --sequence_length, and --on_overlong for longer documents"
_TOKENIZER = "special tokens come from the tokenizer: --tokenizer_name_or_path"

REFUSED_FINE_TUNING_SETTINGS = REFUSED_TRAINING_SETTINGS | {
    "assistant_only_loss": _MASKED,
    "chat_template_path": "the chat template is applied by prepare_data.py --chat_template",
    "completion_only_loss": _MASKED,
    "dataset_kwargs": _PREPARED,
    "dataset_num_proc": _PREPARED,
    "dataset_text_field": _PREPARED,
    "eos_token": _TOKENIZER,
    "eval_packing": _PACKED,
    "loss_type": "the loss is the negative log-likelihood of the next token",
    "max_length": _LENGTH,
    "model_init_kwargs": "models are set by --model_name_or_path, --dtype and their like",
    "packing": _PACKED,
    "packing_strategy": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "pad_token": _TOKENIZER,
    "padding_free": _PACKED,
    "shuffle_dataset": "training always shuffles, by seed",
    "truncation_mode": _LENGTH,
}

_QUANTIZED = "quantized weights are not supported: use --dtype bfloat16 with --use_peft"

REFUSED_MODEL_SETTINGS = {
    "bnb_4bit_quant_storage": _QUANTIZED,
    "bnb_4bit_quant_type": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "lora_task_type": "it is always CAUSAL_LM",
    "use_bnb_nested_quant": _QUANTIZED,
}
