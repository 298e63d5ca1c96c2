"""Token datasets on disk: opening, memory-mapped access and checks of the content."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.arrow_columns import (
    IGNORED_LABEL,
    LABELS,
    PADDING,
    TOKENS,
    ListColumn,
    data_files,
    find_split,
    open_columns,
    trained_on,
)
from utils.data.description import (
    DATASET_FORMAT,
    DESCRIPTION_FILE,
    Description,
    describe_columns,
    measure_once,
    read_description,
    states_of,
)
from utils.data.packing import PackPlan, Segments
from utils.host.atomic_files import from_here, paths_inside, replace_text

logger = logging.getLogger(__name__)

# In a held-out split below these sizes, the noise of the loss is larger than most effects.
FEW_DOCUMENTS, FEW_LOSS_TOKENS = 50, 10_000
READ_AGAIN_TOKENS = 2**32  # reading this many tokens takes about a minute
ROWS_LOOKED_AT = 4096  # rows that are checked for padding, spread over the dataset
PADDING_RUN = 4  # this many equal tokens at the start or end of a row may be padding


@dataclass(eq=False)
class TokenDataset:
    """The documents of one split, in order, read from memory-mapped Arrow files.

    The files are read from `folder`, which is `path` or a copy of `path`. A pickle of the dataset
    has only paths and description. A data worker that unpickles it opens the files itself.
    """

    path: Path
    description: Description
    columns: dict[str, ListColumn]
    folder: Path

    def __len__(self) -> int:
        return len(self.columns[TOKENS].offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_split, (self.path, self.description, self.folder)

    @property
    def loss_mask(self) -> str | None:
        """Name of the column that marks trained tokens, or None if all tokens are trained on."""
        return self.description.loss_mask

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the tokenizer that made the dataset, or None if unknown.

        Raises ConfigurationError if the description names a folder that is not beside the split.
        """
        path = self.description.tokenizer.get("path")
        if not path:
            return None
        folder = Path(os.path.normpath(self.path / str(path)))
        if not folder.is_relative_to(self.path.parent):  # foreign data must not name other folders
            raise ConfigurationError(
                f"{self.path / DESCRIPTION_FILE} names the tokenizer {path!r}, outside of "
                f"{self.path.parent}: put it there, and write ../NAME."
            )
        return folder

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 (documents,), computed at each access."""
        return np.diff(self.columns[TOKENS].offsets)

    def pieces(self, segments: Segments) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return two lists: the token ids of each segment, and the loss mask of each segment.

        A mask is not 0 for trained tokens. Token ids are views of the stored data. Masks are also
        views, unless they are computed from labels.
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
        """Return for each document whether one of its tokens [1, stop) is trained on (bool)."""
        stops = np.minimum(self.lengths[documents], stop)
        if self.loss_mask is None:
            return stops >= 2
        _, masks = self.pieces(Segments(documents, np.minimum(stops, 1), stops))
        return np.fromiter((mask.any() for mask in masks), dtype=bool, count=len(documents))


def _open_split(path: Path, description: Description, folder: Path) -> TokenDataset:
    files = [folder / name for name in description.files] or data_files(folder)
    return TokenDataset(path, description, open_columns(path, files), folder)


def open_token_dataset(
    path: str | Path, default_split: str = "train", known: Collection[str] = (),
    staged: tuple[Path, Path] | None = None,
) -> TokenDataset:  # fmt: skip
    """Open the split at `path`, or the split `default_split` in the folder `path`.

    `staged`: (the split's folder, a copy of this folder to read instead).

    `known`: fingerprints of data that the run has used. If prepare_data.py --append has enlarged
    the split since then, the older version with one of these fingerprints is opened.

    Every token is read once if stoker.json is missing, or if its file sizes or modification times
    differ from the files. Exception: if only the times differ, a split of more than 2**32 tokens is
    not read. Let one rank open the split first. The other ranks then find the statistics in the
    disk cache.

    Raises ConfigurationError if `path` is no token dataset, or if stoker.json describes other data.
    """
    directory = staged[0] if staged else find_split(path, default_split)
    folder = staged[1] if staged else directory
    files, described = data_files(folder), read_description(folder)
    if described is None:
        columns = open_columns(directory, files)
        found = measure_once(directory, files, columns, f"has no {DESCRIPTION_FILE}")
        return TokenDataset(directory, found, columns, folder)
    if described.earlier:
        files = _files_after_append(folder, files, described)
        newest, described = described.statistics, described.version(known)
        if described.statistics is not newest:
            logger.info("%s has grown since this run began, which keeps its first %s documents",
                        directory, f"{described.statistics.documents:,}")  # fmt: skip
            files = files[: len(described.files)]
    columns = open_columns(directory, files)
    dataset = TokenDataset(directory, described, columns, folder)
    sizes, times = states_of(files)
    same_sizes = described.files == sizes
    if same_sizes and list(described.modified_ns.items()) == list(times.items()):
        return dataset
    why = f"has other files, or of another time, than {DESCRIPTION_FILE} says"
    if same_sizes and described.statistics.tokens > READ_AGAIN_TOKENS:
        logger.warning(
            "%s %s; they are too large to read again before a start, so the description counts. If "
            "the tokens did change, prepare them again. Copies that keep the times (cp -a, rsync "
            "-a) avoid this warning.", directory, why,
        )  # fmt: skip
    elif measure_once(directory, files, columns, why).fingerprint != described.fingerprint:
        raise ConfigurationError(
            f"{directory}: {DESCRIPTION_FILE} describes other contents, so the files were damaged "
            "or edited after it was written. Prepare or copy the data again, or delete "
            f"{DESCRIPTION_FILE} to train on the files as they are."
        )
    return dataset


def _files_after_append(directory: Path, listed: list[Path], described: Description) -> list[Path]:
    """Return the paths of a split's Arrow files after documents were appended to the split.

    An append writes stoker.json (`described`) before state.json, which lists the files `listed`. If
    an append was killed in between, state.json lists only the older files. In this case the files
    in stoker.json are returned.
    """
    names = list(described.files)
    if [file.name for file in listed] != names[: described.earlier[-1]["files"]]:
        return listed
    return list(paths_inside(directory, names, directory / DESCRIPTION_FILE, links=True).values())


def describe_split(
    directory: str | Path, files: Sequence[Path] | None = None, **origin: Any
) -> TokenDataset:
    """Measure a new split, write its stoker.json, and return the opened split.

    origin: further fields of Description. files: the Arrow files, by default the files in
    state.json
    """
    split = Path(directory).resolve()
    files = data_files(split) if files is None else files
    sizes, times = states_of(files)
    found = replace(
        describe_columns(open_columns(split, files)), files=sizes, modified_ns=times, **origin
    )
    content = {"format": DATASET_FORMAT, **asdict(found)}
    replace_text(split / DESCRIPTION_FILE, json.dumps(content, indent=1) + "\n")
    return _open_split(split, found, split)


def dataset_problems(
    dataset: TokenDataset, vocabulary_size: int, needs_loss_tokens: bool
) -> list[str]:
    """Return messages for the user about faults in a dataset's content, [] without a fault.

    Most messages name the first faulty row. needs_loss_tokens: true if every document needs a
    trained token after its first token, as in fine-tuning.
    """
    found, mask = dataset.description.statistics, dataset.loss_mask
    without_loss = found.first_row_without_loss if needs_loss_tokens else None
    rows = {
        "is empty; remove empty rows and save the dataset again.": found.first_empty_row,
        "is padded (attention_mask has a 0); packing needs bare documents: tokenize without "
        "padding.": found.first_padded_row,
        f"has a value other than 0 and 1 in {mask}.": found.first_bad_mask_row,
        f"has a label that is neither {IGNORED_LABEL} nor the input id at its index; labels must "
        "not be shifted, the model does that.": found.first_differing_label_row,
        f"has no token to learn from: {mask} masks everything after its first token; remove such "
        "rows, or check the chat template or masking that made them.": without_loss,
    }
    problems = [f"row {row} {fault}" for fault, row in rows.items() if row is not None]
    if found.max_token_id is not None and found.max_token_id >= vocabulary_size:
        problems.append(
            f"holds token id {found.max_token_id}, but the vocabulary ends at "
            f"{vocabulary_size - 1}: prepare it with the tokenizer of this model, or give that new "
            "tokens (prepare_data.py --add_tokens)."
        )
    if found.min_token_id is not None and found.min_token_id < 0:
        problems.append(f"holds token id {found.min_token_id}; ids start at 0.")
    problems.extend(_padding_problem(dataset))
    return [f"{dataset.path}: {problem}" for problem in problems]


def warn_of_small_split(name: str, dataset: TokenDataset) -> None:
    """Log a warning if a held-out split is too small for a precise loss."""
    found = dataset.description.statistics
    if found.documents < FEW_DOCUMENTS or found.loss_tokens < FEW_LOSS_TOKENS:
        logger.warning(
            f"{name}: a small held-out split ({found.documents:,} documents, {found.loss_tokens:,} "
            f"tokens with a loss): below {FEW_DOCUMENTS} documents or {FEW_LOSS_TOKENS:,} tokens "
            "its loss is too noisy to compare runs"
        )


def read_skipped(file: str | None, datasets: Sequence[TokenDataset]) -> list[np.ndarray]:
    """Return for each dataset the documents to skip, as ascending row numbers, int64.

    `file`: the setting skip_documents, a file with one document per line, or None. Raises
    ConfigurationError if the file cannot be read, or if a line names no document of the run.
    """
    found: list[set[int]] = [set() for _ in datasets]
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n") if file else []
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"skip_documents {file}: cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line) if line.lstrip().startswith("{") else {}
            if content:
                name, row = content["dataset"], str(content["document"])
            else:
                name, row = line.rsplit(maxsplit=1)
            path = Path(name).expanduser().resolve()
            places = [data.path in (path, path / "train") for data in datasets]
            source, document = places.index(True), int(row)
            described = datasets[source].description
            fingerprint = content.get("fingerprint", described.fingerprint)
            # The data of the line may be an older version, from before an append.
            same_data = fingerprint == described.version([fingerprint]).fingerprint
            if not same_data or not 0 <= document < len(datasets[source]):
                raise ValueError
        except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
            rows = ", ".join(f"{data.path} has rows 0 to {len(data) - 1}" for data in datasets)
            raise ConfigurationError(
                f"skip_documents {file}, line {number}: {line[:80]!r} names no document that the "
                f"run trains on ({rows}; data that was made again has another fingerprint): give "
                "lines of status.py RUN --step N --json, or DATASET ROW."
            ) from error
        found[source].add(document)
    return [np.array(sorted(rows), dtype=np.int64) for rows in found]


def packing_line(dataset: TokenDataset, plan: PackPlan, most: int | None = None) -> str:
    """Return the log line of a packed dataset: documents, tokens, sequences and unused tokens.

    `most`: the largest number of sequences in an evaluation. None means no limit.
    """
    found = dataset.description.statistics
    fill = plan.sequence_tokens.mean() / plan.sequence_length
    line = (
        f"{from_here(dataset.path)}: {found.documents:,} documents, {found.tokens:,} tokens in "
        f"{plan.sequences:,} sequences of {plan.sequence_length:,} ({fill:.1%} filled)"
    )
    if dataset.loss_mask is not None:
        line += f", {found.loss_tokens / found.tokens:.1%} of them trained on"
    if treated := [f"{count:,} {what}" for what, count in plan.counts.items() if count]:
        line += f"; documents {', '.join(treated)}"
    if plan.left_out_tokens:
        line += f"; {plan.left_out_tokens:,} tokens left out"
    if most is not None and most < plan.sequences:
        line += f"; evaluations take {most:,} of these sequences, always the same ones"
    return line


def _padding_problem(dataset: TokenDataset) -> Iterator[str]:
    """Yield a message if a dataset without attention_mask seems to be padded to one length.

    The dataset seems padded if all rows have one length, and 5 % of the rows (at least two) begin
    or end with 4 copies of one token. Copies at the end count only if they are trained on.
    """
    found = dataset.description.statistics
    length = found.longest_document
    if PADDING in dataset.columns or length != found.shortest_document or length < PADDING_RUN:
        return
    rows = np.arange(0, found.documents, -(-found.documents // ROWS_LOOKED_AT))
    for where, start in (("end", length - PADDING_RUN), ("begin", 0)):
        starts = np.full_like(rows, start)
        tokens, masks = map(np.stack, dataset.pieces(Segments(rows, starts, starts + PADDING_RUN)))
        repeated = (tokens == tokens[:, :1]).all(axis=1)
        values, counts = np.unique(tokens[repeated, 0], return_counts=True)
        if not counts.size or counts.max() < max(2, 0.05 * len(rows)):
            continue
        token = values[counts.argmax()]
        # Padding at the beginning is attended to, even if it is not trained on.
        if where == "begin" or masks[repeated & (tokens[:, 0] == token)].any():
            yield (
                f"every row has {length} tokens and {counts.max()} of the {len(rows)} looked at "
                f"{where} in token {token} over and over: it was padded, and the padding would be "
                "trained on or attended to; tokenize without padding. If these tokens are meant, "
                "save an attention_mask of ones."
            )
