"""The callbacks that act at events of training; utils/run/finish.py creates them.

progress    the phase, step and micro-batch of this rank, for status.py and error reports
journal     writes metrics.jsonl and the readable log lines; a live view on a terminal
metrics     metrics of training logs: speed, MFU, tokens by data source, the slowest rank
memory      each rank's memory by phase, and the report of a run that ran out of memory
profiler    a trace of `profile_steps`, and a table of the most expensive kernels
stop        stops or saves at the same step on all ranks: signals, files, the time limit
evaluation  early stopping, and texts that the model generates at evaluations
resume_check  after a resume on other nodes, compares repeated steps with the earlier nodes' logs
nonfinite   ends a run at a NaN or infinity (loss, gradient, weights) or at a loss spike
watchdog    ends a run that hangs; writes the stacks and collectives of all ranks to hang.txt
"""
