"""Callbacks that act at events of training; utils/run/finish.py creates them.

progress    the phase, step and micro-batch of this rank, for status.py and error reports
journal     writes metrics.jsonl and the readable log lines; a live view on a terminal
metrics     metrics of training logs: speed, MFU, a mixture's sources, the slowest rank
memory      each rank's memory by phase, and the report of a run that ran out of memory
profiler    a trace of `profile_steps`, and a table of the most expensive kernels
stop        stops or saves at the same step on all ranks: signals, files, the time limit
evaluation  early stopping, and samples of what the model says
resume_check  compares repeated steps with those of other nodes
nonfinite   ends a run whose loss, gradient or weights are not finite, or whose loss spikes
watchdog    ends a run that hangs; hang.txt: the stacks and collectives of all ranks
"""
