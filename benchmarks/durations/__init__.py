"""Waits that a user sees, in seconds, at growing sizes.

Each module has a TITLE, SIZES, `prepare(directory, sizes)` (what all baselines use), and
BASELINES: for a name a function (sizes, what was prepared, scratch directory) -> {size: seconds},
which starts the processes that it times.
"""
