"""From a token dataset on disk to the micro-batches of a rank.

arrow_columns  Arrow files as numpy views, and what their columns mean
description    statistics and fingerprint of a split, from stoker.json or from reading its tokens
token_dataset  the documents of a split, and checks for faults
packing        the plan that says which parts of documents fill which sequence
order          the sequences that each step and rank trains on, a function of seed and step
loader         micro-batches of packed sequences, loaded ahead; tokens seen per source
tokenizers     loading and comparing tokenizers
"""
