"""The status and report of runs, read from their directories without torch (status.py, report.py).

history       the one reader of a run directory: starts, log lines, checkpoints, pages, damage
endings       the state of a start or a run: the evidence, and its words for status.py, report.py
run_state     the values that status.py shows of a run and of its job in Slurm's queue
status_lines  runs as lines, a table or JSON, redrawn on request; upload of wandb's offline records
findings      where the hours went, loss spikes, waits and memory of ranks, settings that differ
charts, page  the series of each chart, also for --png; page.html (Jinja2) with page.js
"""
