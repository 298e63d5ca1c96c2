"""`python -m utils.doctor`: what this machine has for training, what is missing, what mends it.

checks    Python, packages, GPUs, attention, compiler, memory, Slurm, .env, the Hub, wandb, disks
__main__  runs each check guarded and within a time, and prints what it finds
"""
