"""`python -m utils.doctor`: check whether this machine can train; say what to install."""
