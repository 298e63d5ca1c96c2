"""A run from its start to its finished model.

start       sets up the process and claims the run directory, new or resumed; dry runs
preflight   checks of the directory on all hosts: writable, with enough space, no foreign files
provenance  the record of each start in provenance.json; refuses changes that make another run
trackers    Weights & Biases, MLflow, TensorBoard, Trackio
finish      the run's callbacks, and its end
export      final/ and adapter/
chat        chat.py: conversations with a finished model or a checkpoint
"""
