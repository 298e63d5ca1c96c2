"""Checks and forecasts of a job before it waits in the queue, for slurm/submit.sh.

check   the resources that Slurm grants to a held job, and a dry run with these resources
when    start and end for several numbers of nodes and time limits
sweep   sweep files: the command line of each run, and dry runs of all runs
"""
