"""The model of a run, from its configuration to its layers.

config                  reads a configuration strictly; fits the embedding to the tokenizer
weights, stages         load the weights, in 4 bits if asked, of a published model or an earlier run
adapters                LoRA's adapters; freezes unused weights
architecture            class, text model, experts and towers of an architecture; xLSTM's kernels
probe                   a small random model of the same architecture, for checks
attention               the kernel, the shape of its batches, the proof that documents stay apart
loss_head               the last layer with its loss, and the experts' load-balancing term
compilation             activation checkpointing, and compilation of single layers
flops                   model FLOPs per token and peaks of known GPUs, for MFU
finished_model          generation settings and other files of final/
"""
