"""A pre-tokenized dataset on disk, opened without copying a token, and what is wrong with it."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.columns import (
    IGNORED_LABEL,
    LABELS,
    PADDING,
    TOKENS,
    ListColumn,
    data_files,
    find_split,
    loss_mask_among,
    open_columns,
    trained_on,
)
from utils.data.description import (
    DESCRIBE_AGAIN,
    DESCRIPTION_FILE,
    Description,
    Statistics,
    changed_files,
    check_contents,
    measure,
    measure_once,
    read_description,
    write_description,
)
from utils.data.packing import Segments

logger = logging.getLogger(__name__)


READ_AGAIN_TOKENS = 2**32  # about a minute's reading
ROWS_LOOKED_AT = 4096  # for padding, spread over the dataset


class TokenDataset:
    """The documents of one split, in order, read from memory-mapped Arrow files.

    Cheap to pickle for data loader workers: unpickling opens the files again by path.
    """

    def __init__(self, path: Path, description: Description, columns: dict[str, ListColumn]):
        self.path = path
        self.description = description
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[TOKENS].offsets) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "description": self.description}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.columns = open_columns(self.path)

    @property
    def statistics(self) -> Statistics:
        """Counts, extremes and first faults of the split."""
        return self.description.statistics

    @property
    def fingerprint(self) -> str:
        """Hash of the content, whatever its path and its division into files."""
        return self.description.fingerprint

    @property
    def loss_mask(self) -> str | None:
        """Name of the column that says which tokens are trained on; None: all of them."""
        return self.description.loss_mask

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the tokenizer that made the dataset, if known."""
        path = (self.description.tokenizer or {}).get("path")
        return (self.path / path).resolve() if path else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Hash of that tokenizer, if known."""
        return (self.description.tokenizer or {}).get("sha256")

    @property
    def chat_template_sha256(self) -> str | None:
        """Hash of the template that rendered its chats, if known."""
        return self.description.chat_template_sha256

    @property
    def end_of_turn_token_id(self) -> int | None:
        """Token that ends a turn of its chats, if known."""
        return (self.description.preparation or {}).get("end_of_turn_token_id")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 (documents,); a new array at each access."""
        return np.diff(self.columns[TOKENS].offsets)

    def pieces(self, segments: Segments) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return per segment its token ids, and what is not 0 where a token is trained on.

        Views in the types they are stored, where that is possible.
        """
        tokens = self.columns[TOKENS]
        bounds = tokens.bounds(*segments)
        if self.loss_mask is None:
            lengths = segments.lengths
            ones = np.ones(int(lengths.max(initial=0)), dtype=bool)
            return tokens.pieces(bounds), [ones[:length] for length in lengths.tolist()]
        mask = self.columns[self.loss_mask].pieces(bounds)
        if self.loss_mask == LABELS:
            mask = [trained_on(LABELS, labels) for labels in mask]
        return tokens.pieces(bounds), mask

    def has_targets(self, documents: np.ndarray, stop: int) -> np.ndarray:
        """Return for each document whether one of its tokens 1 to `stop` is trained on."""
        stops = np.minimum(self.lengths[documents], stop)
        if self.loss_mask is None:
            return stops >= 2
        _, masks = self.pieces(Segments(documents, np.minimum(stops, 1), stops))
        return np.fromiter((mask.any() for mask in masks), dtype=bool, count=len(documents))


def open_token_dataset(path: str | Path, default_split: str = "train") -> TokenDataset:
    """Open a split; of a folder of splits, `default_split`.

    A split without stoker.json is measured once, which reads every token; so is one whose files
    were written to or copied since then, up to READ_AGAIN_TOKENS. Under several ranks let one open
    it first: the others then find its statistics in the cache.

    Raises ConfigurationError for what is no token dataset, and for contents that are not those
    described.
    """
    directory = find_split(path, default_split)
    files = data_files(directory)
    columns = open_columns(directory)
    description = read_description(directory, files)
    if description is None:
        description = measure_once(directory, files, columns, f"has no {DESCRIPTION_FILE}")
    elif changed := changed_files(description, files):
        why = f"may have changed since {DESCRIPTION_FILE} described it (first: {changed[0]})"
        if description.statistics.tokens > READ_AGAIN_TOKENS:
            logger.warning(
                "%s %s, by the times of its files; it has too many tokens (%s) to read them again "
                "before a start, so they count as described. If the tokens did change, prepare "
                "them again. Copies that keep the times (cp -a, rsync -a) avoid this warning.",
                directory, why, f"{description.statistics.tokens:,}",
            )  # fmt: skip
        else:
            found = measure_once(directory, files, columns, why)
            check_contents(directory, description, found, changed)
    dataset = TokenDataset(directory, description, columns)
    loss_mask = loss_mask_among(columns)
    if description.loss_mask != loss_mask or description.statistics.documents != len(dataset):
        raise ConfigurationError(
            f"{directory}: {DESCRIPTION_FILE} describes {description.statistics.documents} "
            f"documents with loss mask {description.loss_mask}; the files hold {len(dataset)} with "
            f"{loss_mask}. {DESCRIBE_AGAIN}"
        )
    return dataset


def describe_split(
    directory: str | Path,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    chat_template_sha256: str | None = None,
    preparation: Mapping[str, Any] | None = None,
) -> TokenDataset:
    """Measure a split that was just written, write its stoker.json and return it opened.

    tokenizer: {"path": relative to `directory`, "sha256": ..., "vocabulary_size": ...}.
    preparation: what the preparation wants remembered (sources, settings, counts); JSON values.
    """
    split = Path(directory).resolve()
    columns = open_columns(split)
    loss_mask = loss_mask_among(columns)
    statistics, fingerprint = measure(columns, loss_mask)
    description = Description(
        statistics, fingerprint, loss_mask, tokenizer, chat_template_sha256, preparation
    )
    write_description(split, data_files(split), description)
    return TokenDataset(split, description, columns)


def dataset_problems(
    dataset: TokenDataset, vocabulary_size: int, needs_loss_tokens: bool
) -> list[str]:
    """Return what is wrong with the content of a dataset, each with its first row.

    needs_loss_tokens: every document must have a target (fine-tuning).
    """
    found = dataset.statistics
    problems = []
    if found.max_token_id is not None and found.max_token_id >= vocabulary_size:
        problems.append(
            f"row {found.max_token_row} holds token id {found.max_token_id}, but the vocabulary "
            f"ends at {vocabulary_size - 1}: prepare it with the tokenizer of this model, or give "
            "that new tokens (prepare_data.py --add_tokens)."
        )
    if found.min_token_id is not None and found.min_token_id < 0:
        problems.append(
            f"row {found.min_token_row} holds token id {found.min_token_id}; ids start at 0."
        )
    if found.first_empty_row is not None:
        problems.append(
            f"row {found.first_empty_row} is empty ({found.empty_documents} such rows); remove "
            "empty rows and save the dataset again."
        )
    if found.first_padded_row is not None:
        problems.append(
            f"row {found.first_padded_row} is padded (attention_mask has a 0); packing needs bare "
            "documents: tokenize without padding."
        )
    problems.extend(_padding_problems(dataset))
    if found.first_bad_mask_row is not None:
        problems.append(
            f"row {found.first_bad_mask_row}: {dataset.loss_mask} has a value other than 0 and 1."
        )
    if found.first_differing_label_row is not None:
        problems.append(
            f"row {found.first_differing_label_row}: a label is neither {IGNORED_LABEL} nor the "
            "input id at its index; labels must not be shifted, the model does that."
        )
    if needs_loss_tokens and found.first_row_without_loss is not None:
        problems.append(
            f"row {found.first_row_without_loss} has no token to learn from: {dataset.loss_mask} "
            f"masks everything after its first token ({found.documents_without_loss} such rows); "
            "remove such rows, or check the chat template or masking that made them."
        )
    return [f"{dataset.path}: {problem}" for problem in problems]


def _padding_problems(dataset: TokenDataset) -> Iterator[str]:
    """Detect a dataset that was padded to one length and has no attention_mask that says so.

    Rows of one length, of which many end (or begin) in one token over and over: four times in a
    twentieth of them, or twice and more in half of them. Text that was cut ends in many tokens.
    """
    found = dataset.statistics
    length = found.longest_document
    if PADDING in dataset.columns or found.documents < 2 or length < 4:
        return
    if length != found.shortest_document:
        return
    rows = np.arange(0, found.documents, -(-found.documents // ROWS_LOOKED_AT))
    tokens, masks = dataset.pieces(Segments(rows, np.zeros_like(rows), np.full_like(rows, length)))
    for side, where in ((-1, "end"), (1, "begin")):
        runs = {row: _run(ids[::side]) for row, ids in enumerate(tokens)}
        repeated = [token for token, count in runs.values() if count > 1]
        token = max(set(repeated), key=repeated.count, default=None)
        padded = {row: count for row, (own, count) in runs.items() if count > 1 and own == token}
        long = [row for row, count in padded.items() if count >= 4]
        varies = len(set(padded.values())) > 1  # a doubled BOS does not
        is_common = varies and len(padded) >= max(2, 0.5 * len(rows))
        if len(long) < max(2, 0.05 * len(rows)) and not is_common:
            continue
        if side == 1 or any(masks[row][::-1][: count - 1].any() for row, count in padded.items()):
            yield (
                f"every row has {length} tokens and {len(padded)} of the {len(rows)} looked at "
                f"{where} in token {token} over and over (first: row {rows[next(iter(padded))]}): "
                "it was padded, and the padding would be trained on or attended to; tokenize "
                "without padding. If these tokens are meant, save an attention_mask of ones."
            )


def _run(tokens: np.ndarray) -> tuple[int, int]:
    """Return the first token and how many times it comes before another one."""
    others = np.flatnonzero(tokens != tokens[0])
    return int(tokens[0]), int(others[0]) if others.size else len(tokens)
