"""The documents that a step trained on, with texts and losses, for `status.py RUN --step N`.

A run does not record the documents of its steps. This module finds the documents from the settings,
the data and the step's number. It computes losses with the newest checkpoint before the step. The
model reads each document alone, because packed documents do not attend to each other.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from utils.checkpoints.record import settings_in_force
from utils.config.arguments import DataArguments, batch_sizes, train_sources
from utils.config.errors import ConfigurationError
from utils.config.raw_data import replace_raw_files
from utils.data.arrow_columns import data_files
from utils.data.loader import PackedDataset
from utils.data.order import GlobalBatchSampler
from utils.data.packing import Segments
from utils.data.token_dataset import open_token_dataset, read_skipped
from utils.data.tokenizers import load_tokenizer
from utils.host.journal_file import printable, strict_json
from utils.observe.history import History, read_run
from utils.plan.run_data import pack, sample_order
from utils.prepare.values import LOCATIONS, Location, unpack_locations
from utils.run.chat import load, print_note

TEXT_LENGTH = 160  # characters of a text
# A document, or the part of it in a step: facts for its JSON line, token ids, and a mask of the
# tokens that are trained on.
Part = tuple[dict[str, Any], np.ndarray, np.ndarray]


def show_step(run: Path, steps: str, as_json: bool, with_loss: bool) -> str:
    """Return a text that lists the documents of `steps` ("N" or "A-B"), highest loss first.

    as_json: write each document as one line of JSON. with_loss: compute the losses, with the newest
    checkpoint before `steps`. Raises ConfigurationError if `steps` is not in the run or if the data
    of a step cannot be read.
    """
    history, (begin, _, end) = read_run(run), steps.partition("-")
    first, last = (int(step) if step.isdecimal() else 0 for step in (begin, end or begin))
    if not 0 < first <= last <= (history.max_steps or 0):
        many = f"{run} has {history.max_steps or 'no'} steps"
        raise ConfigurationError(f"--step {steps}: give a step, as 61, or steps, as 51-60; {many}.")
    parts = [*documents_of_steps(history, range(first, last + 1))]
    losses = _add_losses(history, first, parts) if with_loss else "no losses (--no_loss)"
    lines = [row for row, *_ in parts]
    for dataset in {row["dataset"] for row in lines}:
        documents = [row for row in lines if row["dataset"] == dataset]
        sources = source_locations(Path(dataset), [row["document"] for row in documents])
        for row in documents:
            row["source"] = sources.get(row["document"])
    # NaN comes first, because min(infinity, NaN) returns infinity. None comes last.
    lines.sort(key=lambda row: (row["loss"] is None, -min(math.inf, row["loss"] or 0.0)))
    head = printable(f"{run}, step {steps}: {len(parts):,} documents, {losses}")
    if as_json:
        print_note(head)
        return "\n".join(map(strict_json, lines))
    return "\n".join([head, *map(_document_text, lines)])


def _document_text(row: dict[str, Any]) -> str:
    loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
    where = f"{row['dataset']} {row['document']}, tokens {row['start']} to {row['stop']}"
    if row["source"]:
        where += f", from {row['source']}"
    left_out = ", left out (skip_documents)" if row["skipped"] else ""
    text = row["text"] if len(row["text"]) <= TEXT_LENGTH else f"{row['text'][:TEXT_LENGTH]}..."
    return f"{loss:>9}  {printable(where + left_out)}\n{'':11}{printable(text)}"


def documents_of_steps(history: History, steps: Iterable[int]) -> Iterator[Part]:
    """Yield (JSON line as a dict, token ids, mask of trained tokens) for each document of `steps`.

    If a long document is split over several steps, only the part in this step is yielded. The first
    step is 1. Data and settings come from the start (execution of the script) that trained the
    step. Raises ConfigurationError if the data is gone or has changed.
    """
    opened: dict[int, tuple[PackedDataset, GlobalBatchSampler, Any]] = {}
    for step in steps:
        # If several starts trained this step, its last training counts.
        starts = [n for n, one in enumerate(history.starts) if one.trained and one.done < step]
        start = starts[-1] if starts else len(history.starts) - 1
        if start not in opened:
            opened[start] = _open_data(history, start)
        rows, sampler, tokenizer = opened[start]
        paths = [dataset.path for dataset in rows.datasets]
        for part in rows.documents_in(sampler.sequences_of_step(step - 1)):
            source, segment = paths.index(part.dataset), [np.array([each]) for each in part[1:]]
            (ids,), (mask,) = rows.datasets[source].pieces(Segments(*segment))
            targets = (mask != 0) & (np.arange(len(mask)) > 0)  # the first token has no prediction
            yield {
                "step": step, "loss": None, **part._asdict(), "source": None,
                "loss_tokens": int(targets.sum()),
                "fingerprint": rows.datasets[source].description.fingerprint,
                "skipped": part.document in rows.skipped[source],
                "text": tokenizer.decode(ids.tolist()),
            }, ids, targets  # fmt: skip


def _open_data(history: History, start: int) -> tuple[PackedDataset, GlobalBatchSampler, Any]:
    """Open the data of a start again, and return (dataset, batch sampler, tokenizer).

    start: an index into `history.starts`. Raises ConfigurationError if the data has changed.
    """
    entries = [one.entry for one in history.starts[: start + 1]]
    settings, entry = settings_in_force(history.path, entries), entries[-1] if entries else {}
    names = {each.name for each in dataclasses.fields(DataArguments)} & settings.keys()
    arguments = DataArguments(**{name: settings[name] for name in names})
    data, _ = replace_raw_files(arguments, str(settings["output_dir"]))
    recorded = (entry.get("data") or {}).get("train") or []
    datasets = [open_token_dataset(each, known=recorded) for each in train_sources(data.train_data)]
    if recorded and [each.description.fingerprint for each in datasets] != recorded:
        raise ConfigurationError(
            f"{', '.join(data.train_data)}: not the data that these steps trained on (another "
            "fingerprint): put that back to see their documents."
        )
    fine_tuning = entry.get("script") == "sft_train.py"
    plans = [pack(dataset, data, fine_tuning=fine_tuning) for dataset in datasets]
    rows = PackedDataset(datasets, plans, skipped=read_skipped(data.skip_documents, datasets))
    order = sample_order(rows, data, settings["seed"])
    size, by_step = settings["global_batch_size"], settings.get("batch_warmup")
    sampler = GlobalBatchSampler(order, batch_sizes(size, by_step) if by_step else size, 1, 0, 1, 0)
    name = data.tokenizer_name_or_path or datasets[0].tokenizer_path
    return rows, sampler, load_tokenizer(str(name or settings.get("model_name_or_path")))


def source_locations(dataset: Path, documents: Iterable[int]) -> dict[int, str]:
    """Return {document: text with the source file and the line or row}.

    documents: indices into `dataset`. Documents without a recorded source are left out.
    """
    wanted = sorted(set(documents))
    sources: dict[int, str] = {}
    first = 0
    for path in data_files(dataset):
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch, metadata in stream.iter_batches_with_custom_metadata():
                end = first + batch.num_rows
                in_batch = wanted[bisect_left(wanted, first) : bisect_left(wanted, end)]
                if in_batch and metadata and LOCATIONS in metadata:
                    locations = unpack_locations(metadata[LOCATIONS])
                    sources |= {each: _location_text(locations[each - first]) for each in in_batch}
                first = end
    return sources


def _location_text(location: Location) -> str:
    if ".." in Path(location.path).parts:
        location = dataclasses.replace(location, path=str(Path(location.path).resolve()))
    if location.offset and not Path(location.path).is_file():  # no file to count lines in
        return f"{location.path} (missing), line {location.number} after byte {location.offset}"
    return str(location)


def _add_losses(history: History, step: int, parts: Sequence[Part]) -> str:
    """Compute the losses with the newest checkpoint before `step`, and store them in `parts`.

    Returns a text that names the checkpoint, or says why there are no losses.
    """
    steps = [manifest.step for manifest in history.checkpoints if manifest.step < step]
    if not steps:
        return f"no losses: there is no checkpoint before step {step}"
    checkpoint = history.path / f"checkpoint-{steps[0]}"
    if not any(checkpoint.glob("*.safetensors")):
        return f"no losses: {checkpoint.name} holds the weights in shards, a part for each rank"
    try:
        model, _ = load(str(checkpoint), None, "auto")
        print_note(f"computing {len(parts):,} losses on {model.device} (--no_loss prints without)")
        for row, ids, targets in parts:
            row["loss"] = _document_loss(model, ids, targets)
    except (ConfigurationError, MemoryError, torch.OutOfMemoryError) as error:
        return f"no losses under {checkpoint.name}: {error}"
    return f"losses under {checkpoint.name} on {model.device}"


@torch.inference_mode()
def _document_loss(model: Any, ids: np.ndarray, targets: np.ndarray) -> float | None:
    """Return a document's mean loss over the tokens in the mask `targets`, None for no tokens."""
    if not targets.any():
        return None
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    positions = torch.from_numpy(np.flatnonzero(targets)).to(model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, positions - 1]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[positions]))
