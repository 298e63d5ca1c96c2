"""A check after a resume on other nodes: repeated steps must give matching losses and norms."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.journal import Journal
from utils.checkpoints.discovery import DAMAGED, set_aside
from utils.checkpoints.record import RunRecord
from utils.config.errors import UnfitClusterError
from utils.host.collectives import on_rank_0
from utils.host.journal_file import STARTS
from utils.launch.ledger import Fault, record_faults

logger = logging.getLogger(__name__)

# (metric, share, least): the metric's values in two logs of one step may differ by this share of
# the larger value, or by `least`. If all bits must be equal, these limits are not used. In
# benchmarks/results, other numbers of ranks change losses by 1e-5 (exactness/world_sizes.json), and
# training in 8 bits changes losses by at most 3.5 % (gpu/fp8.json). The gradient norm of a single
# step amplifies earlier differences, so one value may be three times the other.
LIMITS = (("loss", 0.1, 0.02), ("grad_norm", 2 / 3, 0.02))
# Changes of these settings or inputs change only the last bits of losses and gradient norms.
BIT_LEVEL_CHANGES = {
    "environment",
    "eval_data",
    "per_device_train_batch_size",
    "strategy",
    "versions",
}
# Fields of `launch` in provenance.json. If one of them changes, a resume cannot repeat all bits.
LAUNCH_FIELDS = "strategy", "world_size", "replicas", "devices", "cpu"
LoggedValues = Mapping[
    str, Any
]  # a line of metrics.jsonl, or an element of `starts` in provenance.json


class ResumeCheck(TrainerCallback):
    """A callback that compares the first `count` logs after a resume with the earlier nodes' logs.

    If the run ended some steps after its last checkpoint, the resumed run repeats these steps, and
    `journal` has the earlier logs of these steps. deterministic: true if full_determinism is on
    """

    def __init__(self, count: int, deterministic: bool, journal: Journal):
        self.count, self.deterministic, self.journal = count, deterministic, journal
        self.due: list[int] = []  # steps to compare, on all ranks

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Set `due`, the steps whose new logs are compared with earlier logs.

        After a resume, all ranks must call this.
        """
        self.resumed_at = state.global_step
        lines, self.journal.earlier = self.journal.earlier, []
        if self.count and self.resumed_at:
            self.due = on_rank_0(lambda: self._steps_to_compare(lines))

    def _steps_to_compare(self, lines: Sequence[LoggedValues]) -> list[int]:
        try:
            *starts, self.new_start = RunRecord(self.journal.path.parent).starts
            index, self.logs = logs_after(self.resumed_at, lines, starts)
            if not self.logs:
                return []
            self.old_start, later = starts[index], [*starts[index + 1 :], self.new_start]
            launches = [start["launch"] for start in (self.old_start, self.new_start)]
            gpus = [{(host, gpu) for host, gpu in launch["gpus"]} for launch in launches]
            self.suspects = sorted(gpus[0] ^ gpus[1])
            alike = all(launches[0].get(name) == launches[1].get(name) for name in LAUNCH_FIELDS)
            altered = {name for start in later for name in start.get("altered") or ()}
            self.exact = self.deterministic and alike and not altered
            if self.suspects and not altered <= BIT_LEVEL_CHANGES:
                changed = ", ".join(sorted(altered - BIT_LEVEL_CHANGES))
                logger.info("resume check: left out, changed: %s", changed)
            elif self.suspects:
                due = sorted(self.logs)[: self.count]
                self.repeated = logs_by_host(
                    due, lines, [*starts, self.new_start], skipped_start=index
                )
                return due
        except Exception as error:  # a record that is damaged or of an older version
            logger.warning("resume check: left out, provenance.json lacks: %r", error)
        return []

    @override
    def on_log(self, args: Any, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        """Compare a training log if its step is in `due`. All ranks call this at these steps."""
        step = state.global_step
        if step in self.due and "loss" in logs:
            on_rank_0(lambda: self._compare(step, logs))

    def _compare(self, step: int, logs: LoggedValues) -> None:
        """Compare the earlier log of a step with the new log (`logs`); log that the nodes agree.

        If the logs differ, rename the checkpoints since the resume and raise UnfitClusterError.
        """
        starts = self.old_start, self.new_start
        old, new = (", ".join(start["launch"]["hosts"]) for start in starts)
        text = difference(self.logs[step], logs, self.exact)
        if not text:
            logger.info(
                "resume check: step %d is as on %s. The run repeats this step anyway", step, old
            )
            return
        checkpoints = self.journal.checkpoints
        checkpoints.finish()
        saved = [checkpoints.directory(save.step) for save in checkpoints.saves]
        for path in filter(Path.is_dir, saved):
            logger.warning("%s may be wrong: set aside as %s", path, set_aside(path, DAMAGED))
        cause = f"step {step}: {text}, first on {old}, then on {new}"
        faults = {host: Fault(host, "mismatch", cause, gpu) for host, gpu in self.suspects}
        agreeing = [
            hosts for at, hosts, log in self.repeated
            if at == step and hosts != new and not difference(log, logs, self.exact)
        ]  # fmt: skip
        checkpoint = f"checkpoint-{self.resumed_at}"
        if agreeing:
            message = (
                f"{cause}. {agreeing[0]} computed it as {new} does, so {old} was wrong, and "
                f"{checkpoint} may be: resume from an earlier checkpoint, or with "
                "--verify_resume_steps 0 from this one."
            )
            faults = {host: fault for host, fault in faults.items() if host in old.split(", ")}
        else:
            message = (
                f"{cause}. One of these nodes computes wrong. Submit the same command again with "
                f"--exclude={','.join(faults)}. If a third node agrees with {old}, the run goes "
                f"on, and {new} was wrong. If not, {old} was, and so may be {checkpoint}. "
                "--verify_resume_steps 0 resumes without this check."
            )
        raise UnfitClusterError([message, *filter(None, [record_faults(faults.values())])])


def logs_after(
    step: int, lines: Iterable[LoggedValues], starts: Sequence[LoggedValues]
) -> tuple[int, dict[int, LoggedValues]]:
    """Return (index, logs) of the first start that logged steps after `step`.

    A start is one execution of the script. index: the index of the start in `starts`. logs: {step:
    line of metrics.jsonl}. step: the step of a checkpoint. lines: the lines of metrics.jsonl.
    starts: the starts in provenance.json.

    A log is left out if the run later resumed from a step before `step`. The run then trained up to
    `step` again, and the checkpoint has the weights of this second time. A log is also left out if
    its start is missing in `starts`, because its nodes are unknown. This occurs if a checkpoint was
    adopted from another directory: metrics.jsonl has the logs of all starts, but provenance.json
    has only the starts until the checkpoint's save.
    """
    logs: dict[int, LoggedValues] = {}
    began = [datetime.fromisoformat(start["time"]).timestamp() for start in starts]
    current, counts = 0, False
    for line in lines:
        if line["event"] in STARTS:
            if line["event"] == "started" or line["step"] < step:
                logs = {}
            if logs:
                counts = False
                continue
            # Times in provenance.json are whole seconds.
            before, current = current, sum(at <= line["time"] + 1 for at in began)
            counts = current > before
        elif line["event"] == "train" and line["step"] > step and counts:
            logs[line["step"]] = line
    return current - 1, logs


def logs_by_host(
    steps: Sequence[int],
    lines: Iterable[LoggedValues],
    starts: Sequence[LoggedValues],
    skipped_start: int,
) -> list[tuple[int, str, LoggedValues]]:
    """Return the logs of `steps` from all starts except the start with index `skipped_start`.

    The result is a list of (step, host names, log). lines, starts: see `logs_after`
    """
    began = [datetime.fromisoformat(start["time"]).timestamp() for start in starts]
    found, index = [], skipped_start
    for line in lines:
        if line["event"] in STARTS:
            index = sum(at <= line["time"] + 1 for at in began) - 1
        elif (
            line["event"] == "train" and line["step"] in steps and index not in (-1, skipped_start)
        ):
            hosts = (starts[index].get("launch") or {}).get("hosts") or ["an unknown node"]
            found.append((line["step"], ", ".join(hosts), line))
    return found


def difference(old: LoggedValues, new: LoggedValues, exact: bool) -> str:
    """Return a text about metrics that differ too much between two logs of a step, or "".

    exact: true if any difference is too much
    """
    texts = []
    for name, share, least in LIMITS:
        if name in old and name in new:
            then, now = old[name], new[name]
            limit = 0.0 if exact else max(share * max(abs(then), abs(now)), least)
            if math.isfinite(then) and math.isfinite(now):
                differs = abs(now - then) > limit
            else:  # a loss scaler (fp16) skips steps with an infinite norm
                differs = name == "loss" and math.isfinite(then)
            if differs:
                texts.append(f"{name} {then!r} and {now!r}")
    return ", ".join(texts)
