"""Stoker beside other toolkits on the same work: `python -m benchmarks cpu`, see __main__.py."""
