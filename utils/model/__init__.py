"""The model of a run, from its configuration to its layers.

config                  reads config.json and rejects useless keys; adds rows for new tokens
weights                 loads published weights, in 4 bits if asked, or draws random weights
stages                  finds the weights of an earlier run (--init_from)
adapters                adds LoRA's adapters, or freezes weights
architecture            class, text model, experts and image towers of an architecture; xLSTM
probe                   a small random model of the same architecture, for checks
attention               chooses the kernel; tests that packed documents do not see each other
loss_head               the loss: LM head and cross-entropy, balance of experts, or a user's loss
layers                  activation checkpointing, compilation and products in 8 bits
flops                   model FLOPs per token and peaks of known GPUs, for MFU
finished_model          generation settings and other files of the exported model, final/
"""
