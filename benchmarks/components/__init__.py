"""Parts of a training step, measured alone at growing sizes.

`python -m benchmarks.components MODULE BASELINE OUTCOME SIZE...`. Each module has a TITLE, a
UNIT (what is counted a second), SIZES to take, and BASELINES: for a name a function that prepares
the work of a size and returns what to time, with how many units it does. None leaves a size out.
"""
