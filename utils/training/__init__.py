"""Training: a trainer built on transformers' Trainer, its optimizer, and the resume state.

trainer               PackedTrainer: batches, losses, evaluation, saves; pretrain.py uses it
fine_tune_trainer     FineTuneTrainer: PackedTrainer with TRL's SFTTrainer, for sft_train.py
saving                the trainer's part that saves and loads checkpoints and chooses the best;
                      random states
zero_resharding       loads DeepSpeed's checkpoints on another number of ranks
smoothing             averaged weights (EMA), and noise on the embeddings (NEFTune)
optimizer             the optimizer of a run, and the state that an earlier stage left for it
low_precision_adam    AdamW with bf16 or 8-bit moments
losses                losses by data source, of held-out splits, and of expert balance
callbacks             the callbacks of a run and the other collaborators, by name
"""
