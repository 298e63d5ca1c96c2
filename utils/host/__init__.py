"""Helpers for all other packages of utils. From those, these modules import only config.errors.

atomic_files  atomic writes, checked file names, locked directories, the disk cache
machine       host name, rank, processor and memory
environment   inherited variables and the limit of open files
redaction     tokens from .env; secrets masked in all output
faults        recognizes errors of storage, memory and lost processes; finds their place in the code
foreign       time and memory limits, and clear errors, while a library reads a user's files
collectives   run a function on rank 0 or on all ranks, and give all ranks the result or error
journal_file  metrics.jsonl: format and reader, without torch
spikes        the rule for loss spikes
hub           one test of the connection to the Hub; messages on what its cache lacks
run_lock      at most one job per output directory: the lock file in .lock and its heartbeat
phase_times   seconds of a process in each phase, which the heartbeat writes
"""
