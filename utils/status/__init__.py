"""How runs are doing, without torch, on a login node, in well below a second.

history    the one reader of a run directory: starts, log lines, checkpoints, pages, damage
endings    how a start or a run stands: the evidence, and the words of status.py and report.py
run_state  a run and its job in Slurm's queue as the value that status.py shows
display    one run in lines, many in a table, or JSON; redrawn on request
wandb_sync uploads what wandb recorded offline
"""
