"""Memory that ran out, of a GPU or the host: a page tells what took it and what would help."""

import gc
import re
import traceback
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from transformers import Trainer

from utils.callbacks.watchdog import LIBRARIES
from utils.checkpoints.files import readable
from utils.support.files import replace_text
from utils.support.host import global_rank, host_name, memory_room_bytes
from utils.support.notes import last_line, place
from utils.support.redaction import redact

# By functions of ours in the traceback; without any of them it is training.
PHASES = {"evaluate": "eval", "_save_checkpoint": "save", "finish": "save", "export_final": "save"}
KINDS = ("weights", "gradients", "optimizer states", "other tensors")
SHOWN, HELP = 10, 3  # tensors, changes
Frames = list[tuple[Any, int]]  # with the line, the innermost first


def report(error: BaseException, cause: BaseException, whose: str) -> str:
    """Write RUN/out-of-memory-rankN.txt; return the last words: what happened, what would help.

    `whose` memory ran out by `cause`: the GPU's or the host's. The error's frames tell what was
    going on, and what they hold is freed once it is listed. Before there is a trainer: no page.
    """
    traces = [each.__traceback__ for each in dict.fromkeys((error, cause))]
    frames = [pair for each in traces for pair in traceback.walk_tb(each)][::-1]
    held = [value for frame, _ in frames for value in [*frame.f_locals.values()]]
    trainer: Any = next((one for one in held if isinstance(one, Trainer)), None)
    words, rank = f"{host_name()}: out of memory ({whose})", global_rank()
    if not hasattr(trainer, "optimizer"):
        advice = "--dry_run says what the run needs, docs/faq.md what takes less."
        return f"{words} before training began: {last_line(cause)}. {advice}"
    names = [frame.f_code.co_name for frame, _ in frames if "/utils/" in frame.f_code.co_filename]
    phase = next((PHASES[name] for name in names[::-1] if name in PHASES), "train")
    step = trainer.state.global_step + (phase == "train")  # that is not done
    asked = re.search(r"allocate ([\d.]+ ?\w+)", str(cause))
    where = place(traceback.extract_tb(cause.__traceback__), LIBRARIES)
    words += f", {phase}, step {step}: {asked[1] if asked else 'more'} was not to be had in {where}"
    page = trainer.checkpoints.output_dir / f"out-of-memory-rank{rank}.txt"
    device = "cpu" if whose == "host" else trainer.args.device.type
    sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
    parts, trace = [words], "".join(traceback.format_exception(error))
    if device == "cuda":
        torch.cuda.memory._dump_snapshot(str(page.with_suffix(".pickle")))
        parts.append(f"{page.stem}.pickle: all blocks, to drop on pytorch.org/memory_viz")
    for part in (
        lambda: _batch(trainer, held), lambda: _tensors(trainer, frames, device, sizes),
        lambda: _free(traces, frames, held), lambda: _what_helps(trainer, phase, device, sizes),
        lambda: trace,
    ):  # fmt: skip
        try:
            parts.append(part())
            # Each time: a launcher may end this process while it predicts.
            replace_text(page, redact("\n\n".join(filter(None, parts))))
        except Exception as failure:  # memory is short, the disk may be
            parts.append(f"(a part is missing: {failure!r})")
    if rank == 0:
        event = {"event": "out_of_memory", "step": step, "rank": rank, "host": host_name()}
        trainer.samples.journal.write(event | {"phase": phase, "page": page.name})
    return f"{words}\n{parts[-2]}\nwhat took it: {page}"


def _free(traces: list[Any], *lists: list[Any]) -> str:
    for each in lists:
        each.clear()
    for trace in traces:
        traceback.clear_frames(trace)
    return ""


def _batch(trainer: Any, held: list[Any]) -> str:
    """Return the shape of the innermost micro-batch that a frame holds, and its real tokens."""
    batches = [each for each in held if isinstance(each, dict) and "input_ids" in each]
    text = f"{type(trainer.model).__name__} on {trainer.args.world_size} rank(s)"
    for batch in batches[:1]:
        text += "; micro-batch: {} sequences x {:,} tokens".format(*batch["input_ids"].shape)
    real = [int(each["sequence_tokens"].sum()) for each in batches if "sequence_tokens" in each]
    return text + "".join(f", {tokens:,} of them real" for tokens in real[:1])


def _named(trainer: Any, frames: Frames) -> Iterator[tuple[Any, str, str]]:
    """Yield all that may be a tensor with its kind and origin, the best known first."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    for weight, name in names.items():
        yield weight, KINDS[0], name
        yield weight.grad, KINDS[1], f"gradient of {name}"
    for weight, states in getattr(trainer.optimizer, "state", {}).items():
        for name, state in states.items():
            yield state, KINDS[2], f"{name} of {names.get(weight, 'a weight')}"
    for frame, line in frames:
        for name, value in [*frame.f_locals.items()]:
            yield value, KINDS[3], f"{name} in {frame.f_code.co_qualname}, line {line}"
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            yield each, KINDS[3], each.grad_fn.name() if each.grad_fn else "held elsewhere"


def _tensors(trainer: Any, frames: Frames, device: str, sizes: dict[str, int]) -> str:
    """Return memory by kind, which `sizes` gets, and the largest tensors on the device."""
    found: dict[int, tuple[int, str, str]] = {}  # by address
    for value, kind, origin in _named(trainer, frames):
        if not isinstance(value, torch.Tensor) or type(value).__name__ == "FakeTensor":
            continue
        local = getattr(value, "_local_tensor", value)  # FSDP2's: this rank's rows
        storage = local.untyped_storage()
        if local.device.type == device and (address := storage.data_ptr()):
            text = f"{str(local.dtype)[6:]} {tuple(local.shape)}  {origin}"
            found.setdefault(address, (storage.nbytes(), kind, text))
    for segment in torch.cuda.memory_snapshot() if device == "cuda" else ():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                kept = (block["size"], KINDS[3], "kept for the backward pass, or by a library")
                found.setdefault(block["address"], kept)
    for size, kind, _ in found.values():
        sizes[kind] += size
    largest = [(text, size) for size, _, text in sorted(found.values(), reverse=True)[:SHOWN]]
    rows = [*sizes.items(), *_rest(device), ("\nlargest tensors", None), *largest]
    return "\n".join(
        f"{readable(size):>12}  {name}" if size is not None else name for name, size in rows
    )


def _rest(device: str) -> list[tuple[str, int]]:
    """Return what is in no tensor, of the GPU or the host."""
    if device == "cuda":
        (free, total), reserved = torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
        return [
            ("reserved by torch, not in use", reserved - torch.cuda.memory_allocated()),
            ("other processes, and CUDA itself", total - free - reserved),
            ("free", free), ("in all", total),
        ]  # fmt: skip
    process = psutil.Process()
    workers = [each.memory_info().rss for each in process.children(recursive=True)]
    return [
        ("this process, resident", process.memory_info().rss),
        (f"its {len(workers)} workers", sum(workers)),
        ("left of the host, or of the job's limit", memory_room_bytes()),
    ]


def _what_helps(trainer: Any, phase: str, device: str, sizes: dict[str, int]) -> str:
    """Return the three changes that help most, by prediction or by what was alive."""
    args, lines, on_host = trainer.args, [], device == "cpu"
    if phase == "eval" and (rows := args.per_device_eval_batch_size) > 1:
        less = readable(sizes[KINDS[3]] * (rows - rows // 2) // rows)
        lines = [f"--per_device_eval_batch_size {rows // 2}: about {less} less"]
    elif phase == "train" and device == args.device.type:
        (_, own), *changes = trainer.what_helps()
        instead = f"instead of {readable(own)} (predicted)"
        lines = [f"{change}: {readable(peak)} {instead}" for change, peak in changes]
    if on_host and trainer.checkpoints.background is not None:
        lines.append("--async_save false: no checkpoint is staged in the node's memory")
    if on_host and (workers := args.dataloader_num_workers):
        lines.append(f"--dataloader_num_workers {workers // 2}: each is a process")
    lines += ["more memory for the job: sbatch --mem, ulimit -v"] * on_host
    lines.append("strategy: fsdp2, more GPUs, a shorter sequence_length (docs/faq.md)")
    return "\n  ".join(["what would help most:", *lines[:HELP]])
