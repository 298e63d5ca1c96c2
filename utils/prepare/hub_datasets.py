"""Datasets of the Hugging Face Hub: the files of their splits, and paths in the Hub's cache.

Preparation reads only the Hub's cache, so it needs no network. fetch.py fills the cache. For each
commit and subset, fetch.py also saves the list of the files of each split in the cache.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from utils.config.preparation import PreparationArguments, Source, parse_sources
from utils.host.atomic_files import replace_text
from utils.host.hub import hub_fault
from utils.prepare.source_files import COMPRESSIONS, RECORD_KINDS, SPLIT_NAMES, Remarks
from utils.prepare.workspace import beside, earlier_hub_commits

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

Kind = Literal["dataset", "model"]
Splits = dict[str, list[str]]  # the files of each split

PARQUET_BRANCH = "refs/convert/parquet"
_DATASET = re.compile(r"(hf://datasets/)?(\w[\w.-]*/[\w.-]+)(?(1)(?:@(.+?))?/?|)")
_CHOOSE_SUBSET = "choose one in a recipe: sources: [{path: OWNER/NAME, subset: SUBSET}]"
_DATED_FILES = 100  # ask the Hub for the dates of at most this many files


@dataclass(frozen=True)
class HubDataset:
    """A Hub dataset that the settings name as a source.

    revision: None means the branch main. subset: None means the default or only subset.
    """

    name: str
    revision: str | None
    subset: str | None

    @property
    def key(self) -> str:
        """NAME@REVISION. `HubCache` and stoker.json store the dataset's commit under this key."""
        return f"{self.name}@{self.revision or 'main'}"


@dataclass(frozen=True)
class Listing:
    """The files of each split in one subset of a Hub dataset, at one commit.

    others: the names of the dataset's other subsets. mtime_ns: the time of the newest change on
    the Hub to a file, as Unix time in ns. Only the first _DATED_FILES files count. Unlike times of
    local copies, this time is the same on all machines.
    """

    subset: str
    others: Sequence[str]
    splits: Mapping[str, Sequence[str]]
    mtime_ns: int


def hub_dataset(path: str, source: Source) -> HubDataset | None:
    """Return the Hub dataset that a source's path names, or None for a local path.

    A path that exists locally is a local path, unless it begins with hf://. Raises ValueError for a
    malformed hf:// path, and for a local path with settings that only Hub datasets have.
    """
    match = _DATASET.fullmatch(path)
    if path.startswith("hf://") and match is None:
        raise ValueError("give hf://datasets/OWNER/NAME, and in a recipe subset, revision, split")
    is_file = Path(path).suffix.lower() in {*RECORD_KINDS, *COMPRESSIONS, ".txt"}
    if match and (match[1] or not (is_file or os.path.lexists(path))):
        return HubDataset(match[2], source.revision or match[3], source.subset)
    if given := [key for key in ("subset", "revision", "max_files") if getattr(source, key)]:
        raise ValueError(f"{given[0]} is for a dataset of the Hub, and this is a local path")
    return None


class HubCache:
    """The Hub's cache: in `offline_dir`, or by default in the user's HF_HOME.

    pinned_commits: {HubDataset.key: commit} of the datasets that earlier preparations of this
    output_dir have read. The same commits are read again, even if a dataset has changed on the Hub.
    commits: {HubDataset.key: commit} of the datasets that `cached_files` has found in the cache.
    """

    def __init__(self, arguments: PreparationArguments):
        from huggingface_hub import constants

        home = arguments.offline_dir
        self.folder = (Path(home) / "hub" if home else Path(constants.HF_HUB_CACHE)).absolute()
        output_dir = arguments.output_dir  # empty if there are only models to download
        folder = beside(output_dir, "new") if arguments.overwrite else Path(output_dir)
        self.pinned_commits = earlier_hub_commits(folder) if output_dir else {}
        self.commits: dict[str, str] = {}

    def resolve(
        self, kind: Kind, name: str, revision: str | None, *, ask: bool
    ) -> "ResolvedRevision":
        """Return the commit of a branch, tag or hash. ask: from the Hub, not from the cache."""
        from huggingface_hub import HfApi

        if ask and (fault := hub_fault()):
            raise ConnectionError(fault)
        return HfApi().resolve_revision(
            name, repo_type=kind, revision=revision, cache_dir=self.folder, local_files_only=not ask
        )

    def snapshot(self, kind: Kind, name: str, commit: str) -> Path:
        """Return the cache folder with the files of a commit. name: the repository's name."""
        from huggingface_hub.file_download import repo_folder_name

        repository = repo_folder_name(repo_id=name, repo_type=kind)
        return self.folder / repository / "snapshots" / commit

    def listing(self, dataset: HubDataset, *, ask: bool) -> tuple["ResolvedRevision", Listing]:
        """Return a dataset's commit and its Listing, which the cache stores as JSON.

        ask: ask the Hub for the commit, and for the Listing if the cache lacks it. Raises
        FileNotFoundError if the cache lacks the Listing and `ask` is false. Raises ValueError if
        the subset is unknown, or is not given although the dataset has no default subset.
        """
        from huggingface_hub import HfApi

        revision = self.pinned_commits.get(dataset.key, dataset.revision)
        resolved = self.resolve("dataset", dataset.name, revision, ask=ask)
        commit = resolved.resolved
        folder = self.snapshot("dataset", dataset.name, commit).parents[1] / "stoker"
        saved = folder / f"{commit}--{quote(dataset.subset or '', safe='')}.json"
        if not ask or saved.is_file():
            return resolved, Listing(**json.loads(saved.read_text(encoding="utf-8")))
        read_splits = _read_parquet_branch if dataset.revision == PARQUET_BRANCH else _read_card
        subset, subsets, splits = read_splits(dataset, commit)
        files = [file for split in splits.values() for file in split][:_DATED_FILES]
        path_infos = HfApi().get_paths_info(
            dataset.name, files, revision=commit, repo_type="dataset", expand=True
        )
        dates = [each.last_commit.date for each in path_infos if each.last_commit is not None]
        seconds = int(max(dates, default=datetime.now(UTC)).timestamp())
        others = [name for name in subsets if name != subset]
        found = Listing(subset, others, splits, seconds * 10**9)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(saved, json.dumps(asdict(found), indent=1))
        return resolved, found


def files_of_split(
    dataset: HubDataset, listing: Listing, source: Source
) -> tuple[str, Sequence[str]]:
    """Return the name of a source's split, and the names of its first `source.max_files` files.

    The split is named `source.from_split` (default: `source.split`) or a synonym, such as dev for
    validation. If from_split is not set, a dataset's only split may have any name. Raises
    ValueError if no split fits.
    """
    wanted = source.from_split or source.split
    by_meaning = {SPLIT_NAMES.get(name, name): name for name in listing.splits}
    split = wanted if wanted in listing.splits else by_meaning.get(SPLIT_NAMES.get(wanted, wanted))
    if split is None and source.from_split is None and len(listing.splits) == 1:
        (split,) = listing.splits
    if split is None:
        subset = f"subset: {dataset.subset}, " if dataset.subset else ""
        raise ValueError(
            f"has no split {wanted!r} but {', '.join(listing.splits)}: in a recipe give "
            f"{{path: {dataset.name}, {subset}split: NAME}}"
        )
    return split, list(listing.splits[split])[: source.max_files]


# --- reading the cache


def cached_files(
    cache: HubCache, source: Source, remarks: Remarks
) -> tuple[list[str], dict[str, tuple[str, int]]]:
    """Return the local paths of a source's files, and {local path: (url, mtime_ns)} of Hub files.

    url: hf://..., the same on every machine. mtime_ns: see Listing. If a path of the source is
    faulty, or its files are not all in the cache, `remarks.problems` gets a message.
    """
    paths: list[str] = []
    of_hub: dict[str, tuple[str, int]] = {}
    for path in source.paths:
        try:
            dataset = hub_dataset(path, source)
            found = _cached_dataset_files(cache, dataset, source, remarks) if dataset else {}
        except ValueError as error:
            remarks.problems.append(f"{source.split}: {path}: {error}")
            continue
        of_hub |= found
        paths.extend(found if dataset else [path])
    return paths, of_hub


def _cached_dataset_files(
    cache: HubCache, dataset: HubDataset, source: Source, remarks: Remarks
) -> dict[str, tuple[str, int]]:
    """Return {local path: (url, mtime_ns)} of cached files. Raises ValueError if one is missing."""
    from huggingface_hub.errors import RevisionResolutionError

    not_cached = (
        f"is not in the cache {cache.folder}. Run this command once where there is a network (a "
        "login node), or, if jobs cannot read that folder, with --offline_dir DIR"
    )
    try:
        revision, listing = cache.listing(dataset, ask=False)
    except (FileNotFoundError, RevisionResolutionError) as error:
        raise ValueError(f"no such local path; and the dataset of the Hub {not_cached}") from error
    commit = cache.commits[dataset.key] = revision.resolved
    split, names = files_of_split(dataset, listing, source)
    snapshot = cache.snapshot("dataset", dataset.name, commit)
    if missing := [name for name in names if not (snapshot / name).exists()]:
        raise ValueError(f"{len(missing)} of {len(names)} files, {missing[0]}: {not_cached}")
    others = [name for name in listing.splits if name != split]
    remarks.lines.say(
        f"{dataset.name}, {listing.subset}, split {split}: {len(names)} files of commit "
        f"{commit[:10]}" + (f"; other splits: {', '.join(others)}" if others else "")
    )
    if dataset.revision == PARQUET_BRANCH and "/partial-" in names[0]:
        remarks.lines.warn(
            f"{dataset.name}: of this split the Hub has converted only the first 5 GB"
        )
    url = f"hf://datasets/{dataset.name}@{commit}/"
    return {str(snapshot / name): (url + name, listing.mtime_ns) for name in names}


def check_datasets_cached(arguments: PreparationArguments) -> None:
    """Raise ConfigurationError if sources are faulty or Hub datasets are not in the cache."""
    cache, remarks = HubCache(arguments), Remarks()
    with remarks.lines:
        for source in parse_sources(arguments):
            cached_files(cache, source, remarks)
        remarks.refuse()


# --- requests to the Hub


def _read_card(dataset: HubDataset, commit: str) -> tuple[str, list[str], Splits]:
    """Return (subset, names of all subsets, {split: files}), read from the dataset's card."""
    from datasets import load_dataset_builder

    # With an empty cache, `datasets` asks the Hub. Otherwise it may use an older download.
    with tempfile.TemporaryDirectory() as empty:
        try:
            builder = load_dataset_builder(
                dataset.name, dataset.subset, revision=commit, cache_dir=empty
            )
        except ValueError as error:
            if "onfig" not in str(error):  # "Config name is missing", "BuilderConfig ... not found"
                raise
            problem = str(error).partition("Example of usage")[0].strip()
            raise ValueError(f"{problem}: {_CHOOSE_SUBSET}") from error
    prefix = f"hf://datasets/{dataset.name}@{commit}/"
    files = builder.config.data_files or {}
    if any(not file.startswith(prefix) for split in files.values() for file in split):
        raise ValueError("its card names files that are elsewhere: download those, and give a path")
    splits = {
        str(name): [file.removeprefix(prefix) for file in split] for name, split in files.items()
    }
    return builder.config.name, list(builder.builder_configs), splits


def _read_parquet_branch(dataset: HubDataset, commit: str) -> tuple[str, list[str], Splits]:
    """Return (subset, names of all subsets, {split: files}).

    The files' paths tell subset and split: SUBSET/SPLIT/NUMBER.parquet.
    """
    from huggingface_hub import HfApi

    names = HfApi().list_repo_files(dataset.name, repo_type="dataset", revision=commit)
    found: dict[str, Splits] = {}
    for file in sorted(name for name in names if PurePosixPath(name).match("*/*/*.parquet")):
        subset, split, _ = file.split("/")
        found.setdefault(subset, {}).setdefault(split.removeprefix("partial-"), []).append(file)
    chosen = dataset.subset or (next(iter(found)) if len(found) == 1 else "")
    if chosen not in found:
        raise ValueError(f"its subsets are {', '.join(found)}: {_CHOOSE_SUBSET}")
    return chosen, list(found), found[chosen]
