"""`python -m utils.doctor`: checks whether this machine can train, and says what to install."""
