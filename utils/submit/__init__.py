"""Checks of a job before it waits in the queue, for slurm/submit.sh and slurm/sweep_job.sh.

check   a job on hold: the resources that Slurm understood, and a dry run with them
sweep   a sweep file: its points, their command lines and dry runs
"""
