"""Checks and forecasts of a job before it waits in the queue, for slurm/submit.sh.

check   checks the resources that Slurm will give to a held job; dry run with these resources
when    start and end for several numbers of nodes and time limits
sweep   reads sweep files: the command line of each run; dry runs of all runs
limits  finds requests that Slurm can never satisfy
"""
