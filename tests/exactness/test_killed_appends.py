"""`prepare_data.py --append` is killed at each call that changes the dataset, or its disk refuses.

The dataset then has its old or its new documents, and a run that began before finds its own. The
same command ends with the bytes that an undisturbed append leaves.
"""

import collections
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from kernel_calls import KILL, RECORDING, Call, Ending, Starts, changes_below, hit
from kill_scenes import sample

from utils.config.errors import ExitCode
from utils.data.token_dataset import open_token_dataset
from utils.prepare.workspace import foreign_files

pytestmark = pytest.mark.slow

SAMPLED = 12


@dataclass
class Appends:
    """A dataset in `prepared`, and an append to a copy of it that should end like `whole`."""

    starts: Starts
    source: Path
    prepared: Path
    whole: Path

    def start(self, out: Path, strace: list[str] | None = None) -> Ending:
        argv = ["--output_dir", str(out), "--sources", str(self.source), "--append", "true"]
        return self.starts.run("prepare", argv, strace=strace)

    def disturbed_at(self, call: Call, out: Path, what: str) -> Ending:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.prepared, out)
        ending = self.start(out, call.injecting(out, what))
        assert hit(call, out, ending), f"{call} was missed: {ending}"
        return ending

    def faults(self, out: Path) -> list[str]:
        """Return what is wrong with a disturbed append, and with its repetition."""
        old, new = (open_token_dataset(each).description for each in (self.prepared, self.whole))
        found = []
        holds = open_token_dataset(out).description.fingerprint
        if holds not in (old.fingerprint, new.fingerprint):
            found.append("neither the old nor the new documents")
        for _ in range(2):
            kept = open_token_dataset(out, known=[old.fingerprint]).description
            if kept.statistics != old.statistics or kept.files != old.files:
                found.append("a run that began before has other documents")
            again = self.start(out)
            if again.exit_code != ExitCode.DONE:
                found.append(f"the same command failed: {again.output[-2000:]}")
        if foreign := foreign_files(out):
            found.append(f"--overwrite would be refused because of {foreign}")
        different = {name for name, _ in content(out) ^ content(self.whole)}
        return found + [f"{name} differs" for name in sorted(different)]


def content(out: Path) -> set[tuple[str, bytes]]:
    """Return names and bytes of a dataset's files, without times and temporary files of kills."""
    files = [file for file in out.rglob("*") if file.is_file() and file.suffix != ".tmp"]
    found = {str(file.relative_to(out)): file.read_bytes() for file in files}
    for name in [name for name in found if name.endswith("stoker.json")]:
        found[name] = json.dumps(json.loads(found[name]) | {"modified_ns": None}).encode()
    return {*found.items()}


@pytest.fixture(scope="module")
def appends(tmp_path_factory) -> Appends:
    place = tmp_path_factory.mktemp("appends")
    sources = []
    for seed in (5, 6):
        rows = [" ".join(tiny.WORDS[token] for token in each) for each in tiny.documents(80, seed)]
        sources.append(place / f"{seed}.jsonl")
        sources[-1].write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    made = Appends(Starts(place), sources[1], place / "prepared", place / "out")
    tokenizer = tiny.make_tokenizer(place / "tokenizer")
    first = ["--sources", str(sources[0]), "--tokenizer_name_or_path", str(tokenizer)]
    ending = made.starts.run("prepare", ["--output_dir", str(made.prepared), *first])
    assert ending.exit_code == ExitCode.DONE, ending.output
    shutil.copytree(made.prepared, made.whole)
    return made


@pytest.fixture(scope="module")
def calls(appends) -> list[Call]:
    """Return the calls of an undisturbed append, whose dataset stays as `appends.whole`.

    The names of disturbed copies are that of the first, because stoker.json has digests of paths.
    """
    out = appends.whole
    ending = appends.start(out, [*RECORDING])
    assert ending.exit_code == ExitCode.DONE, ending.output
    found = changes_below(out, ending.trace)
    appends.whole = out.rename(out.with_name("whole"))
    return found


def test_an_append_that_is_killed_at_any_call_is_finished_by_the_same_command(
    appends, calls, exhaustive, figures
):
    chosen, wrong = calls if exhaustive else sample(calls, SAMPLED), []
    out = appends.whole.with_name("out")
    for call in chosen:
        appends.disturbed_at(call, out, KILL)
        wrong += [f"{call}: {line}" for line in appends.faults(out)]
    kinds = collections.Counter(call.name for call in calls)
    figures("kill_points")["append"] = {
        "points": len(calls), "tried": len(chosen), "survived": len(chosen) - len(wrong),
        "calls": dict(sorted(kinds.items())),
    }  # fmt: skip
    assert not wrong
    assert {"mkdir", "openat", "write", "rename"} <= set(kinds)


def test_a_disk_that_is_full_at_any_call_ends_an_append_with_74(appends, calls, exhaustive):
    """The call fails as on a full disk. The same command then ends it, once there is room."""
    cases = [call for call in calls if call.name in ("write", "openat", "mkdir", "rename")]
    out, wrong = appends.whole.with_name("out"), []
    for call in cases if exhaustive else sample(cases, SAMPLED // 2):
        ending = appends.disturbed_at(call, out, "ENOSPC")
        if ending.exit_code not in (ExitCode.DONE, ExitCode.STORAGE):
            wrong.append(f"{call}: {ending.exit_code} {ending.output[-2000:]}")
        wrong += [f"{call}: {line}" for line in appends.faults(out)]
    assert not wrong
