"""Monitor of each rank's memory, and the report out-of-memory-rankN.txt."""

import contextlib
import gc
import logging
import re
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.progress import Phase
from utils.callbacks.watchdog import LIBRARIES
from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError, OutOfMemoryError
from utils.host.atomic_files import replace_text
from utils.host.collectives import gathered
from utils.host.faults import innermost_frame, memory_cause, memory_owner
from utils.host.machine import global_rank, host_name, memory_kills, memory_room_bytes
from utils.host.run_lock import note_energy

logger = logging.getLogger(__name__)

GIB = 1024**3
# The function that summarizes a metric over ranks. Other metrics use the maximum.
REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "memory_free_gib": min, "memory_headroom_gib": min,
    "gpu_utilization": fmean, "gpu_power_w": fmean, "energy_kwh": sum,
}  # fmt: skip
# Names of phases in out-of-memory-rankN.txt and metrics.jsonl. FINISH mostly writes final/.
WORDS = {
    Phase.START: "load", Phase.LOAD: "load", Phase.FIRST_STEP: "train", Phase.TRAIN: "train",
    Phase.EVALUATE: "eval", Phase.SAVE: "save", Phase.FINISH: "save",
}  # fmt: skip
WEIGHTS, GRADIENTS, STATES, OTHERS = "weights", "gradients", "optimizer states", "other tensors"


class MemoryMonitor(TrainerCallback):
    """A monitor of each rank's memory in GiB, and of each GPU's utilization, power and energy.

    Device memory is the memory of torch's allocator. Host memory is the memory of this process
    without data workers. Each event `train`, `eval` or `save` of metrics.jsonl has the peak since
    the previous event. sequence_bytes: the predicted memory of one more sequence in the
    micro-batch. If it is unknown (0), no headroom is logged.
    """

    by_rank: Sequence[Mapping[str, Any]] = ()  # metrics of each rank at the last measurement
    # The training peak before an evaluation or a save, and the number of training logs so far.
    peak_bytes = logs = 0
    has_nvml = True  # until NVML fails
    energy_at_begin: float | None = None  # of this GPU; None if NVML does not count it

    def __init__(self, sequence_bytes: int = 0) -> None:
        self.sequence_bytes = sequence_bytes

    @override
    def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Read the energy counter. Reset the memory peak, so that it does not include loading."""
        self.device, self.rows = args.device, args.per_device_train_batch_size
        self._read_and_reset_peak()
        self.energy_at_begin = energy_kwh(self.device)

    def _read_and_reset_peak(self) -> int:
        """Return the peak in bytes of torch's allocator (0 on a CPU), then reset the peak."""
        if self.device.type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the training peak before an evaluation or a save resets it."""
        if control.should_evaluate or control.should_save:
            self.peak_bytes = max(self.peak_bytes, self._read_and_reset_peak())

    def metrics(self) -> dict[str, float]:
        """Return {name: value} of memory and GPU use since the last training log.

        A value is the maximum over ranks, or the minimum, mean or sum (see REDUCED). The second
        call logs the headroom. All ranks must call this.
        """
        self.measure(self.peak_bytes)
        self.peak_bytes, self.logs = 0, self.logs + 1
        if self.logs == 2 and self.sequence_bytes and self.device.type == "cuda":
            logger.info("memory: %s", self.headroom())  # later steps have the same peak
        names = [name for name in self.by_rank[0] if all(name in one for one in self.by_rank)]
        figures = {name: [one[name] for one in self.by_rank] for name in names}
        del figures["rank"], figures["host"]
        reduced = {name: REDUCED.get(name, max)(each) for name, each in figures.items()}
        if "energy_kwh" in reduced:
            note_energy(reduced["energy_kwh"])
        return reduced

    def measure(self, before: int = 0) -> Sequence[Mapping[str, Any]]:
        """Measure memory and GPU use; return a list with {name: value} of each rank.

        before: a peak in bytes from before the last reset, which this measurement must include. All
        ranks must call this.
        """
        peak_bytes = max(before, self._read_and_reset_peak())
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # may lag behind
        own = {"host_rss_gib": resident, "host_peak_rss_gib": max(peak, resident)}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            own |= {"memory_allocated_gib": torch.cuda.memory_allocated(self.device)}
            own |= {"memory_reserved_gib": reserved, "memory_peak_gib": peak_bytes}
            own |= {"memory_free_gib": free, "memory_total_gib": total}
            # CUDA itself and other processes use the rest.
            own["memory_headroom_gib"] = free + reserved - peak_bytes
        sizes = {name: size_bytes / GIB for name, size_bytes in own.items()} | self._gpu_use()
        if self.energy_at_begin is not None and (now := energy_kwh(self.device)) is not None:
            sizes["energy_kwh"] = now - self.energy_at_begin
        ranks = gathered((host_name(), sizes))
        self.by_rank = [
            {"rank": rank, "host": host, **sizes} for rank, (host, sizes) in enumerate(ranks)
        ]
        return self.by_rank

    def _gpu_use(self) -> dict[str, float]:
        """Return this GPU's gpu_utilization (0 to 1) and gpu_power_w over the last second.

        Return {} without a GPU or NVML. The driver measures both, so the GPU is not interrupted.
        """
        if self.device.type != "cuda" or not self.has_nvml:
            return {}
        try:
            busy, milliwatts = (
                torch.cuda.utilization(self.device),
                torch.cuda.power_draw(self.device),
            )
        except Exception as error:  # the package with NVML's own errors may be missing
            self.has_nvml = False
            logger.info("GPU utilization and power are not recorded: %s", error)
            return {}
        return {"gpu_utilization": busy / 100, "gpu_power_w": milliwatts / 1000}

    def headroom(self) -> str:
        """Return a text: the least memory left on a GPU, and the largest micro-batch that fits."""
        least = min(self.by_rank, key=lambda sizes: sizes["memory_headroom_gib"])
        room, total = least["memory_headroom_gib"], least["memory_total_gib"]
        fits = self.rows + max(int(room * GIB / (1.1 * self.sequence_bytes)), 0)  # 1.1: a margin
        fitting = f"{fits} would fit, " if fits > self.rows else ""
        where = f"{room:.1f} GiB of {total:.1f} on rank {least['rank']} ({least['host']})"
        return f"headroom {where}: micro-batch {fitting}{fits + 1} would not (predicted)"


def energy_kwh(device: torch.device) -> float | None:
    """Return the kWh that a GPU used since its driver was loaded; None if unknown."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 3.6e9  # of millijoules
    except Exception as error:  # no pynvml, an old GPU or driver, or a part of a GPU (MIG)
        logger.debug("the energy of this GPU is not recorded: %s", error)
        return None


def fullest_rank(line: Mapping[str, Any]) -> str:
    """Return a text that names the rank with the highest memory peak, such as " (rank 3 on n2)".

    Return "" if all ranks' peaks are within 10 %. line: an event of metrics.jsonl.
    """
    *_, last = ranks = sorted(line["memory_by_rank"], key=lambda one: one["memory_peak_gib"])
    differs = last["memory_peak_gib"] > 1.1 * ranks[0]["memory_peak_gib"]
    return f" (rank {last['rank']} on {last['host']})" if differs else ""


@contextlib.contextmanager
def memory_page(trainer: Any) -> Iterator[None]:
    """Write a report and raise OutOfMemoryError if memory runs out in the with block.

    The report is out-of-memory-rankN.txt. A data worker that the kernel kills for lack of memory
    counts as well.
    """
    kills = memory_kills()
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:  # libraries raise their own types for lack of memory
        # All data workers end now. torch's handler would raise an error here for each of them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        cause = memory_cause(error, killed=memory_kills() > kills)
        if cause is None:
            raise
        message = None
        with contextlib.suppress(Exception):  # writing may take too much memory
            message = write_memory_page(trainer, error, cause)
        if message is None:
            raise
        raise OutOfMemoryError(message) from None


def write_memory_page(trainer: Any, error: BaseException, cause: BaseException) -> str:
    """Write RUN/out-of-memory-rankN.txt; return the message for the user.

    error: the caught exception. cause: the out-of-memory exception, which is `error` itself or the
    exception that led to `error`.
    """
    progress, rank, owner = trainer.callbacks.progress, global_rank(), memory_owner(cause)
    phase, device = WORDS[progress.phase], trainer.args.device.type if owner == "GPU" else "cpu"
    where = innermost_frame(traceback.extract_tb(cause.__traceback__), LIBRARIES)
    asked = re.search(r"allocate ([\d.]+) ?(\w+)", str(cause))
    size = f"{asked[1]} {asked[2]}" if asked else "more"
    headline = f"{host_name()}: out of memory ({owner}), {phase}, step {progress.step}: "
    headline += f"cannot allocate {size} in {where}"
    page = trainer.checkpoints.output_dir / f"out-of-memory-rank{rank}.txt"
    parts, sizes = [headline], Counter[str]()

    def add(part: Callable[[], str]) -> None:
        try:
            parts.append(part())
            replace_text(page, "\n\n".join(parts))  # a launcher may end this process soon
        except Exception as failure:  # memory is short, and the disk may be full
            parts.append(f"(a part is missing: {failure!r})")

    if device == "cuda":
        dump, blocks = torch.cuda.memory._dump_snapshot, page.with_suffix(".pickle")
        add(lambda: dump(str(blocks)) or f"pytorch.org/memory_viz draws all blocks: {blocks.name}")
    savings = ["a smaller micro-batch"]

    def batch() -> str:
        model = f"{type(trainer.model).__name__} on {trainer.args.world_size} rank(s)"
        if progress.shape is not None:
            sequences, tokens = progress.shape
            model += f", {sequences} sequences x {tokens:,} tokens, "
            model += f"{int(progress.tokens.sum()):,} of them real"
        return model

    def advice() -> str:
        savings[:] = _savings(trainer, phase, device, sizes[OTHERS])
        return "\n  ".join(["what would help most", *savings[:3]])

    add(batch)
    add(lambda: _tensor_tables(trainer, device, sizes))
    add(advice)
    add(lambda: "".join(traceback.format_exception(error)))
    if rank == 0:
        event = {"event": "out_of_memory", "step": progress.step, "rank": rank}
        event |= {"host": host_name(), "phase": phase, "page": page.name}
        trainer.callbacks.journal.write(event)
    return f"{headline}\nwhat would help most: {savings[0]}\nwhat took it: {page}"


def _named_tensors(trainer: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield (tensor, kind, name) of all tensors: weights, gradients, optimizer states, others."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    for weight, name in names.items():
        yield weight, WEIGHTS, name
        yield weight.grad, GRADIENTS, f"gradient of {name}"
    for weight, states in getattr(trainer.optimizer, "state", {}).items():
        for state, value in states.items():
            yield value, STATES, f"{state} of {names.get(weight, 'a weight')}"
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):
            yield value, OTHERS, f"result of {value.grad_fn.name()}" if value.grad_fn else "unnamed"


def _tensor_tables(trainer: Any, device: str, sizes: Counter[str]) -> str:
    """Return two tables as text: the memory of each kind of tensors, and the largest tensors.

    Adds the bytes of each kind to `sizes`.
    """
    found: dict[int, tuple[int, str, str]] = {}  # by address
    for value, kind, name in _named_tensors(trainer):
        with contextlib.suppress(AttributeError, RuntimeError):  # not a tensor, or without data
            local = getattr(value, "_local_tensor", value)  # under FSDP2 this rank's rows
            storage = local.untyped_storage()
            if local.device.type == device and (address := storage.data_ptr()):
                text = f"{str(local.dtype)[6:]} {tuple(local.shape)}  {name}"
                found.setdefault(address, (storage.nbytes(), kind, text))
    if device == "cuda":
        for block in [one for each in torch.cuda.memory_snapshot() for one in each["blocks"]]:
            if block["state"] == "active_allocated":
                kept = (block["size"], OTHERS, "kept for the backward pass, or by a library")
                found.setdefault(block["address"], kept)
        (free, total), reserved = torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
        rest = {"reserved by torch, not in use": reserved - torch.cuda.memory_allocated()}
        rest |= {"other processes, CUDA itself": total - free - reserved, "free": free}
    else:
        rest = {"this process, resident": psutil.Process().memory_info().rss}
        if workers := psutil.Process().children(recursive=True):
            rest[f"its {len(workers)} workers"] = sum(each.memory_info().rss for each in workers)
        rest["left of the host, or of the job's limit"] = memory_room_bytes()
    for size, kind, _ in found.values():
        sizes[kind] += size
    largest = [(text, size) for size, _, text in sorted(found.values(), reverse=True)]
    tables = ([*sizes.items(), *rest.items()], largest[:10])
    lines = ["\n".join(f"{readable(size):>12}  {name}" for name, size in rows) for rows in tables]
    return "\n\nthe largest tensors\n".join(lines)


def _savings(trainer: Any, phase: str, device: str, others: int) -> list[str]:
    """Return texts with changes of settings that would save memory, largest saving first.

    phase: load, train, eval or save. others: the bytes of tensors that are not weights, gradients
    or optimizer states. These bytes give the estimate for an evaluation.
    """
    args, plan, lines = trainer.args, trainer.memory, []
    if phase == "eval" and (rows := args.per_device_eval_batch_size) > 1:
        less = readable(others * (rows - rows // 2) // rows)
        lines = [f"--per_device_eval_batch_size {rows // 2}: about {less} less"]
    elif phase == "train" and device == args.device.type:
        rows, own = args.per_device_train_batch_size, plan.predicted_bytes[plan.choice]
        predicted = plan.predicted_bytes.items()
        changes = {f"--activation_checkpointing {name}": size for name, size in predicted}
        for fewer in range(1, rows):
            if rows % fewer == 0:  # the global batch stays
                size = own - (rows - fewer) * plan.sequence_bytes
                changes[f"--per_device_train_batch_size {fewer}"] = size
        if args.world_size > 1 and not trainer.is_fsdp_enabled:
            changes["strategy: fsdp2 (a new run)"] = plan.sharded_bytes
        for ranks, size in plan.context_bytes.items():
            changes[f"--context_parallel {ranks}"] = size
        now = f"(predicted; now {readable(own)})"
        best = sorted((size, change) for change, size in changes.items() if size < own)
        lines = [f"{change}: {readable(size)} {now}" for size, change in best]
    if device == "cpu":
        if trainer.checkpoints.background is not None:
            lines.append("--async_save false: no checkpoint is staged in the node's memory")
        if workers := args.dataloader_num_workers:
            lines.append(f"--dataloader_num_workers {workers // 2}: each is a process")
        lines.append("more memory for the job: sbatch --mem, ulimit -v")
    wider = "more GPUs" if trainer.is_fsdp_enabled else "more GPUs with strategy: fsdp2"
    return [*lines, f"{wider}, a shorter sequence_length (docs/faq.md)"]
