"""The status and report of runs, read from their directories without torch (status.py, report.py).

history       reads a run directory: starts, log lines, checkpoints, text files, damaged files
endings       the state of a start or a run (End), and its words for status.py, report.py
hours         GPU-hours by part, energy, and the end of max_gpu_hours
run_state     the values that status.py shows of a run and of its job in Slurm's queue
status_lines  prints runs as lines, a table or JSON; uploads wandb's offline files
space         sizes, purge and quota of runs, datasets and caches; verified copies (--keep)
findings      time spent, slow ranks, memory of ranks, settings that differ
charts, page  the series of each chart, also for --png; pages of runs and folders (Jinja2, page.js)
"""
