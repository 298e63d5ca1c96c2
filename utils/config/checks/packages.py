"""Settings that need a package which is not installed: loggers, optimizers, kernels, DeepSpeed."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

# Where `report_to` sends to, by the package that it imports, and pip's name of that.
REPORTERS = {
    "azure_ml": ("azureml", "azureml-sdk"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "dagshub": ("dagshub", "dagshub"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("kubeflow", "kubeflow"),
    "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
# Optimizers of other packages, by a part of their names (transformers/trainer_optimizer.py).
OPTIMIZERS = {
    "torch_4bit": ("torchao", "torchao"),
    "torch_8bit": ("torchao", "torchao"),
    "torch_npu": ("torch_npu", "torch-npu"),
    "torch_xla": ("torch_xla", "torch-xla"),
    "anyprecision": ("torchdistx", "torchdistx"),
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "8bit": ("bitsandbytes", "bitsandbytes"),
    "32bit": ("bitsandbytes", "bitsandbytes"),
    "bnb": ("bitsandbytes", "bitsandbytes"),
    "ademamix": ("bitsandbytes", "bitsandbytes"),
}
KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def is_installed(package: str) -> bool:
    """Whether Python would find a package; it is not imported."""
    return importlib.util.find_spec(package) is not None


def check_packages(values: Mapping[str, Any]) -> Iterator[str]:
    """Refuse what needs a package that is not installed, and say what else could be done."""
    reporters = values["report_to"] or []
    for name in [reporters] if isinstance(reporters, str) else reporters:
        if name in ("none", "all"):
            continue
        if name not in REPORTERS:
            yield f"report_to {name}: expected {', '.join(REPORTERS)}, all or none"
        elif not is_installed(REPORTERS[name][0]):
            yield (
                f"report_to {name}: it is not installed: pip install {REPORTERS[name][1]}, or "
                "leave it out: metrics.jsonl in the run's directory has every figure"
            )
    optimizer = str(getattr(values["optim"], "value", values["optim"]))
    package, pip_name = next(
        (found for part, found in OPTIMIZERS.items() if part in optimizer), ("torch", "")
    )
    if not is_installed(package):
        yield (
            f"optim {optimizer} is in {package}, which is not installed: pip install {pip_name}, "
            "or use adamw_torch (with optim_states: int8 its two moments take 2 bytes a parameter)"
        )
    kernel = values["attn_implementation"]
    if kernel in KERNELS and not is_installed(KERNELS[kernel]):
        yield (
            f"attn_implementation {kernel} is in {KERNELS[kernel]}, which is not installed: pip "
            "install flash-attn, or use auto, which needs no package"
        )
    by_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if by_deepspeed and not is_installed("deepspeed"):
        yield "the accelerate config asks for DeepSpeed: pip install deepspeed, or use fsdp2.yaml"
