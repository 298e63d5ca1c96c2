"""`python -m utils.doctor`: check whether this machine can train, and say what to install."""
