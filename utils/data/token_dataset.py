"""What a split holds, found by reading every token: once, then it is kept for later starts.

Kept by the files' paths, order, sizes and modification times, and never in the user's folder.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.columns import (
    LABELS,
    PADDING,
    TOKENS,
    Bounds,
    ListColumn,
    data_files,
    find_split,
    loss_mask_among,
    open_columns,
)
from utils.data.description import (
    DESCRIBE_AGAIN,
    DESCRIPTION_FILE,
    Description,
    changed_files,
    check_contents,
    read_description,
    write_description,
)
from utils.data.packing import Segments
from utils.data.statistics import IGNORED_LABEL, Statistics, bears_loss, measure
from utils.support.files import cache_path, file_states, read_cache, write_cache

logger = logging.getLogger(__name__)


def measured_once(
    directory: Path, files: Sequence[Path], columns: Mapping[str, ListColumn], why: str
) -> Description:
    """Return statistics, fingerprint and loss mask of a split; `why` says what asks for it."""
    path = cache_path("statistics", file_states(files))
    found = read_cache(path, _description)
    if found is None:
        tokens = int(columns[TOKENS].offsets[-1])
        logger.info("%s %s: measuring its %s tokens once.", directory, why, f"{tokens:,}")
        loss_mask = loss_mask_among(columns)
        statistics, fingerprint = measure(columns, loss_mask)
        found = Description(statistics, fingerprint, loss_mask)
        write_cache(path, _content(found))
    return found


def _content(found: Description) -> dict[str, Any]:
    return {
        "statistics": found.statistics.as_dict(),
        "fingerprint": found.fingerprint,
        "loss_mask": found.loss_mask,
    }


def _description(content: Mapping[str, Any]) -> Description:
    return Description(
        statistics=Statistics.from_dict(content["statistics"]),
        fingerprint=content["fingerprint"],
        loss_mask=content["loss_mask"],
    )


# A pre-tokenized dataset on disk, opened without copying a token.

READ_AGAIN_TOKENS = 2**32  # about a minute's reading
ROWS_LOOKED_AT = 4096  # for padding, spread over the dataset


class TokenDataset:
    """The documents of one split, in row order, read from memory-mapped Arrow files.

    Cheap to hand to data loader workers: unpickling opens the files again by path.

    Attributes: `path` (the split's directory), `description`, `columns` (by name).
    """

    def __init__(self, path: Path, description: Description, columns: dict[str, ListColumn]):
        self.path = path
        self.description = description
        self.columns = columns

    def __len__(self) -> int:
        return len(self._tokens.offsets) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "description": self.description}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.columns = open_columns(self.path)

    @property
    def statistics(self) -> Statistics:
        """Counts, extremes and first faults of the whole split."""
        return self.description.statistics

    @property
    def fingerprint(self) -> str:
        """Hash of the content; independent of the path and of how it is cut into files."""
        return self.description.fingerprint

    @property
    def loss_mask(self) -> str | None:
        """Name of the column that says which tokens bear loss; None: all of them do."""
        return self.description.loss_mask

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the tokenizer that made the dataset, if that is known."""
        path = (self.description.tokenizer or {}).get("path")
        return (self.path / path).resolve() if path else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Hash of that tokenizer, if it is known."""
        return (self.description.tokenizer or {}).get("sha256")

    @property
    def chat_template_sha256(self) -> str | None:
        """Hash of the template that rendered its chats, if it holds chats and says so."""
        return self.description.chat_template_sha256

    @property
    def end_of_turn_token_id(self) -> int | None:
        """Token that ends a turn of the chats, if the dataset holds chats and says so."""
        return (self.description.preparation or {}).get("end_of_turn_token_id")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 (documents,); a new array at each access."""
        return np.diff(self._tokens.offsets)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the token ids [start, stop) of a document: a view in the type they are stored."""
        return self._tokens.pieces(self._range(document, start, stop))[0]

    def loss_mask_of(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return which tokens [start, stop) of a document bear loss (bool)."""
        _, (begin,), (end,) = bounds = self._range(document, start, stop)
        if self.loss_mask is None:
            return np.ones(end - begin, dtype=bool)
        return bears_loss(self.loss_mask, self.columns[self.loss_mask].pieces(bounds)[0])

    def pieces(self, segments: Segments) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return of each segment its token ids, and what is not 0 where a token bears loss.

        Views in the types they are stored, where that is possible.
        """
        bounds = self._tokens.bounds(*segments)
        tokens = self._tokens.pieces(bounds)
        if self.loss_mask is None:
            lengths = segments.lengths
            ones = np.ones(int(lengths.max(initial=0)), dtype=bool)
            return tokens, [ones[:length] for length in lengths.tolist()]
        mask = self.columns[self.loss_mask].pieces(bounds)
        if self.loss_mask == LABELS:
            mask = [bears_loss(LABELS, labels) for labels in mask]
        return tokens, mask

    def has_targets(self, documents: np.ndarray, stop: int) -> np.ndarray:
        """Return for each document whether its first `stop` tokens hold a loss-bearing target."""
        offsets = self._tokens.offsets
        stops = np.minimum(offsets[documents + 1] - offsets[documents], stop)
        if self.loss_mask is None:
            return stops >= 2
        column = self.columns[self.loss_mask]
        pieces = column.pieces(column.bounds(documents, np.minimum(stops, 1), stops))
        bearing = (bears_loss(self.loss_mask, piece).any() for piece in pieces)
        return np.fromiter(bearing, dtype=bool, count=len(documents))

    @property
    def _tokens(self) -> ListColumn:
        return self.columns[TOKENS]

    def _range(self, document: int, start: int, stop: int | None) -> Bounds:
        length = int(self._tokens.offsets[document + 1] - self._tokens.offsets[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"[{start}, {stop}) of document {document}, which has {length} tokens")
        return self._tokens.bounds(np.array([document]), np.array([start]), np.array([stop]))


def open_token_dataset(path: str | Path, default_split: str = "train") -> TokenDataset:
    """Open a split; of a folder of splits, `default_split`.

    A split without stoker.json is measured once, which reads every token; so is one whose files
    were written to or copied since then, up to READ_AGAIN_TOKENS. Under several ranks let one open
    it first: the others then find its statistics in the cache.

    Raises ConfigurationError for what is no token dataset (missing or damaged files, wrong column
    types, nulls, masks of another length, several loss masks, rows that are packed already), and
    for contents that are not those described.
    """
    directory = find_split(path, default_split)
    files = data_files(directory)
    columns = open_columns(directory)
    loss_mask = loss_mask_among(columns)
    description = read_description(directory, files)
    if description is None:
        description = measured_once(directory, files, columns, f"has no {DESCRIPTION_FILE}")
    elif changed := changed_files(description, files):
        why = f"may have changed since {DESCRIPTION_FILE} described it (first: {changed[0]})"
        if description.statistics.tokens > READ_AGAIN_TOKENS:
            logger.warning(
                "%s %s, by the times of its files; its %s tokens are too many to be read again "
                "before a start, so they count as described. Copies that keep the times (cp -a, "
                "rsync -a) count as they are; where the tokens are others, prepare them again.",
                directory, why, f"{description.statistics.tokens:,}",
            )  # fmt: skip
        else:
            found = measured_once(directory, files, columns, why)
            check_contents(directory, description, found, changed)
    if (
        description.loss_mask != loss_mask
        or description.statistics.documents != len(columns[TOKENS].offsets) - 1
    ):
        raise ConfigurationError(
            f"{directory}: {DESCRIPTION_FILE} speaks of {description.statistics.documents} "
            f"documents with loss mask {description.loss_mask}; the files hold "
            f"{len(columns[TOKENS].offsets) - 1} with {loss_mask}. {DESCRIBE_AGAIN}"
        )
    return TokenDataset(directory, description, columns)


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
    statistics, fingerprint = measure(columns, loss_mask_among(columns))
    description = Description(
        statistics,
        fingerprint,
        loss_mask_among(columns),
        tokenizer,
        chat_template_sha256,
        preparation,
    )
    write_description(split, data_files(split), description)
    return TokenDataset(split, description, columns)


def dataset_problems(
    dataset: TokenDataset, vocabulary_size: int, needs_loss_tokens: bool
) -> list[str]:
    """Return what is wrong with the content of a dataset, each with its first row.

    needs_loss_tokens: every document must have a loss-bearing target (fine-tuning).
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
            "input id at its place; labels must not be shifted, the model does that."
        )
    if needs_loss_tokens and found.first_row_without_loss is not None:
        problems.append(
            f"row {found.first_row_without_loss} has no token to learn from: {dataset.loss_mask} "
            f"masks everything after its first token ({found.documents_without_loss} such rows); "
            "remove such rows, or check the chat template or masking that made them."
        )
    return [f"{dataset.path}: {problem}" for problem in problems]


def _padding_problems(dataset: TokenDataset) -> Iterator[str]:
    """Tell a dataset that was padded to one length and has no attention_mask to say so.

    Rows of one length, of which many end (or begin) in one token over and over: four times in a
    twentieth of them, or twice and more in half of them. Text that was cut ends in many tokens.
    """
    found = dataset.statistics
    if PADDING in dataset.columns or found.documents < 2 or found.longest_document < 4:
        return
    if found.longest_document != found.shortest_document:
        return
    step = -(-found.documents // ROWS_LOOKED_AT)
    rows = range(0, found.documents, step)
    for side, where in ((-1, "end"), (1, "begin")):
        runs = [(row, *_run(dataset.tokens(row)[::side])) for row in rows]
        lengths = [(row, token, length) for row, token, length in runs if length > 1]
        tokens = [token for _, token, _ in lengths]
        token = max(set(tokens), key=tokens.count, default=None)
        padded = [(row, length) for row, of, length in lengths if of == token]
        long = [row for row, length in padded if length >= 4]
        varies = len({length for _, length in padded}) > 1  # a doubled BOS does not
        is_common = varies and len(padded) >= max(2, 0.5 * len(rows))
        if len(long) < max(2, 0.05 * len(rows)) and not is_common:
            continue
        trained = [
            row for row, length in padded if dataset.loss_mask_of(row)[::side][: length - 1].any()
        ]
        if trained or side == 1:
            yield (
                f"every row has {found.longest_document} tokens and {len(padded)} of the "
                f"{len(rows)} looked at {where} in token {token} over and over (first: row "
                f"{padded[0][0]}): it was padded, and the padding would be trained on or attended "
                "to; tokenize without padding. If these tokens are meant, save an attention_mask "
                "of ones."
            )


def _run(tokens: np.ndarray) -> tuple[int, int]:
    """Return the first token and how often it stands there in a row."""
    others = np.flatnonzero(tokens != tokens[0])
    return int(tokens[0]), int(others[0]) if others.size else len(tokens)
