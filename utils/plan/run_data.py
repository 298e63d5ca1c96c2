"""The datasets of a run, opened, checked and packed into sequences, and the run's steps."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from utils.checkpoints.adoption import known_data, resumed_record
from utils.checkpoints.record import settings_in_force
from utils.config.arguments import (
    DataArguments,
    accumulation_steps,
    eval_splits,
    fitting_micro_batch,
    profiled_steps,
    token_count,
    train_sources,
)
from utils.config.declarations import counted_ranks
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings, with_derived
from utils.data.loader import PackedDataset, mixture_line
from utils.data.order import GlobalBatchSampler, SampleOrder, steps_for
from utils.data.packing import PackPlan, plan_packing
from utils.data.token_dataset import (
    TokenDataset,
    dataset_problems,
    open_token_dataset,
    packing_line,
    read_skipped,
    warn_of_small_split,
)
from utils.data.tokenizers import (
    chat_template_sha256,
    differences,
    load_tokenizer,
    render_alike,
    tokenizer_sha256,
)
from utils.host.collectives import on_rank_0
from utils.launch.processes import LaunchFacts
from utils.model.config import compare_with_model, new_token_ids
from utils.model.stages import stage_tokenizer

if TYPE_CHECKING:
    from utils.prepare.encoding import Prompt

logger = logging.getLogger(__name__)

# Settings that are derived from data and model if they are null. A resumed run keeps their values.
SIZES = ["sequence_length", "on_overlong", "global_batch_size", "per_device_train_batch_size"]
# Limits of derived sizes. The recipes for chats have 64 sequences of 4,096 tokens a step.
LEAST_LENGTH, MOST_LENGTH, MOST_TOKENS_AT_ONCE = 1024, 4096, 8192
MOST_SEQUENCES, EPOCH_STEPS = 64, 200
FEW_STEPS = 50  # too few to learn from


@dataclass(frozen=True)
class RunData:
    """The datasets of a run, the tokenizer's digest, and prompts for sample completions."""

    train: PackedDataset
    evaluation: dict[str, PackedDataset]
    tokenizer_sha256: str
    new_tokens: Sequence[int]  # ids for which the pretrained weights have no row
    prompts: "Sequence[Prompt]"  # evaluations log the model's completions

    def fingerprints(self) -> dict[str, list[str]]:
        """Return {split: content fingerprints of its datasets}, for provenance.json."""
        splits = {"train": self.train, **self.evaluation}
        return {
            name: [data.description.fingerprint for data in rows.datasets]
            for name, rows in splits.items()
        }


def load_run_tokenizer(settings: RunSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the settings, else of the training data, else of the model.

    Raises ConfigurationError if no tokenizer is found, or if it does not fit the model.
    """
    directory = settings.data.tokenizer_name_or_path
    if not directory:
        source = next(iter(train_sources(settings.data.train_data)))
        folder = _open(settings, source, "train", ()).tokenizer_path
        if folder is not None and folder.is_dir():
            directory = str(folder)
        elif own := settings.model.model_name_or_path or stage_tokenizer(settings):
            directory = own
            if folder is not None:
                logger.info("tokenizer: that of %s; %s, of the data, is not there", own, folder)
        else:
            where = f"its tokenizer should be in {folder}" if folder else "it names no tokenizer"
            raise ConfigurationError(
                f"{source}: {where}, and a model from scratch has none of its own: give "
                "--tokenizer_name_or_path."
            )
    tokenizer = load_tokenizer(directory)
    compare_with_model(settings, tokenizer, directory)
    return tokenizer


def choose_sizes(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> RunSettings:
    """Return the settings with derived values for a missing sequence_length or global_batch_size.

    Derived values are logged. A resumed run keeps its values, even if the number of ranks or the
    micro-batch changed. Raises ConfigurationError if a dataset cannot be opened.
    """
    if not _unset_settings(settings, ("sequence_length", "global_batch_size")):
        return settings
    found = on_rank_0(lambda: _resumed_sizes(settings))
    if not found and None in (settings.data.sequence_length, settings.run.global_batch_size):
        found = _derived_sizes(settings, config, launch.world_size // settings.run.context_parallel)
    settings = with_derived(settings, found)
    for note in settings.values.notes:
        logger.info("settings: %s", note)
    return settings


def _unset_settings(settings: RunSettings, names: Sequence[str]) -> list[str]:
    """Return the settings among `names` that the user left out or set to null."""
    values = settings.values
    return [name for name in names if not values.rank(name) or values[name] is None]


def _resumed_sizes(settings: RunSettings) -> dict[str, tuple[Any, str]]:
    """Return {setting: (value, reason)} from the run to resume, for sizes that are not given."""
    record, values = resumed_record(settings), settings.values
    before = settings_in_force(record.directory, record.starts) if record.starts else {}
    why = f"as the run in {record.directory} began"
    accepted = settings.run.accept_changes
    ours = [name for name in _unset_settings(settings, SIZES) if name not in accepted]
    if "global_batch_size" in ours and "batch_warmup" not in accepted:
        ours.append("batch_warmup")
    return {
        name: (before[name], why) for name in ours if before.get(name) not in (None, values[name])
    }


def _derived_sizes(
    settings: RunSettings, config: PreTrainedConfig, ranks: int
) -> dict[str, tuple[Any, str]]:
    """Derive the length and batch sizes that are not given. Returns {setting: (value, reason)}."""
    data, found = settings.data, dict[str, tuple[Any, str]]()
    given, fine_tuning = settings.values.given.keys(), settings.script == "sft_train.py"
    train = [_open(settings, name, "train", ()).lengths for name in train_sources(data.train_data)]
    splits = eval_splits(data.eval_data).items()
    all_lengths = [*train, *(_open(settings, path, name, ()).lengths for name, path in splits)]
    length = data.sequence_length
    if length is None:
        longest = max(int(lengths.max(initial=1)) for lengths in all_lengths)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        least = LEAST_LENGTH if data.packing != "none" else 1  # else the rest is padding
        fitting = max(least, 1 << (longest - 1).bit_length())
        length = min(fitting, MOST_LENGTH, positions or MOST_LENGTH)
        why = (
            f"the longest of {sum(map(len, all_lengths)):,} documents has {longest:,} tokens, "
            f"the model {positions or 'any number of'} positions; --sequence_length changes it"
        )
        found["sequence_length"] = length, why
        too_long = sum(int((lengths > length).sum()) for lengths in all_lengths)
        if too_long and fine_tuning and "on_overlong" not in given:
            keeps = f"; --sequence_length {longest} keeps it" * (longest <= (positions or longest))
            found["on_overlong"] = "truncate", f"{too_long:,} documents lose their end{keeps}"
    if settings.run.global_batch_size is None:
        # Pretraining splits longer documents.
        most = length if fine_tuning else np.iinfo(np.int64).max
        tokens = sum(int(np.minimum(lengths, most).sum()) for lengths in train)
        rows = sum(map(len, train)) if data.packing == "none" else tokens // length
        size = default_batch_size(rows, ranks)
        why = (
            f"about {rows:,} sequences, {counted_ranks(ranks)}, so {math.ceil(rows / size)} steps "
            "an epoch; --global_batch_size changes it"
        )
        found["global_batch_size"] = size, why
    if "sequence_length" in found and "per_device_train_batch_size" not in given:
        batch, _ = found.get("global_batch_size", (settings.run.global_batch_size, ""))
        at_once = max(MOST_TOKENS_AT_ONCE // length, 1)
        if micro := fitting_micro_batch(batch, at_once, ranks):
            why = f"at most {MOST_TOKENS_AT_ONCE:,} tokens at once"
            found["per_device_train_batch_size"] = micro, why
    return found


def default_batch_size(rows: int, ranks: int) -> int:
    """Return a global batch size for data of `rows` sequences.

    The size is the largest power of two with which an epoch has at least 200 steps (EPOCH_STEPS).
    It is at most 64 (MOST_SEQUENCES), and then rounded up to a multiple of `ranks`.
    """
    size = min(MOST_SEQUENCES, max(rows // EPOCH_STEPS, 1))
    size = 1 << (size.bit_length() - 1)
    return math.ceil(size / ranks) * ranks


def flags_for_more_steps(rows: int, global_batch_size: int, ranks: int) -> str:
    """Return flags with which a run on `rows` sequences has at least 50 steps (FEW_STEPS)."""
    size = min(default_batch_size(rows, ranks), global_batch_size)
    flags = f"--num_train_epochs {math.ceil(FEW_STEPS * size / rows)}"
    return flags if size == global_batch_size else f"--global_batch_size {size} {flags}"


def load_run_data(
    settings: RunSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    fine_tuning: bool,
) -> RunData:
    """Open, check and pack all splits. Raises ConfigurationError with all problems.

    Fine-tuning requires a trained token in each document. In fine-tuning, the setting `on_overlong`
    decides what happens to long documents. Pretraining splits them.
    """
    data = settings.data
    sources, splits = train_sources(data.train_data), eval_splits(data.eval_data)
    named = [("train", directory) for directory in sources] + list(splits.items())
    vocabulary = config.get_text_config().vocab_size
    sha256 = tokenizer_sha256(tokenizer)  # takes most of a second
    opened, problems = list[TokenDataset](), list[str]()
    known = on_rank_0(lambda: known_data(settings))
    for split, directory in named:
        try:
            dataset = _open(settings, directory, split, known)
        except ConfigurationError as error:
            problems += error.problems
            continue
        opened.append(dataset)
        problems += dataset_problems(dataset, vocabulary, needs_loss_tokens=fine_tuning)
        problems += _tokenizer_problems(dataset, tokenizer, sha256)
    if problems:
        raise ConfigurationError(problems)
    plans = [pack(dataset, data, fine_tuning=fine_tuning) for dataset in opened]
    for (name, _), dataset, plan in zip(named, opened, plans, strict=True):
        most = data.max_eval_sequences if name in splits else None
        is_plain = dataset.loss_mask is None and dataset.description.chat_template_sha256 is None
        logger.info("%s: %s", name, packing_line(dataset, plan, most))
        if name in splits:
            warn_of_small_split(name, dataset)
        elif fine_tuning and tokenizer.chat_template and is_plain:
            told = "has plain text: all of it is trained on, without the model's chat template"
            logger.warning("%s: %s %s", name, dataset.path, told)
    # Any token of the model can be padding: no document attends to it, and it has no loss.
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    padding = next((token for token in tokens if token is not None and token < vocabulary), 0)
    first = len(sources)
    skipped = on_rank_0(lambda: read_skipped(data.skip_documents, opened[:first]))
    if data.skip_documents:
        count = sum(map(len, skipped))
        logger.info("skip_documents %s: %s are not trained on", data.skip_documents, f"{count:,}")
    evaluation = zip(splits, opened[first:], plans[first:], strict=True)
    return RunData(
        PackedDataset(opened[:first], plans[:first], padding, skipped),
        {name: PackedDataset([rows], [plan], padding) for name, rows, plan in evaluation},
        sha256,
        new_token_ids(settings, tokenizer),
        _sample_prompts(settings, tokenizer, config, opened[:first] if fine_tuning else ()),
    )


def pack(dataset: TokenDataset, data: DataArguments, *, fine_tuning: bool) -> PackPlan:
    """Return the plan that packs a dataset's documents. Raises the errors of `plan_packing`."""
    return plan_packing(
        dataset.lengths,
        data.sequence_length,
        data.packing,
        data.on_overlong if fine_tuning else "split",
        has_targets=dataset.has_targets if fine_tuning else None,
        where=str(dataset.path),
    )


def sample_order(train: PackedDataset, data: DataArguments, seed: int) -> SampleOrder:
    """Return the order of the training sequences in the run."""
    weights = [weight for weight in train_sources(data.train_data).values() if weight is not None]
    return SampleOrder(train.per_source, seed, weights or None, data.order == "shuffled")


def _sample_prompts(
    settings: RunSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    examples: Sequence[TokenDataset],
) -> "Sequence[Prompt]":
    """Load `sample_prompts`. Raises ConfigurationError if a prompt is too long to be completed.

    The prompts are chats if a dataset in `examples` has a chat template or names no tokenizer.
    """
    run = settings.run
    if not run.sample_prompts:
        return ()
    from utils.prepare.encoding import load_prompts

    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
    most_tokens = positions - run.sample_max_new_tokens
    known = [each.description for each in examples]
    chats = any(each.chat_template_sha256 or not each.tokenizer for each in known)
    return load_prompts(run.sample_prompts, tokenizer, chats=chats, most_tokens=most_tokens)


def _tokenizer_problems(
    dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase, sha256: str
) -> list[str]:
    described, used = dataset.description, tokenizer.name_or_path
    same_rules = described.tokenizer.get("sha256") in (None, sha256)
    if same_rules and described.chat_template_sha256 in (None, chat_template_sha256(tokenizer)):
        return []
    folder = dataset.tokenizer_path
    made_by = load_tokenizer(str(folder)) if folder is not None and folder.is_dir() else None
    hint = (
        "Leave --tokenizer_name_or_path out, so that the training data's own counts, and prepare "
        f"data that was made otherwise again: prepare_data.py --tokenizer_name_or_path {used}."
    )
    if not same_rules:
        found = f": it has {'; '.join(differences(made_by, tokenizer))}" if made_by else ""
        return [f"{dataset.path} was made with another tokenizer than {used}{found}. {hint}"]
    what = "rendered with another chat template than that of the tokenizer at"
    told = f"the chats of {dataset.path} were {what} {used}, which final/ would have. {hint}"
    return [] if made_by and render_alike(made_by, tokenizer) else [told]


def _open(settings: RunSettings, path: str, split: str, known: Collection[str]) -> TokenDataset:
    """Open a dataset. If the directory has several splits, open the split named `split`.

    All ranks must call this. Rank 0 opens the dataset first. The other ranks then find its
    statistics in the disk cache. known: the data fingerprints of the run to resume. They select the
    same version of the data.
    """
    opened, staged = list[TokenDataset](), settings.staged.get((path, split))
    on_rank_0(lambda: opened.append(open_token_dataset(path, split, known, staged)))
    return opened[0] if opened else open_token_dataset(path, split, known, staged)


def plan_steps(
    settings: RunSettings, data: RunData, launch: LaunchFacts, report: Report
) -> GlobalBatchSampler:
    """Return the sampler of the global batches. Add lines on batch and steps to `report`.

    Raises ConfigurationError if the global batch does not divide into micro-batches of all ranks,
    if the data is smaller than one global batch, or if profile_steps are later than the last step.
    """
    run, training, length = settings.run, settings.training, settings.data.sequence_length
    micro_batch, context_parallel = training.per_device_train_batch_size, run.context_parallel
    rank, ranks = launch.rank // context_parallel, launch.world_size // context_parallel
    sizes = settings.batch_sizes
    by_step = {step: accumulation_steps(size, micro_batch, ranks) for step, size in sizes.items()}
    if (rows := len(data.train)) < run.global_batch_size:
        size = default_batch_size(rows, ranks)
        advice = (
            f"give --global_batch_size {size}, for {math.ceil(rows / size)} steps an epoch "
            f"(at most {rows:,})"
        )
        if rows < ranks:
            advice = f"use at most {rows * context_parallel} ranks, a shorter --sequence_length"
        raise ConfigurationError(
            f"the training data makes {rows:,} sequences, fewer than global_batch_size "
            f"{run.global_batch_size:,}: {advice}, or add data."
        )
    if run.max_tokens is not None:
        tokens = token_count(run.max_tokens)
        total_steps = steps_for(math.ceil(tokens / length), sizes)
        a_step = " to ".join(f"{size * length:,}" for size in sizes.values())
        report.say(f"max_tokens: {tokens:,} / {a_step} a step = {total_steps:,} steps")
    elif training.max_steps > 0:
        total_steps = training.max_steps
    else:
        # The last global batch is full: sequences of one more epoch fill it up.
        total_steps = steps_for(training.num_train_epochs * rows, sizes)
    order = sample_order(data.train, settings.data, training.seed)
    sampler = GlobalBatchSampler(order, sizes, micro_batch, rank, ranks, total_steps)
    shared = f" / {context_parallel} (context_parallel)" if context_parallel > 1 else ""
    readers = f"{counted_ranks(launch.world_size)}{shared}"
    for step, accumulation in by_step.items():
        report.say(
            f"batch: {micro_batch} sequences x {length:,} tokens x {readers} "
            f"x {accumulation} accumulation = {sizes[step] * length:,} tokens/step"
            f"{f', from step {step + 1:,}' if sampler.grows else ''}"
        )
        if step >= total_steps:
            report.warn(f"batch: the run has no step {step + 1:,}, and so never this size")
    report.say(
        f"run: {total_steps:,} steps = {sampler.epoch_at(total_steps):.2f} epochs of {rows:,} "
        f"sequences = {sampler.samples_before(total_steps) * length:,} tokens with padding"
    )
    if len(data.train.plans) > 1:
        report.say(mixture_line(data.train, sampler))
    if total_steps < FEW_STEPS and training.max_steps < 1 and run.max_tokens is None:
        more = flags_for_more_steps(rows, run.global_batch_size, ranks)
        report.warn(f"run: {total_steps} steps may be too few to learn from: give {more}")
    if run.profile_steps and (last := profiled_steps(run.profile_steps)[1] - 1) > total_steps:
        raise ConfigurationError(f"profile_steps {run.profile_steps}: the run has no step {last:,}")
    return sampler
