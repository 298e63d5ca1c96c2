"""Run by every rank of a launch: runs of several cases, whole, then cut and resumed at each step.

    cut_every_step.py PLAN.json

PLAN has `workspace`, `root` (where runs go), `cases` and `cuts`; rank 0 writes `root`/CASE.json,
the outcomes of the whole run ("whole") and of those resumed from each step. All starts share one
process and one process group, which saves the seconds that a start takes; each has Accelerator,
model, optimizer and loaders of its own. tests/exactness/test_resume_equality.py has cuts of real
processes, too.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from resumed_runs import Case, cut, main_of, outcome


def keep_the_process_group():
    """Let a run end without ending the group that the next one needs."""
    from accelerate.state import PartialState

    PartialState.destroy_process_group = lambda *_args, **_kwargs: None


def start(case: Case, workspace: Path, run: Path, **changes: object) -> None:
    """One start of a run, to its end."""
    code = main_of(case)(case.argv(workspace, run, **changes))
    assert code == 0, f"{case.name} left with {code}"
    forget_the_run()


def forget_the_run() -> None:
    """Give the next run an Accelerator of its own."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def wait() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def outcomes(case: Case, workspace: Path, root: Path, cuts: Sequence[int]) -> dict[str, dict]:
    """Run the case whole and from each cut; return the outcomes, on rank 0 alone."""
    first = int(os.environ.get("RANK", "0")) == 0
    whole, found = root / case.name / "whole", {}
    start(case, workspace, whole)
    if first:
        found["whole"] = outcome(whole)
    for step in cuts:
        run = root / case.name / f"cut-{step}"
        if first:
            cut(whole, step, run)
        wait()
        start(case, workspace, run)
        if first:
            found[str(step)] = outcome(run)
            shutil.rmtree(run)
    if first:
        shutil.rmtree(root / case.name)
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    workspace, root = Path(plan["workspace"]), Path(plan["root"])
    keep_the_process_group()
    for values in plan["cases"]:
        case = Case(**values)
        found = outcomes(case, workspace, root, plan["cuts"])
        if found:
            (root / f"{case.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
