"""One module a toolkit: `python -m benchmarks.baselines.NAME JOB OUTCOME` trains and measures."""
