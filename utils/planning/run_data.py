"""The packed splits of a run: opened, checked against the tokenizer, and packed into rows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from utils.config.arguments import DataArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.loader import PackedDataset
from utils.data.packing import PackPlan, plan_packing
from utils.data.token_dataset import TokenDataset, dataset_problems, open_token_dataset
from utils.data.tokenizers import (
    chat_template_sha256,
    differences,
    load_tokenizer,
    tokenizer_sha256,
)
from utils.model.stages import stage_tokenizer
from utils.model.vocabulary import compare_with_model, new_token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Vocabulary:
    """What every dataset is compared with; a large vocabulary takes most of a second to hash."""

    tokenizer: PreTrainedTokenizerBase
    sha256: str
    rows: int  # of the model's embedding

    @property
    def padding(self) -> int:
        """A token that the model has: it is not trained on, and no document sees it."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None and token < self.rows:
                return token
        return 0


@dataclass(frozen=True)
class RunData:
    """What a run trains and evaluates on; `weights` is None when each row counts alike."""

    train: PackedDataset
    evaluation: dict[str, PackedDataset]
    weights: list[float] | None
    tokenizer_sha256: str
    new_tokens: Sequence[int]  # ids that the model's weights have no row for

    def fingerprints(self) -> dict[str, list[str]]:
        """Return the content fingerprints of every split's datasets, for the provenance."""
        splits = {"train": self.train, **self.evaluation}
        return {name: [data.fingerprint for data in rows.datasets] for name, rows in splits.items()}


def load_run_tokenizer(settings: RunSettings) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer, compared with the model's; raises ConfigurationError."""
    directory = tokenizer_directory(settings)
    tokenizer = load_tokenizer(directory)
    compare_with_model(settings, tokenizer, directory)
    return tokenizer


def tokenizer_directory(settings: RunSettings) -> str:
    """Return where the run's tokenizer is: as given, the data's, or that of model or stage.

    Raises ConfigurationError when training from scratch on data that names no tokenizer.
    """
    if settings.data.tokenizer_name_or_path:
        return settings.data.tokenizer_name_or_path
    source = settings.data.train_sources[0].directory
    directory = _first_rank_first(lambda: open_token_dataset(source)).tokenizer_path
    if directory is not None and directory.is_dir():
        return str(directory)
    own = settings.model.model_name_or_path or stage_tokenizer(settings)
    if own and directory is not None:
        logger.info("tokenizer: that of %s; %s, of the data, is not there", own, directory)
    if own:
        return own
    if directory is None:
        raise ConfigurationError(
            f"{source} does not say which tokenizer made it (it has no stoker.json), and a model "
            "from scratch has none of its own: give --tokenizer_name_or_path."
        )
    raise ConfigurationError(
        f"the tokenizer of {source} should be in {directory}, which is not there: copy it "
        "along with the data, or give --tokenizer_name_or_path."
    )


def load_run_data(
    settings: RunSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    fine_tuning: bool,
) -> RunData:
    """Open, check and pack every split; training ranks read no text and map no dataset.

    Fine-tuning needs a loss-bearing token in every document and does with long ones what
    --on_overlong says; pretraining splits them. Raises ConfigurationError with the problems of all
    splits at once.
    """
    data = settings.data
    sources = data.train_sources
    named = [("train", source.directory) for source in sources]
    named += list(data.eval_splits.items())
    rows = config.get_text_config().vocab_size
    vocabulary = _Vocabulary(tokenizer, tokenizer_sha256(tokenizer), rows)
    problems: list[str] = []
    opened: list[TokenDataset] = []
    for split, directory in named:
        try:
            # An evaluation split of a folder of splits goes by its own name.
            opened.append(_open(directory, split, vocabulary, fine_tuning))
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    made = [_pack(dataset, data, fine_tuning) for dataset in opened]
    packed = {
        name: _packed(name, [made[index]], vocabulary.padding)
        for index, (name, _) in enumerate(named[len(sources) :], start=len(sources))
    }
    weights = [source.weight for source in sources if source.weight is not None]
    train = _packed("train", made[: len(sources)], vocabulary.padding)
    new = new_token_ids(settings, tokenizer)
    return RunData(train, packed, weights or None, vocabulary.sha256, new)


def _open(directory: str, split: str, run: _Vocabulary, fine_tuning: bool) -> TokenDataset:
    dataset = _first_rank_first(lambda: open_token_dataset(directory, split))
    problems = dataset_problems(dataset, run.rows, needs_loss_tokens=fine_tuning)
    problems += _tokenizer_problems(dataset, run)
    if problems:
        raise ConfigurationError(problems)
    return dataset


def _tokenizer_problems(dataset: TokenDataset, run: _Vocabulary) -> list[str]:
    """Say what the tokenizer or the chat template of a dataset has otherwise than the run's."""
    used = run.tokenizer.name_or_path
    hint = (
        "Leave --tokenizer_name_or_path out, so that the training data's own counts, and prepare "
        f"data that was made otherwise again: prepare_data.py --tokenizer_name_or_path {used}."
    )
    if dataset.description.tokenizer.get("sha256") not in (None, run.sha256):
        found, ends, folder = "", "", dataset.tokenizer_path
        if folder is not None and folder.is_dir():
            made_by = load_tokenizer(str(folder))
            found = ": it has " + "; ".join(differences(made_by, run.tokenizer))
            ends = f" Its documents end with {made_by.eos_token}."
        return [
            f"{dataset.path} was made with another tokenizer than the one at {used}{found}.{ends} "
            f"{hint}"
        ]
    template = dataset.description.chat_template_sha256
    if template not in (None, chat_template_sha256(run.tokenizer)):
        return [
            f"the chats of {dataset.path} were rendered with another chat template than that of "
            f"the tokenizer at {used}, which final/ would have. {hint}"
        ]
    return []


def _first_rank_first(open_dataset: Callable[[], TokenDataset]) -> TokenDataset:
    """Let rank 0 measure a dataset once where that has to be; the others find the result cached.

    A refusal waits until they have all looked: else rank 0 would leave the others behind.
    """
    with PartialState().main_process_first():
        try:
            return open_dataset()
        except ConfigurationError as error:
            refusal = error
    raise refusal


def _pack(
    dataset: TokenDataset, data: DataArguments, fine_tuning: bool
) -> tuple[TokenDataset, PackPlan]:
    on_overlong = data.on_overlong if fine_tuning else "split"
    plan = plan_packing(
        dataset.lengths,
        data.sequence_length,
        data.packing,
        on_overlong,
        has_targets=dataset.has_targets if fine_tuning else None,
        where=str(dataset.path),
    )
    return dataset, plan


def _packed(name: str, rows: list[tuple[TokenDataset, PackPlan]], padding: int) -> PackedDataset:
    for dataset, plan in rows:
        logger.info("%s: %s", name, packing_line(dataset, plan))
    datasets, plans = zip(*rows, strict=True)
    return PackedDataset(datasets, plans, pad_token_id=padding)


def packing_line(dataset: TokenDataset, plan: PackPlan) -> str:
    """Write out what packing made of a dataset: documents, tokens, rows, and what was left out."""
    found = dataset.statistics
    fill = plan.sequence_tokens.mean() / plan.sequence_length
    line = (
        f"{_shortened(dataset.path)}: {found.documents:,} documents, {found.tokens:,} tokens in "
        f"{plan.sequences:,} sequences of {plan.sequence_length:,} ({fill:.1%} filled)"
    )
    if dataset.loss_mask is None:
        line += ", every token trained on"
    else:
        line += f", {found.loss_tokens / found.tokens:.1%} of them trained on ({dataset.loss_mask})"
    told = [f"{count:,} {what}" for what, count in plan.counts.items() if count]
    if told:
        line += f"; documents {', '.join(told)}"
    if plan.left_out_tokens:
        line += f"; {plan.left_out_tokens:,} tokens left out"
    return line


def _shortened(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
