"""Settings that Trainer and SFTTrainer share."""

import contextlib
import importlib.util
import os
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from benchmarks.recording.job import CannotRunError, Job
from benchmarks.workloads.workload import SEED
from utils.kernels.cpu_products import choose_products
from utils.kernels.varlen import CUDNN_FIRST

LIGER = "liger"  # a variant: Liger's kernels in the place of torch's


def common_settings(job: Job) -> dict[str, Any]:
    """Return the common settings: the same optimizer, precision, length and no output."""
    return {
        "output_dir": job.scratch,
        "max_steps": job.all_steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": job.numbers.mixed,
        "save_strategy": "no",
        "report_to": "none",
        "seed": SEED,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def tuned_settings() -> dict[str, Any]:
    """Return the settings of tuned runs; call it before accelerate is imported.

    Layers are compiled one by one, because the whole model in one graph would lose the flash
    kernels. accelerate only does so if an environment variable is set.
    """
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    compile_every_layer()
    use_fastest_products()
    settings: dict[str, Any] = {
        "logging_nan_inf_filter": False,
        "torch_compile": True,
        "gradient_checkpointing": False,
    }
    return settings | loader_settings()


def loader_settings() -> dict[str, Any]:
    """Return loader settings so that a GPU does not wait for batches; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4,
        "accelerator_config": {"non_blocking": True},
    }


def compile_every_layer() -> None:
    """Let torch compile all layers instead of the first eight.

    transformers passes each layer's number to its flash attention, so torch would compile each
    layer separately, up to its limit of eight. In mixed precision transformers also warns there,
    which torch cannot compile.
    """
    import torch._dynamo
    from transformers.modeling_flash_attention_utils import logger

    config: Any = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True
    config.recompile_limit = 256
    config.ignore_logging_functions = {*config.ignore_logging_functions, type(logger).warning_once}


def use_fastest_products() -> None:
    """Multiply float32 on a CPU by the library that Stoker would take: one setting of torch's."""
    if not torch.cuda.is_available():
        choose_products()


def load_model(job: Job) -> Any:
    """Load the workload's weights; tuned, for chats: with FlashAttention 2, at least torch's."""
    from transformers import AutoModelForCausalLM

    # Not by transformers' own choice, which would look for a kernel on the Hub.
    flash = job.tuned and torch.cuda.is_available() and job.kind == "sft"
    attention = "flash_attention_2" if flash else "sdpa"
    if flash and not _installed("flash_attn"):
        from benchmarks.baselines.torch_flash import stand_in_for_flash_attn

        stand_in_for_flash_attn()
    return AutoModelForCausalLM.from_pretrained(
        job.files / "weights", dtype=job.numbers.weights, attn_implementation=attention
    )


def fastest_sdpa(job: Job) -> contextlib.AbstractContextManager:
    """Return where SDPA takes its fastest kernel: tuned on a Hopper GPU, cuDNN's."""
    if not job.tuned or not torch.cuda.is_available():
        return contextlib.nullcontext()
    if torch.cuda.get_device_capability()[0] != 9:
        return contextlib.nullcontext()
    return sdpa_kernel(CUDNN_FIRST, set_priority=True)


def lora_config(job: Job) -> Any:
    """Return PEFT's configuration of the job's adapters; None: every weight is trained."""
    if not job.lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=job.lora_rank,
        lora_alpha=job.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def use_liger_kernels(model: Any, **kernels: bool) -> None:
    """Put Liger's kernels into a loaded model, as transformers' own integration does.

    Raises CannotRunError where Liger is not installed or there is no GPU.
    """
    if not _installed("liger_kernel"):
        raise CannotRunError("liger_kernel is not installed")
    if not torch.cuda.is_available():
        raise CannotRunError("Liger's kernels need a GPU")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **kernels)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
