"""The command line of predictions.py: `python -m benchmarks.memory`."""

import sys

from benchmarks.memory.predictions import main

if __name__ == "__main__":
    sys.exit(main())
