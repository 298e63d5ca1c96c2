"""The page of a run that ran out of GPU or host memory: what uses it, and what would help."""

import contextlib
import gc
import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import torch

from utils.callbacks.hang_page import LIBRARIES
from utils.callbacks.progress import Phase, Progress
from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError, OutOfMemoryError
from utils.host.atomic_files import replace_text
from utils.host.faults import memory_cause, memory_owner, place
from utils.host.machine import global_rank, host_name, memory_kills, memory_room_bytes

# Names of phases on the page and in metrics.jsonl. To finish a run is mostly to write final/.
WORDS = {
    Phase.START: "load", Phase.LOAD: "load", Phase.FIRST_STEP: "train", Phase.TRAIN: "train",
    Phase.EVALUATE: "eval", Phase.SAVE: "save", Phase.FINISH: "save",
}  # fmt: skip
WEIGHTS, GRADIENTS, STATES, OTHERS = "weights", "gradients", "optimizer states", "other tensors"


@contextlib.contextmanager
def memory_page(trainer: Any) -> Iterator[None]:
    """Write the page and raise OutOfMemoryError if the trainer runs out of memory in this block.

    A helper process that the kernel kills for lack of memory counts as well.
    """
    kills = memory_kills()
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        # All data workers end now. torch's handler would raise an error in this process for each.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        cause = memory_cause(error, killed=memory_kills() > kills)
        if cause is None:
            raise
        last_words = None
        with contextlib.suppress(Exception):  # even the page may take too much memory
            last_words = write_page(trainer, error, cause)
        if last_words is None:
            raise
        raise OutOfMemoryError(last_words) from None


def write_page(trainer: Any, error: BaseException, cause: BaseException) -> str:
    """Write RUN/out-of-memory-rankN.txt and return the message for the user.

    Clears the frames of the tracebacks, which hold tensors.
    """
    progress, rank, owner = trainer.callbacks.progress, global_rank(), memory_owner(cause)
    phase = WORDS[progress.phase]
    where = place(traceback.extract_tb(cause.__traceback__), LIBRARIES)
    words = f"{host_name()}: out of memory ({owner}), {phase}, step {progress.step}: "
    words += f"cannot allocate {_asked_for(cause)} in {where}"
    page = trainer.checkpoints.output_dir / f"out-of-memory-rank{rank}.txt"
    device, sizes = "cpu" if owner == "host" else trainer.args.device.type, Counter[str]()
    parts, trace = [words], "".join(traceback.format_exception(error))

    def add(part: Callable[..., str], *args: Any) -> None:
        try:
            parts.append(part(*args))
            replace_text(page, "\n\n".join(parts))  # a launcher may end this process soon
        except Exception as failure:  # memory is short, and the disk may be full
            parts.append(f"(a part is missing: {failure!r})")

    if device == "cuda":
        dump, blocks = torch.cuda.memory._dump_snapshot, page.with_suffix(".pickle")
        add(lambda: dump(str(blocks)) or f"pytorch.org/memory_viz draws all blocks: {blocks.name}")
    add(_batch, trainer, progress)
    tracebacks = [each.__traceback__ for each in dict.fromkeys((error, cause))]
    frames = [pair for each in tracebacks for pair in traceback.walk_tb(each)][::-1]
    add(_tensors, _named(trainer, frames), device, sizes)
    frames.clear()
    for each in tracebacks:
        traceback.clear_frames(each)
    add(_what_helps, trainer, phase, device, sizes[OTHERS])
    first = parts[-1].splitlines()[:2][-1].strip()
    add(str, trace)
    if rank == 0:
        event = {"event": "out_of_memory", "step": progress.step, "rank": rank}
        event |= {"host": host_name(), "phase": phase, "page": page.name}
        trainer.callbacks.journal.write(event)
    return f"{words}\nwhat would help most: {first}\nwhat took it: {page}"


def _asked_for(cause: BaseException) -> str:
    """Return the size of the allocation that failed, or "more"."""
    asked = re.search(r"allocate ([\d.]+) ?(\w+)", str(cause))
    if asked is None:
        return "more"
    return readable(int(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"


def _batch(trainer: Any, progress: Progress) -> str:
    model = f"{type(trainer.model).__name__} on {trainer.args.world_size} rank(s)"
    if progress.shape is None or progress.tokens is None:
        return model
    sequences, tokens = progress.shape
    real = int(progress.tokens.sum())
    return f"{model}, {sequences} sequences x {tokens:,} tokens, {real:,} of them real"


def _named(trainer: Any, frames: list[tuple[FrameType, int]]) -> Iterator[tuple[Any, str, str]]:
    """Yield (value, kind, origin) of all values that may be tensors, those with names first."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    for weight, name in names.items():
        yield weight, WEIGHTS, name
        yield weight.grad, GRADIENTS, f"gradient of {name}"
    for weight, states in getattr(trainer.optimizer, "state", {}).items():
        for name, state in states.items():
            yield state, STATES, f"{name} of {names.get(weight, 'a weight')}"
    for frame, line in frames:
        for name, value in [*frame.f_locals.items()]:
            yield value, OTHERS, f"{name} in {frame.f_code.co_qualname}, line {line}"
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            yield each, OTHERS, each.grad_fn.name() if each.grad_fn else "held elsewhere"


def _tensors(named: Iterator[tuple[Any, str, str]], device: str, sizes: Counter[str]) -> str:
    """Return tables of memory by kind and of the largest tensors; add bytes by kind to `sizes`."""
    found: dict[int, tuple[int, str, str]] = {}  # by address
    for value, kind, origin in named:
        with contextlib.suppress(AttributeError, RuntimeError):  # not a tensor, or without data
            local = getattr(value, "_local_tensor", value)  # under FSDP2 this rank's rows
            storage = local.untyped_storage()
            if local.device.type == device and (address := storage.data_ptr()):
                text = f"{str(local.dtype)[6:]} {tuple(local.shape)}  {origin}"
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
        workers = psutil.Process().children(recursive=True)
        if workers:
            rest[f"its {len(workers)} workers"] = sum(each.memory_info().rss for each in workers)
        rest["left of the host, or of the job's limit"] = memory_room_bytes()
    for size, kind, _ in found.values():
        sizes[kind] += size
    largest = [(text, size) for size, _, text in sorted(found.values(), reverse=True)]
    tables = (list((sizes | rest).items()), largest[:10])
    lines = ["\n".join(f"{readable(size):>12}  {name}" for name, size in rows) for rows in tables]
    return "\n\nthe largest tensors\n".join(lines)


def _what_helps(trainer: Any, phase: str, device: str, others: int) -> str:
    """Return the changes of settings that would save most memory.

    In training the savings are those predicted at the start. In an evaluation they are a share of
    `others`, the bytes of tensors that are no weights, gradients or optimizer states.
    """
    args, plan, on_host, lines = trainer.args, trainer.memory, device == "cpu", []
    if phase == "eval" and (rows := args.per_device_eval_batch_size) > 1:
        less = readable(others * (rows - rows // 2) // rows)
        lines = [f"--per_device_eval_batch_size {rows // 2}: about {less} less"]
    elif phase == "train" and device == args.device.type:
        rows, own = args.per_device_train_batch_size, plan.predicted_bytes[plan.choice]
        predicted, smaller = plan.predicted_bytes.items(), range(1, rows)
        changes = {f"--activation_checkpointing {name}": size for name, size in predicted}
        for fewer in [size for size in smaller if rows % size == 0]:  # the global batch stays
            size = own - (rows - fewer) * plan.sequence_bytes
            changes[f"--per_device_train_batch_size {fewer}"] = size
        if args.world_size > 1 and not trainer.is_fsdp_enabled:
            changes["strategy: fsdp2 (a new run)"] = plan.sharded_bytes
        best = sorted((size, change) for change, size in changes.items() if size < own)
        now = f"(predicted; now {readable(own)})"
        lines = [f"{change}: {readable(size)} {now}" for size, change in best]
    if on_host and trainer.checkpoints.background is not None:
        lines.append("--async_save false: no checkpoint is staged in the node's memory")
    if on_host and (workers := args.dataloader_num_workers):
        lines.append(f"--dataloader_num_workers {workers // 2}: each is a process")
    lines += ["more memory for the job: sbatch --mem, ulimit -v"] * on_host
    wider = "more GPUs" if trainer.is_fsdp_enabled else "more GPUs with strategy: fsdp2"
    lines.append(f"{wider}, a shorter sequence_length (docs/faq.md)")
    return "\n  ".join(["what would help most", *lines[:3]])
