"""The model of a run, from its configuration to its layers.

config                  reads config.json, rejects useless keys, adds rows for new tokens
weights                 loads published weights (for QLoRA in 4 bits) or draws random weights
stages                  finds the weights of an earlier run (--init_from)
adapters                adds LoRA's adapters or freezes weights
architecture            class, text model, experts and image towers of an architecture; xLSTM
probe                   a small random model of the same architecture, for checks
attention               chooses the kernel, tests that packed documents do not see each other
loss_head               the loss: cross-entropy, load balancing of experts, or a user's loss
layers                  activation checkpointing, compilation and matrix products in fp8
flops                   model FLOPs per token and peaks of known GPUs, for MFU
finished_model          generation settings and other files of the exported model, final/
"""
