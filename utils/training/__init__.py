"""The trainers of pretrain.py and sft_train.py: batches, losses, optimizers and resume state.

trainer               PackedTrainer: batches, losses, evaluation, saves; pretrain.py uses it
fine_tune_trainer     FineTuneTrainer: PackedTrainer with TRL's SFTTrainer, for sft_train.py
saving                SavingTrainer, base class of both trainers: saves and loads checkpoints and
                      RNG states, and chooses the best checkpoint
zero_resharding       converts a DeepSpeed ZeRO checkpoint for another number of ranks
smoothing             averaged weights (EMA), and noise on the embeddings (NEFTune)
optimizer             chooses the optimizer; Muon; loads the optimizer state of an earlier run
low_precision_adam    AdamW with bf16 or 8-bit moments
losses                loss by data source and held-out split; load-balancing loss of experts
callbacks             Callbacks: a dataclass with one field for each callback of a run
"""
