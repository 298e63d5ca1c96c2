"""Replacements for transformers' attention and loss that are faster or use less memory.

varlen                `packed_varlen`, the attention of packed documents, and its kernels for CUDA
per_document          the reference for these kernels: SDPA document by document, on any device
ulysses               attention of sequences of which each rank has a slice
linear_cross_entropy  LM head and loss for a chunk of tokens at a time, without all logits
cpu_products          settings of a CPU process: oneDNN's matrix products, malloc
"""
