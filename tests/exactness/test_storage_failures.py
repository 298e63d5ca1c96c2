"""A start whose storage refuses any call that changes its run directory: no space, failing disk.

It ends with 74, or goes on where what failed was no part of what it must keep; the next start ends
as the undisturbed one, and no committed checkpoint is lost but those that rotation deletes.
"""

import collections

import pytest
from kernel_calls import Call
from kill_fixtures import in_slots
from kill_scenes import sample

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

FIGURES = "storage_refusals"
# Cases of a scene in `make test`.
SAMPLED = {"resuming": 4, "beginning": 2, "recovering": 2, "background": 2}


def errors_of(call: Call) -> list[str]:
    if call.name in ("fsync", "fdatasync"):
        return ["EIO", "ENOSPC"]
    return ["EIO"] if call.name in ("unlink", "unlinkat", "rmdir") else ["ENOSPC"]


@pytest.mark.parametrize("name", list(SAMPLED))
def test_storage_that_refuses_any_call_harms_nothing(name, request, slots, exhaustive, figures):
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]
    if not exhaustive:
        cases = sample(cases, SAMPLED[name])

    def refuse(case, directory) -> tuple[str, list[str]]:
        call, error = case
        ending = scene.failed_at(call, directory, error)
        wrong = scene.losses_of_checkpoints(directory, ending.exit_code == ExitCode.DONE)
        ends = {ExitCode.DONE: "went_on", ExitCode.STORAGE: "ended_with_74"}
        end = ends.get(ending.exit_code, "ended_otherwise")
        if end == "ended_otherwise":
            wrong.append(f"{ending.exit_code} {ending.output[-3000:]}")
        again = scene.start(directory)
        if again.exit_code != ExitCode.DONE:
            wrong.append(f"then {again.exit_code} {again.output[-3000:]}")
        else:
            wrong += [f"{name} differs" for name in scene.differences(directory)]
        return end, [f"{call} {error}: {line}" for line in wrong]

    results = in_slots(slots, refuse, cases)
    figures(FIGURES)[name] = {
        "cases": len(cases),
        **collections.Counter(end for end, _ in results),
        "survived": sum(not wrong for _, wrong in results),
    }
    wrong = [line for _, lines in results for line in lines]
    assert not wrong, "\n".join(wrong)


def test_what_plain_trainer_makes_of_such_storage(stock, slots, exhaustive, figures):
    calls = stock.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]
    if not exhaustive:
        cases = sample(cases, 2)

    def refuse(case, directory) -> tuple[str, str]:
        ending = stock.failed_at(case[0], directory, case[1])
        end = "went_on" if ending.exit_code == 0 else "ended_otherwise"
        return end, stock.outcome(directory)

    results = in_slots(slots, refuse, cases)
    outcomes = collections.Counter(outcome for _, outcome in results)
    figures(FIGURES)["plain_trainer"] = {
        "cases": len(cases),
        **collections.Counter(end for end, _ in results),
        "survived": outcomes["same"],
        "next_start_failed": outcomes["refused"],
        "ended_with_other_weights": outcomes["different"],
    }
    if exhaustive:
        assert outcomes["refused"], "Trainer got better: say so where these figures are quoted"
