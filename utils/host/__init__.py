"""Tools for every package. Only the error types of `config` are imported here.

atomic_files  atomic writes, checked file names, locked directories, the disk cache
machine       this machine: name, processor, memory
redaction     tokens from .env; secrets removed from all output
faults        errors of storage, memory and lost processes; the place in the code
foreign       limits and clear errors when a library reads a user's files
collectives   actions and answers of all ranks, and their gloo group
journal_file  metrics.jsonl: format and reader, without torch
run_lock      one job per output directory: its owner, and the error that ended it
"""
