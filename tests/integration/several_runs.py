"""Trains several runs, one after the other, in the ranks of a single launch.

    several_runs.py PLAN.json

Runs share the processes, because each launch takes seconds. PLAN is a list of {script, argv, run,
cut}: `cut` is null, or [WHOLE, STEP] to make `run` a copy of WHOLE as it was after STEP.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import tiny
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


def main() -> None:
    # The process group stays for the next run.
    PartialState.destroy_process_group = lambda *_args, **_kwargs: None
    for item in json.loads(Path(sys.argv[1]).read_text()):
        if item["cut"] and os.environ["RANK"] == "0":
            tiny.copied(Path(item["cut"][0]), Path(item["run"]), item["cut"][1])
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        code = importlib.import_module(item["script"]).main(item["argv"])
        assert code == 0, f"{item['run']} left with {code}"
        torch._dynamo.reset()  # the graphs of all runs would exceed the limit
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as utils/launch/script.py does
