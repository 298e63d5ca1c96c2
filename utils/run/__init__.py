"""A run from its start to its finished model.

start       sets up the process and claims the run directory, new or resumed; dry runs
preflight   checks of the directory on all hosts: writable, with enough space, no foreign files
changes     changes since the last start; refuses changes that make another run
provenance  settings, code and machines of each start, in provenance.json; Weights & Biases
finish      the run's callbacks, and its end
export      final/ and adapter/
chat        chat.py: conversations with a finished model or a checkpoint
"""
