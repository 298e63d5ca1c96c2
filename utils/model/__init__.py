"""What trains: the model from its configuration to the layers of one run.

config                  a configuration read strictly; the tokenizer beside the embedding
weights, stages         what is loaded, and from which earlier run
adapters                LoRA, and which weights train
quantization            weights in 4 bits under LoRA
architecture            class, text model, experts and towers of a model of transformers
probe                   a small random model of the same architecture, to try things on
attention               the chosen kernel, and the batches it takes
isolation               the proof that packed documents stay apart, which decides on the kernel
loss_head               the last layer with its loss, and the experts' load-balancing term
compilation             activation checkpointing, and layers compiled one by one
flops                   model FLOPs a token, and peaks of known GPUs: MFU
finished_model          what final/ says beside its weights
"""
