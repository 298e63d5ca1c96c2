"""A guard that ends a run, with a report, at a NaN, an infinity or a loss spike."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.checkpoints.discovery import numbered_checkpoints
from utils.config.errors import NotFiniteError, SpikeError
from utils.data.loader import TrainLoader
from utils.host.atomic_files import replace_text
from utils.host.collectives import AsyncMax, gathered, on_rank_0
from utils.host.journal_file import strict_json
from utils.host.spikes import WINDOW, Spike, next_commands, spikes_in

LISTED_DOCUMENTS = 4  # documents in the message; nonfinite-step-N.json lists all


@dataclass(frozen=True)
class FaultyStep:
    """Non-finite losses, gradient norm and weights of a rank in one step, or a loss spike.

    Steps are counted from 0.
    """

    rank: int
    step: int
    losses: dict[int, float] = field(default_factory=dict)  # by index of the micro-batch
    gradient_norm: float | None = None
    weights: tuple[str, ...] = ()  # names
    spike: Spike | None = None  # of the logged loss, which is finite


class NonFiniteGuard(TrainerCallback):
    """A guard that ends the run when a loss or gradient of any rank is NaN or infinite.

    The trainer calls `take_loss` with each micro-batch's loss, `take_step` with each step's
    gradient norm, and `settle` before an evaluation or a save. Losses and norms are copied to the
    host asynchronously, and the ranks exchange their findings one step later, so no step waits.

    checks_gradients: whether gradient norms are checked. False if a loss scaler (fp16) handles
    overflow of gradients. context_parallel: the number of ranks that share a micro-batch. on_spike:
    "stop" means that the run also ends when rank 0 finds a spike in the logged loss.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], context_parallel: int = 1, on_spike: str = "none"
    ):
        self.output_dir, self.context_parallel = Path(output_dir), context_parallel
        self.on_spike = on_spike
        self.checks_gradients = True
        self.agreement: AsyncMax | None = None  # while training
        self.losses: list[torch.Tensor] = []  # of the current step
        # Copies from the device: the step, its losses and gradient norm (float32), and the event
        # after which the copy is complete (None on a CPU).
        self.pending: list[tuple[int, torch.Tensor, torch.cuda.Event | None]] = []
        self.findings: list[FaultyStep] = []  # of this rank

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.rank, self.device = args.process_index, args.device
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.last_step = state.global_step - 1
        self.agreement = AsyncMax(args.ddp_timeout)

    def take_loss(self, loss: torch.Tensor) -> None:
        """Store a copy of a micro-batch's loss."""
        # A compiled model may reuse the memory of its output.
        self.losses.append(loss.detach().float().clone())

    def take_step(self, step: int, gradient_norm: torch.Tensor | float | None) -> None:
        """Start to copy a step's losses and gradient norm to the host. Steps begin at 0."""
        if not self.losses:
            return  # at the end of an epoch Trainer calls again for the same step
        norm = gradient_norm if self.checks_gradients and gradient_norm is not None else 0.0
        if hasattr(norm, "full_tensor"):  # FSDP2: sum over ranks here, on the device
            norm = norm.full_tensor()
        figures = [
            torch.as_tensor(figure, device=self.device).float().reshape(())
            for figure in (*self.losses, norm)
        ]
        values, self.losses = torch.stack(figures), []
        values = values.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self.pending.append((step, values, ready))

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Raise NotFiniteError or SpikeError if any rank found a fault in an earlier step."""
        assert self.agreement is not None, "on_train_begin comes first"
        self._read(wait=False)
        if self.agreement.result():
            self.settle()
        self.agreement.begin_turn(int(bool(self.findings)))

    def settle(self, model: nn.Module | None = None) -> None:
        """Check the losses and gradient norms of all steps so far, and the weights of a `model`.

        Raises NotFiniteError or SpikeError on all ranks if any rank found a NaN, an infinity or a
        loss spike. Waits for the device. All ranks must call this.
        """
        if self.agreement is None:
            return  # training has ended, and all steps are checked
        self._read(wait=True)
        weights = [] if model is None else nonfinite_weights(model)
        if weights and not self.findings:
            self.findings.append(FaultyStep(self.rank, self.last_step, weights=tuple(weights)))
        group = self.agreement.group
        found = [finding for findings in gathered(self.findings, group) for finding in findings]
        spikes = [finding.spike for finding in found if finding.spike]
        if len(spikes) == len(found) > 0:
            saved = [step for step, _ in numbered_checkpoints(self.output_dir)]
            commands = next_commands(self.output_dir, spikes[0], saved)
            raise SpikeError(f"{spikes[0]}\n{commands}\nto train past it: --on_spike none")
        if found:
            facts = found, self.loader, self.output_dir, self.context_parallel
            raise NotFiniteError(on_rank_0(lambda: write_step_report(*facts), group))

    def _read(self, wait: bool) -> None:
        while self.pending:
            step, values, ready = self.pending[0]
            if ready is not None and wait:
                ready.synchronize()
            if ready is not None and not ready.query():
                return
            del self.pending[0]
            self.last_step = step
            *losses, norm = values.tolist()
            faulty = {index: loss for index, loss in enumerate(losses) if not math.isfinite(loss)}
            wrong_norm = not math.isfinite(norm) or norm < 0  # DeepSpeed's norm of NaN is -1
            if faulty or wrong_norm:
                finding = FaultyStep(self.rank, step, faulty, norm if wrong_norm else None)
                self.findings.append(finding)

    @override
    def on_log(self, args: Any, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        """Store a finding on rank 0 if the logged loss is a spike.

        The logged loss is compared with the losses in earlier logs, including logs before a resume.
        """
        if self.on_spike == "none" or "loss" not in logs or self.rank:
            return
        newest = (line for line in reversed(state.log_history) if "loss" in line)
        found = spikes_in([*islice(newest, WINDOW + 2)][::-1])
        if found and found[-1].last_step == state.global_step:
            self.findings.append(FaultyStep(self.rank, state.global_step - 1, spike=found[-1]))

    @override
    def on_epoch_end(self, *_: Any, **kwargs: Any) -> None:
        """Check the last steps and the weights for NaN and infinity before the model's export."""
        self.settle(kwargs["model"])

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Return the names of trained parameters with a NaN or infinity on this rank. One GPU sync."""
    names, largest = [], []
    for name, parameter in model.named_parameters():
        part: Any = parameter
        if hasattr(part, "ds_tensor"):  # DeepSpeed ZeRO-3's shard; the parameter itself is empty
            part = part.ds_tensor
        elif hasattr(part, "to_local"):
            part = part.to_local()
        if parameter.requires_grad and part.numel():
            names.append(name.removeprefix("module."))
            # The largest absolute value: NaN if an element is NaN, computed without a large buffer.
            largest.append(torch.linalg.vector_norm(part.detach(), math.inf).float())
    if not largest:
        return []
    finite = torch.stack([value.to(largest[0].device) for value in largest]).isfinite().tolist()
    return [name for name, good in zip(names, finite, strict=True) if not good]


def write_step_report(
    found: Sequence[FaultyStep], loader: TrainLoader, run: Path, context_parallel: int = 1
) -> str:
    """Write nonfinite-step-N.json about the earliest step in `found`; return the error message.

    `found`: the findings of all ranks. The file lists the documents of the micro-batches with a NaN
    or infinite loss. If all losses are finite, the file lists the documents of the global batch.
    `context_parallel`: the number of ranks that share a micro-batch.
    """
    found = [finding for finding in found if finding.spike is None]
    step = min(finding.step for finding in found)
    found = [finding for finding in found if finding.step == step]
    losses: list[dict[str, Any]] = [
        {"rank": one.rank, "micro_batch": micro_batch, "loss": loss}
        for one in found
        for micro_batch, loss in one.losses.items()
    ]
    norm = next((one.gradient_norm for one in found if one.gradient_norm is not None), None)
    weights = sorted({name for one in found for name in one.weights})
    causes = [
        f"the loss of rank {one['rank']} in micro-batch {one['micro_batch'] + 1} is {one['loss']}"
        for one in losses
    ]
    causes += [] if norm is None else [f"the gradient norm is not finite ({norm})"]
    causes += [f"the weight {name} is not finite, its update overflowed" for name in weights]
    more = f", and {len(causes) - 1} more are not finite" if len(causes) > 1 else ""
    sampler = loader.batch_sampler
    sequences, of_what = sampler.sequences_of_step(step), "the global batch"
    if losses:
        by_rank = sequences.reshape(sampler.accumulation_at(step), -1, sampler.micro_batch_size)
        places = [(loss["micro_batch"], loss["rank"] // context_parallel) for loss in losses]
        sequences = np.concatenate([by_rank[place] for place in dict.fromkeys(places)])
        of_what = "the micro-batches"
    parts = loader.dataset.documents_in(sequences)
    facts = {
        "step": step + 1, "losses": losses, "gradient_norm": norm, "weights": weights,
        "documents_of": of_what, "documents": [part._asdict() for part in parts],
    }  # fmt: skip
    documents = sorted({(part.dataset, part.document) for part in parts})
    named = ", ".join(
        f"{document} of {dataset}" for dataset, document in documents[:LISTED_DOCUMENTS]
    )
    named += ", ..." if documents[LISTED_DOCUMENTS:] else ""
    path = run / f"nonfinite-step-{step + 1}.json"
    try:
        replace_text(path, strict_json(facts, indent=1) + "\n")
        where = f"all of them: {path}"
    except OSError as error:  # the user needs the message even without the file
        where = f"the list of all could not be written: {error}"
    return (
        f"step {step + 1}: {causes[0]}{more}.\n"
        f"documents of {of_what}: {named} ({where})\n"
        "Nothing of this step was saved or exported. The same command meets the same batch again. "
        f"Its documents: python status.py {shlex.quote(str(run))} --step {step + 1}. Leave some "
        "out (--skip_documents FILE --accept_changes skip_documents), or repair them (then add "
        "--accept_changes train_data). If the losses rose before, lower --learning_rate or clip "
        "more (--max_grad_norm, where 0 clips nothing)."
    )
