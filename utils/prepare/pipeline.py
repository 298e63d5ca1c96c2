"""Preparation of token datasets: plan, load the tokenizer, tokenize, and assemble the datasets."""

import hashlib
import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.config.preparation import TRAIN, PreparationArguments, check_preparation, shard_of
from utils.data.arrow_columns import TOKENS, ListColumn, loss_mask_among, open_columns
from utils.data.token_dataset import describe_split, warn_of_small_split
from utils.data.tokenizers import chat_template_sha256, id_type, tokenizer_sha256, vocabulary_size
from utils.host.atomic_files import from_here
from utils.prepare.encoding import choose_backend
from utils.prepare.tokenization import token_features
from utils.prepare.tokenizer import end_of_turn_id, load_prepared_tokenizer, loss_mask_origin
from utils.prepare.units import UnitWorker, run_units
from utils.prepare.work_plan import PreparationPlan, plan_preparation
from utils.prepare.workspace import (
    NOTE_TEXTS,
    TRAINED_WRONGLY,
    UnitCounts,
    Workspace,
    partial_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SOURCES_LISTED = 100
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLE_TOKENS = 256


@dataclass(frozen=True)
class Preparation:
    """A planned preparation. template_sha256: None means no chat template, or several."""

    arguments: PreparationArguments
    plan: PreparationPlan
    tokenizer: "PreTrainedTokenizerBase"
    tokenizer_sha256: str
    template_sha256: str | None
    workspace: Workspace


def prepare_datasets(arguments: PreparationArguments) -> None:
    """Tokenize this process's shard of the sources. Assemble the datasets if all shards are done.

    Work units (pieces of the sources) that are finished are not repeated. In a Slurm job array, the
    last task assembles the datasets. Outside an array, the user runs prepare_data.py --merge after
    all shards. Raises ConfigurationError for unusable settings, sources, tokenizers and rows.
    """
    preparation = begin_preparation(arguments)
    plan, workspace = preparation.plan, preparation.workspace
    if workspace.is_prepared():
        logger.info("%s: already prepared with these settings", workspace.publish())
    elif folder := finish_preparation(preparation):
        names = [shlex.quote(str(folder / split)) for split in plan.splits]  # the first is train
        evaluated = f" --eval_data {' '.join(names[1:])}" if names[1:] else ""
        script = "pretrain.py" if plan.settings.document_format == "text" else "sft_train.py"
        command = f"python {script} --train_data {names[0]}{evaluated}"
        logger.info("next: %s, with a recipe and your other settings", command)


def begin_preparation(arguments: PreparationArguments) -> Preparation:
    """Plan a preparation and load its tokenizer. Writes no files.

    Raises ConfigurationError for unusable settings, sources and tokenizers.
    """
    check_preparation(arguments)
    plan = plan_preparation(arguments)
    plan.log()
    tokenizer = load_prepared_tokenizer(arguments, plan)
    sha256, template = tokenizer_sha256(tokenizer), chat_template_sha256(tokenizer)
    hashes = {"sha256": sha256, "chat_template_sha256": template}
    folder = Path(arguments.output_dir)
    relative_digest = plan.digest(hashes, folder.absolute())
    workspace = Workspace(
        folder, plan.digest(hashes), plan.commits, relative_digest=relative_digest
    )
    workspace = workspace.overwriting() if arguments.overwrite else workspace
    return Preparation(arguments, plan, tokenizer, sha256, template, workspace)


def finish_preparation(given: Preparation, *, only_workers: bool = False) -> Path | None:
    """Tokenize this shard of a planned preparation, assemble datasets and return their folder.

    Returns None, without assembling, if other shards are unfinished or another task of the Slurm
    job array assembles the datasets. only_workers: tokenize only in worker processes. Raises
    ConfigurationError for unusable rows and for splits without documents. With --merge, also raises
    ConfigurationError for unfinished shards.
    """
    arguments, plan, tokenizer = given.arguments, given.plan, given.tokenizer
    workspace = given.workspace
    workspace.open(may_discard=not arguments.shard and not arguments.merge)
    shard, shards = shard_of(arguments)
    if arguments.merge is None:
        # The tokenizer's threads in this process. Worker processes use one thread each.
        os.environ.setdefault("RAYON_NUM_THREADS", str(arguments.num_proc))
        own = [unit for unit in plan.units if unit.index % shards == shard]
        left = [unit for unit in own if workspace.counts_of(unit.index) is None]
        if len(left) < len(own):
            logger.info("%d of %d work units are finished already", len(own) - len(left), len(own))
        document_format = plan.settings.document_format
        backend = choose_backend(arguments.tokenizer_backend, tokenizer, document_format)
        worker = UnitWorker(tokenizer, backend, plan.settings, workspace)
        run_units(left, worker, arguments.num_proc, only_workers=only_workers)
    if arguments.shard:
        logger.info("shard %d/%d is complete", shard, shards)
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        if not array:
            logger.info("when all are, run the same settings with --merge %d, not --shard", shards)
        if not array or not workspace.is_last_of_array(array, shard, shards):
            return None
        logger.info("all %d shards are complete: merging", shards)
    counts = finished_counts(plan, workspace, arguments.merge or shards)
    log_counts(plan, counts)
    total = sum(counts.values(), UnitCounts())
    if empty := [split for split in plan.splits if not total.documents[split]]:
        raise ConfigurationError(
            f"{', '.join(empty)}: no document is left for this split; give more documents or "
            "another --validation_fraction, or see above what was dropped"
        )
    for split in plan.splits:
        assemble_split(split, given, counts)
    folder = workspace.output_dir / "tokenizer"
    if not folder.exists():  # the folder gets its name when it is complete
        tokenizer.save_pretrained(partial_name(folder))
        partial_name(folder).replace(folder)
    workspace.remove()
    return workspace.publish()


def finished_counts(
    plan: PreparationPlan, workspace: Workspace, shards: int
) -> dict[int, UnitCounts]:
    """Return {index: counts} of all work units. Raises ConfigurationError if one is missing."""
    found = {unit.index: workspace.counts_of(unit.index) for unit in plan.units}
    counts = {index: count for index, count in found.items() if count is not None}
    missing = Counter(index % shards for index in found.keys() - counts.keys())
    if missing:
        raise ConfigurationError(
            [
                f"shard {shard}/{shards} is incomplete, {number} of its work units are "
                f"missing: run it (again) with --shard {shard}/{shards}"
                for shard, number in sorted(missing.items())
            ]
        )
    return counts


def log_counts(plan: PreparationPlan, counts: Mapping[int, UnitCounts]) -> None:
    """Log the documents and tokens of each source, and the rows and columns that were left out."""
    sources = [list(group) for _, group in groupby(plan.units, lambda unit: unit.source)]
    for units in sources:
        source_counts = sum((counts[unit.index] for unit in units), UnitCounts())
        path = from_here(units[0].parts[0].file.path)
        unread = [f"{label} ({number:,})" for label, number in sorted(source_counts.unread.items())]
        if unread:
            line = "from %s: not read, unless by the chat template: %s"
            logger.info(line, path, ", ".join(unread))
        if len(sources) > 1:
            written = [
                f"{split} {number:,} documents, {source_counts.tokens[split]:,} tokens"
                for split, number in source_counts.documents.items()
            ]
            logger.info("from %s: %s", path, "; ".join(written) or "nothing")
    total = sum(counts.values(), UnitCounts())
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(total.dropped.items()))
    if dropped:
        logger.info("dropped: %s", dropped)
    for example in total.examples:
        logger.info("  dropped %s", example)
    for name, number in total.notes.items():
        level = logging.WARNING if name in TRAINED_WRONGLY else logging.INFO
        logger.log(level, f"{number:,} {NOTE_TEXTS[name]}")


# --- one split


def assemble_split(split: str, given: Preparation, counts: Mapping[int, UnitCounts]) -> None:
    """Assemble the dataset of a split from its work units' Arrow files, and write stoker.json.

    counts: {index of the work unit: counts}. Raises ConfigurationError if the files have more or
    fewer documents or tokens than the counts.
    """
    plan, tokenizer, workspace = given.plan, given.tokenizer, given.workspace
    folder = workspace.output_dir / split
    features = token_features(id_type(tokenizer), plan.settings.document_format)
    units = [index for index in counts if counts[index].documents[split]]
    move_files(folder, workspace, units, features)
    columns = open_columns(folder)
    total = sum(counts.values(), UnitCounts())
    figures = split_figures(split, total, np.diff(columns[TOKENS].offsets))
    example = decoded_example(columns, tokenizer)
    if split == TRAIN:
        logger.info("an example, with [[ ]] around what is trained on:\n%s", example)
    is_chat = plan.needs_chat_template
    dataset = describe_split(
        folder,
        tokenizer={
            "path": "../tokenizer",
            "sha256": given.tokenizer_sha256,
            "vocabulary_size": vocabulary_size(tokenizer),
        },
        chat_template_sha256=given.template_sha256 if is_chat else None,
        preparation={
            "settings_sha256": workspace.digest,
            "movable_sha256": workspace.relative_digest,
            "settings": asdict(plan.settings),
            "sources": describe_sources(split, plan, counts),
            **figures,
            "example": example,
            "loss_masks": loss_mask_origin(tokenizer) if is_chat else None,
            "end_of_turn_token_id": end_of_turn_id(tokenizer) if is_chat else None,
        },
    )
    documents, tokens = figures["documents"], figures["tokens"]
    stats = dataset.description.statistics
    if (stats.documents, stats.tokens) != (documents, tokens):
        raise ConfigurationError(
            f"{folder}: holds {stats.documents:,} documents and {stats.tokens:,} tokens, but "
            f"{documents:,} and {tokens:,} were counted as they were written: "
            "the storage changed or lost data; remove the folder and prepare again"
        )
    if split != TRAIN:
        warn_of_small_split(split, dataset)
    lengths = figures["length_percentiles_tokens"]
    trained = figures["loss_token_share"]
    share = f", {trained:.1%} of them trained on" if trained < 1 else ""
    logger.info(
        f"{split}: {documents:,} documents, {tokens:,} tokens{share}; tokens a document: median "
        f"{lengths['p50']:,}, 99% have at most {lengths['p99']:,}, the longest {lengths['max']:,}"
    )


def move_files(
    folder: Path, workspace: Workspace, units: list[int], features: dict[str, Any]
) -> None:
    """Move the Arrow files of a split to its folder; write the JSON files that `datasets` reads.

    units: indices of the split's work units. Files that an interrupted preparation has already
    moved stay in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-{len(units):05d}.arrow" for number in range(len(units))]
    for unit, name in zip(units, names, strict=True):
        source = workspace.unit_file(unit, folder.name)
        if source.exists():
            source.replace(folder / name)
    info = {"citation": "", "description": "", "features": features}
    info |= {"homepage": "", "license": ""}
    # `datasets` uses this as a cache key, so it must differ between splits.
    fingerprint = hashlib.sha256(f"{workspace.digest} {folder.name}".encode()).hexdigest()
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, content in (("dataset_info.json", info), ("state.json", state)):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def describe_sources(
    split: str, plan: PreparationPlan, counts: Mapping[int, UnitCounts]
) -> dict[str, Any]:
    """Return the entry `sources` of a split's stoker.json: source files and dropped rows.

    A validation split drawn from the train sources gets the entry of train.
    """
    origin = split if split in plan.sources else TRAIN
    files = plan.sources[origin]
    own = (counts[unit.index] for unit in plan.units if unit.split == origin)
    total = sum(own, UnitCounts())
    return {
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "first_files": {file.name: file.size for file in files[:SOURCES_LISTED]},
        "digests": [file.digest() for file in files],
        **({"hub": dict(plan.commits)} if plan.commits else {}),
        "dropped": dict(total.dropped),
        "dropped_examples": total.examples,
        **{note: total.notes[note] for note in NOTE_TEXTS},
    }


def split_figures(split: str, counts: UnitCounts, lengths: np.ndarray) -> dict[str, Any]:
    """Return a split's statistics for stoker.json. lengths: (documents,), tokens per document."""
    tokens, loss_tokens = counts.tokens[split], counts.loss_tokens[split]
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    percentiles = {f"p{p}": int(length) for p, length in zip(PERCENTILES, values, strict=True)}
    return {
        "documents": counts.documents[split],
        "tokens": tokens,
        "loss_tokens": loss_tokens,
        "loss_token_share": loss_tokens / tokens,
        "text_bytes": counts.text_bytes[split],
        "bytes_per_token": counts.text_bytes[split] / tokens,
        "length_percentiles_tokens": {**percentiles, "max": int(lengths.max())},
    }


def decoded_example(columns: Mapping[str, ListColumn], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the first document of a split as text. [[ ]] mark what is trained on.

    The text has at most EXAMPLE_TOKENS tokens. The start of a long prompt is left out.
    """
    mask_column = loss_mask_among(columns)
    ids = columns[TOKENS].documents(0, 0, 1)
    mask = columns[mask_column].documents(0, 0, 1) if mask_column else np.ones(len(ids), np.int8)
    # Leave out the start of a long prompt. Otherwise the text could end before the answer.
    start = max(0, int(np.argmax(mask)) - EXAMPLE_TOKENS // 2)
    ids, mask = ids[start:][:EXAMPLE_TOKENS].tolist(), mask[start:].tolist()
    parts = ["... "] if start else []
    for trained, group in groupby(zip(ids, mask, strict=False), key=lambda pair: pair[1]):
        text = str(tokenizer.decode([token for token, _ in group]))
        # Escape characters that a terminal would execute.
        text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        parts.append(f"[[{text}]]" if trained else text)
    return "".join(parts)
