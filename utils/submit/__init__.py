"""Checks of a job before it waits in the queue, for slurm/submit.sh and slurm/sweep_job.sh.

check   the resources that Slurm grants to a held job, and a dry run with these resources
sweep   sweep files: the command line of each run, and dry runs of all runs
"""
