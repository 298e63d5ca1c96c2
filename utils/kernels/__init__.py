"""Faster or smaller replacements for transformers' attention and loss.

varlen                `packed_varlen`, the attention of packed documents, and the kernels behind it
per_document          the reference for these kernels: SDPA document by document, on any device
linear_cross_entropy  last layer and loss for a few tokens at a time, without all logits
cpu_products          settings of a CPU process: oneDNN's matrix products, malloc
"""
