"""The splits of a run: opened, compared with the tokenizer, and packed into sequences."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from utils.config.arguments import eval_splits, train_sources
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.loader import PackedDataset
from utils.data.packing import PackPlan, plan_packing
from utils.data.token_dataset import (
    TokenDataset,
    dataset_problems,
    open_token_dataset,
    warn_of_small_split,
)
from utils.data.tokenizers import (
    chat_template_sha256,
    differences,
    load_tokenizer,
    tokenizer_sha256,
)
from utils.host.collectives import on_rank_0
from utils.model.config import compare_with_model, new_token_ids
from utils.model.stages import stage_tokenizer

if TYPE_CHECKING:
    from utils.prepare.encoding import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """The datasets of a run. weights: shares of the sources; None: in proportion to size."""

    train: PackedDataset
    evaluation: dict[str, PackedDataset]
    weights: list[float] | None
    tokenizer_sha256: str
    new_tokens: Sequence[int]  # ids without a row in the weights
    prompts: "Sequence[Prompt]"  # evaluations show completions of these

    def fingerprints(self) -> dict[str, list[str]]:
        """Return the content fingerprints of each split's datasets, for provenance.json."""
        splits = {"train": self.train, **self.evaluation}
        return {name: [data.fingerprint for data in rows.datasets] for name, rows in splits.items()}


def load_run_tokenizer(settings: RunSettings) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer and compare it with the model's. Raises ConfigurationError."""
    directory = _tokenizer_directory(settings)
    tokenizer = load_tokenizer(directory)
    compare_with_model(settings, tokenizer, directory)
    return tokenizer


def _tokenizer_directory(settings: RunSettings) -> str:
    """Return the tokenizer's path: as set, else the data's, else the model's or init_from's."""
    if settings.data.tokenizer_name_or_path:
        return settings.data.tokenizer_name_or_path
    source = next(iter(train_sources(settings.data.train_data)))
    directory = _open(source).tokenizer_path
    if directory is not None and directory.is_dir():
        return str(directory)
    own = settings.model.model_name_or_path or stage_tokenizer(settings)
    if own is None:
        where = f"its tokenizer should be in {directory}" if directory else "it names no tokenizer"
        raise ConfigurationError(
            f"{source}: {where}, and a model from scratch has none of its own: give "
            "--tokenizer_name_or_path."
        )
    if directory is not None:
        logger.info("tokenizer: that of %s; %s, of the data, is not there", own, directory)
    return own


def load_run_data(
    settings: RunSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    fine_tuning: bool,
) -> RunData:
    """Open, check and pack every split.

    For fine-tuning each document needs a token to train on, and --on_overlong says what happens to
    documents that are too long. Pretraining splits long documents. Raises ConfigurationError with
    the problems of all splits.
    """
    data = settings.data
    sources, splits = train_sources(data.train_data), eval_splits(data.eval_data)
    named = [("train", directory) for directory in sources] + list(splits.items())
    vocabulary = config.get_text_config().vocab_size
    sha256 = tokenizer_sha256(tokenizer)  # takes most of a second
    opened, problems = list[TokenDataset](), list[str]()
    for split, directory in named:
        try:
            # If the directory has several splits, take the one with this name.
            dataset = _open(directory, split)
        except ConfigurationError as error:
            problems += error.problems
            continue
        opened.append(dataset)
        problems += dataset_problems(dataset, vocabulary, needs_loss_tokens=fine_tuning)
        problems += _tokenizer_problems(dataset, tokenizer, sha256)
    if problems:
        raise ConfigurationError(problems)
    plans = [
        plan_packing(
            dataset.lengths,
            data.sequence_length,
            data.packing,
            data.on_overlong if fine_tuning else "split",
            has_targets=dataset.has_targets if fine_tuning else None,
            where=str(dataset.path),
        )
        for dataset in opened
    ]
    for (name, _), dataset, plan in zip(named, opened, plans, strict=True):
        most = data.max_eval_sequences if name in splits else None
        logger.info("%s: %s", name, packing_line(dataset, plan, most))
        if name in splits:
            warn_of_small_split(name, dataset)
    padding, first = _padding_token(tokenizer, vocabulary), len(sources)
    evaluation = zip(splits, opened[first:], plans[first:], strict=True)
    weights = [weight for weight in sources.values() if weight is not None]
    return RunData(
        PackedDataset(opened[:first], plans[:first], padding),
        {name: PackedDataset([rows], [plan], padding) for name, rows, plan in evaluation},
        weights or None,
        sha256,
        new_token_ids(settings, tokenizer),
        _prompts(settings, tokenizer, config, opened[:first] if fine_tuning else ()),
    )


def _padding_token(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> int:
    """Return a token of the model for padding. No document sees it, and it is not trained on."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None and token < vocabulary), 0)


def _prompts(
    settings: RunSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    examples: Sequence[TokenDataset],
) -> "Sequence[Prompt]":
    """Load `sample_prompts`. Raises ConfigurationError if prompt and completion are too long.

    The prompts are chats if a dataset in `examples` has chats or does not tell how it was made.
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
    used = tokenizer.name_or_path
    hint = (
        "Leave --tokenizer_name_or_path out, so that the training data's own counts, and prepare "
        f"data that was made otherwise again: prepare_data.py --tokenizer_name_or_path {used}."
    )
    if dataset.description.tokenizer.get("sha256") not in (None, sha256):
        found, folder = "", dataset.tokenizer_path
        if folder is not None and folder.is_dir():
            made_by = load_tokenizer(str(folder))
            found = ": it has " + "; ".join(differences(made_by, tokenizer))
        return [f"{dataset.path} was made with another tokenizer than {used}{found}. {hint}"]
    if dataset.description.chat_template_sha256 not in (None, chat_template_sha256(tokenizer)):
        return [
            f"the chats of {dataset.path} were rendered with another chat template than that of "
            f"the tokenizer at {used}, which final/ would have. {hint}"
        ]
    return []


def _open(directory: str, split: str = "train") -> TokenDataset:
    """Open a dataset, first on rank 0. The other ranks find its measurements in the disk cache."""
    opened: list[TokenDataset] = []
    on_rank_0(lambda: opened.append(open_token_dataset(directory, split)))
    return opened[0] if opened else open_token_dataset(directory, split)


def packing_line(dataset: TokenDataset, plan: PackPlan, most: int | None = None) -> str:
    """Return the log line of a packed dataset: documents, tokens, sequences, tokens left out.

    `most`: the number of sequences that an evaluation reads; None: all.
    """
    found = dataset.statistics
    fill = plan.sequence_tokens.mean() / plan.sequence_length
    trained = "every token trained on"
    if dataset.loss_mask is not None:
        trained = f"{found.loss_tokens / found.tokens:.1%} of them trained on ({dataset.loss_mask})"
    line = (
        f"{dataset.path}: {found.documents:,} documents, {found.tokens:,} tokens in "
        f"{plan.sequences:,} sequences of {plan.sequence_length:,} ({fill:.1%} filled), {trained}"
    )
    if treated := [f"{count:,} {what}" for what, count in plan.counts.items() if count]:
        line += f"; documents {', '.join(treated)}"
    if plan.left_out_tokens:
        line += f"; {plan.left_out_tokens:,} tokens left out"
    if most is not None and most < plan.sequences:
        line += f"; evaluations take {most:,} of these sequences, always the same ones"
    return line
