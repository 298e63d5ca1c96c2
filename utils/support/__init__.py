"""What every package may use; nothing here imports another one but for its errors.

files         atomic writes, and a disk cache of what took long to find out
host          this machine: name, processor, memory
redaction     tokens from .env, kept out of every output
notes         last words of a rank for the launcher; storage faults; places in the code
collectives   ranks that act for each other, and the gloo group they talk over
journal_file  metrics.jsonl: its numbers, and how it is read, without torch
run_lock      one job per output directory; who has it, and what ended it
"""
