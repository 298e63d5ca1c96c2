"""`python -m utils.doctor`: what this machine has for training, what is missing, what mends it.

machine       Python, packages, torch, GPUs, attention, compiler, memory
surroundings  Slurm, the Hub, wandb, disks, .env
__main__      runs each check guarded and within a time, and prints what it finds
"""
