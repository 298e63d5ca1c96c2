"""Checks and forecasts of a job before it waits in the queue, for slurm/submit.sh.

check   checks the resources of a job that Slurm holds, and does a dry run with these resources
when    forecasts start and end of a training for several numbers of nodes and time limits
sweep   reads sweep files: the command line of each run; dry runs of all runs
limits  finds requests that Slurm can never satisfy
"""
