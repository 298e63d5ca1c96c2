"""One module a toolkit: `python -m benchmarks.contestants.NAME JOB OUTCOME` trains and measures."""
