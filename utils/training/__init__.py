"""Training: one trainer on transformers', its optimizer, and what a resumed run needs.

trainer               PackedTrainer: batches, losses, evaluation, saves; pretrain.py uses it
fine_tune_trainer     the same before TRL's SFTTrainer, with LoRA's adapters
saving                the part of the trainer about checkpoints, and the best of them
resume_state          the protocol of values in a checkpoint, and random states
zero_resharding       DeepSpeed's checkpoints on another number of ranks
smoothing             averaged weights (EMA), and noise on the embeddings (NEFTune)
optimizer             which optimizer a run builds, and the state of an earlier stage
low_precision_adam    AdamW with bf16 or 8-bit moments, on low_precision_states' rounding
losses                by data source, of held-out splits, and of expert balance
callbacks             the callbacks of a run and the other collaborators, by name
"""
