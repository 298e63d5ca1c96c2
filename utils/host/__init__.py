"""Helpers for all packages of utils. From other packages, these modules import only config.errors.

atomic_files  atomic writes, checked file names, locked directories, the disk cache
machine       host name, rank, processor and memory
environment   inherited environment variables and the limit of open files
redaction     tokens from .env; secrets masked in all output
faults        the cause of an error (storage, memory, a lost process) and its place in the code
foreign       time and memory limits, and clear errors, while a library reads a user's files
collectives   run a function on rank 0 or on all ranks, and give all ranks the result or error
journal_file  metrics.jsonl: format and reader, without torch
spikes        the rule for loss spikes
hub           test of the connection to the Hub; if the test fails, only the local cache is used
run_lock      at most one job per output directory: the lock files in .lock and their heartbeat
phase_times   seconds that a process spent in each phase; the lock file stores these times
"""
