"""Replacements for transformers' attention and loss that are faster or use less memory.

varlen                `packed_varlen`, the attention of packed documents, and its kernels for CUDA
per_document          their reference: SDPA of one document at a time, on any device
ulysses               attention of sequences that are split over ranks
linear_cross_entropy  LM head and loss of one chunk of tokens at a time, to save memory
cpu_products          settings of a CPU process: matrix products by oneDNN, malloc
"""
