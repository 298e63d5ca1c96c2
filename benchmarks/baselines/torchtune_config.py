"""The inputs of torchtune's recipes: a configuration as in their YAML files, and the chats."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.recording.job import Job
from benchmarks.workloads.workload import PAD_TOKEN_ID, SEED

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
NEVER = 10**9  # steps


def recipe_config(job: Job) -> dict[str, Any]:
    """Return the recipe's configuration of the job."""
    assert job.kind == "sft"
    numbers = job.numbers
    assert numbers.weights == "bfloat16" or not numbers.mixed, "torchtune has no autocast"
    shape = json.loads((job.files / "weights" / "config.json").read_text())
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "dtype": DTYPES[numbers.weights],
        "seed": SEED,
        "model": model_config(job, shape),
        "checkpointer": weights_config(job),
        "resume_from_checkpoint": False,
        # Only padding would ask for it, and rows are packed.
        "tokenizer": {"_component_": "types.SimpleNamespace", "pad_id": PAD_TOKEN_ID},
        "dataset": {
            "_component_": f"{__name__}.packed_chats",
            "source": str(job.files / "documents"),
            "length": job.sequence_length,
            "packed": True,
        },
        "shuffle": True,
        "batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "epochs": 1,
        "max_steps_per_epoch": job.all_steps,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": job.learning_rate,
            "weight_decay": 0.0,
        },
        "optimizer_in_bwd": False,
        "clip_grad_norm": 1.0,
        # The LoRA recipe has to have a schedule: no waves are a constant rate.
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
            "num_cycles": 0.0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "compile": True,  # layers one by one, and the loss
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "output_dir": job.scratch,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": job.scratch,
        },
        "log_every_n_steps": NEVER,
    }


def model_config(job: Job, shape: dict[str, Any]) -> dict[str, Any]:
    """Describe a Llama of transformers' `config.json`: Llama 3's, whose positions are plain."""
    assert shape["model_type"] == "llama"
    assert not shape["tie_word_embeddings"]
    assert shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]
    sizes = {
        "vocab_size": shape["vocab_size"],
        "num_layers": shape["num_hidden_layers"],
        "num_heads": shape["num_attention_heads"],
        "num_kv_heads": shape["num_key_value_heads"],
        "embed_dim": shape["hidden_size"],
        "intermediate_dim": shape["intermediate_size"],
        "max_seq_len": job.sequence_length,
        "rope_base": int(shape["rope_parameters"]["rope_theta"]),
        "norm_eps": shape["rms_norm_eps"],
    }
    if not job.lora_rank:
        return {"_component_": "torchtune.models.llama3.llama3", **sizes}
    return {
        "_component_": "torchtune.models.llama3.lora_llama3",
        **sizes,
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "lora_rank": job.lora_rank,
        "lora_alpha": job.lora_rank,
        "lora_dropout": 0.0,
    }


def weights_config(job: Job) -> dict[str, Any]:
    """Let torchtune's checkpointer convert transformers' weights."""
    weights = job.files / "weights"
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(weights),
        "checkpoint_files": sorted(file.name for file in weights.glob("*.safetensors")),
        "output_dir": str(Path(job.scratch) / "saved"),
        "model_type": "LLAMA3",
    }


def packed_chats(_tokenizer: Any, *, source: str, length: int, packed: bool) -> Any:
    """Return the workload's chats in rows of `length` tokens, packed by torchtune.

    `packed` is for the recipe to read.
    """
    from datasets import load_from_disk
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
    from torchtune.datasets import PackedDataset

    assert packed
    chats = [
        {
            "tokens": chat["input_ids"],
            "labels": [
                token if bears else CROSS_ENTROPY_IGNORE_IDX
                for token, bears in zip(chat["input_ids"], chat["completion_mask"], strict=True)
            ],
        }
        for chat in load_from_disk(source)
    ]
    return PackedDataset(chats, max_seq_len=length, padding_idx=PAD_TOKEN_ID)
