"""Runs from outside, without torch: what status.py and report.py read, judge and show.

history         the one reader of a run directory: starts, log lines, checkpoints, pages, damage
endings         how a start or a run stands: the evidence, and the words of status.py and report.py
run_state       a run and its job in Slurm's queue as the value that status.py shows
status_lines    one run in lines, many in a table, or JSON; redrawn on request
columns, ranks  figures of log lines as arrays, and the points of a chart; memory of each rank
findings        where the hours went, loss spikes, settings that differ
charts, page    the series of each chart, also for --png; page.html (Jinja2) with page.js
wandb_sync      uploads what wandb recorded offline
"""
