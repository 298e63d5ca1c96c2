"""`python -m utils.doctor`: checks whether this machine can train, and says what to install.

checks    Python, packages, GPUs, attention, compiler, memory, Slurm, .env, the Hub, wandb, disks
__main__  runs each check with a time limit, and prints its findings
"""
