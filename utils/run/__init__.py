"""A run from its start to its finished model.

start       the process, then the run directory claimed: new, resumed or finished; dry runs
preflight   the directory seen from all hosts: writable, with room, no one else's
changes     what changed since the last start; what makes it another run is refused
provenance  where each start comes from, in provenance.json; Weights & Biases
finish      the run's callbacks, and its end
export      final/ and adapter/
chat        chat.py: conversations with a finished model or a checkpoint
"""
