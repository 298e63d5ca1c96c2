"""Training data: from a token dataset on disk to the micro-batches of a rank.

arrow_columns  Arrow files as numpy views, and the meaning of columns
description    statistics and fingerprint of a split, from stoker.json or from reading its tokens
token_dataset  the documents of a split, checks of their content, documents to skip
packing        the plan that assigns parts of documents to sequences
order          the sequences that each step and rank trains on, computed from seed and step
loader         micro-batches of packed sequences; tokens trained on per source
tokenizers     loading and comparing tokenizers
"""
