"""How runs are doing, from outside: without torch, on a login node, in well below a second.

run_state  what a run's directory and Slurm's queue tell: state, progress, pace, last words, advice
display    one run in lines, many in a table, or JSON; redrawn on request
wandb_sync what wandb recorded offline goes to its server
"""
