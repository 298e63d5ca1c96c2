"""What slurm/submit.sh and slurm/sweep_job.sh call: checks before a job waits in the queue.

check.py   a job on hold: what Slurm understood of it, the dry run for just that launch
sweep.py   a sweep file: its points, their command lines and dry runs
"""
