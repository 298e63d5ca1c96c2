"""A plain transformers.Trainer on a tiny Llama and fixed data; rank 0 prints its losses as JSON."""

import argparse
import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from utils.cluster.launch import check_launch, check_strategy


class Rows(torch.utils.data.Dataset):
    """Fixed random token rows."""

    def __init__(self, rows, length, vocabulary):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (rows, length), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_llama():
    set_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--micro_batch_size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--resume")
    given = parser.parse_args()
    args = TrainingArguments(
        output_dir=given.output_dir,
        max_steps=given.steps,
        per_device_train_batch_size=given.micro_batch_size,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps" if given.save_steps else "no",
        save_steps=given.save_steps or 500,
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    facts = check_launch()
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=Rows(64, 16, 64))
    check_strategy(facts)
    trainer.train(resume_from_checkpoint=given.resume)
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        facts_line = {"strategy": facts.strategy, "world_size": facts.world_size}
        print("RESULT " + json.dumps({"losses": losses, **facts_line}), flush=True)
    # Leave together: a rank that is gone takes the store with it while others still talk to it.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
