"""What a step computes faster, or in less memory, than transformers would.

varlen                `packed_varlen`, the attention of packed documents, and the kernels behind it
per_document          its plain reference: SDPA document by document, on any device
linear_cross_entropy  last layer and loss a few tokens at a time, never all logits
cpu_products          what a run on a CPU sets: oneDNN's products, a heap that keeps memory
"""
