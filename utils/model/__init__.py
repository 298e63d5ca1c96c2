"""The model of a run, from its configuration to its layers.

config                  reads a configuration strictly; fits the embedding to the tokenizer
weights, stages         load the weights, of a published model or an earlier run
adapters                LoRA's adapters; freezes unused weights
quantization            weights in 4 bits under LoRA
architecture            class, text model, experts and towers of a transformers model
probe                   a small random model of the same architecture, for checks
attention               the chosen kernel, and the shape of its batches
isolation               proves that packed documents stay apart, and so chooses the kernel
loss_head               the last layer with its loss, and the experts' load-balancing term
compilation             activation checkpointing, and compilation of single layers
flops                   model FLOPs per token and peaks of known GPUs, for MFU
finished_model          generation settings and other files of final/
xlstm                   kernels of xLSTM
"""
