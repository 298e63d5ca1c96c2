"""The status and report of runs, read from their directories without torch (status.py, report.py).

history       reads a run directory: starts (executions of the script), log lines, checkpoints
endings       the state of a start or a run (End), and texts for the user on this state
hours         GPU-hours by use (training, saves, ...), energy, the end of the budget max_gpu_hours
run_state     the values that status.py shows of a run and of its job in Slurm's queue
status_lines  shows runs as lines, a table or JSON; uploads wandb's offline files
space         sizes of runs, datasets and caches; purge dates and quota; verified copies (--keep)
findings      time spent, slow ranks, memory of ranks, settings that differ between runs
charts        the charts of the report, drawn by page.js or for --png
page          HTML pages on runs and on folders of runs (Jinja2, page.js)
"""
