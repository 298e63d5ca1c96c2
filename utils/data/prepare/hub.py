"""Datasets, tokenizers and models of the Hugging Face Hub: which files they are, and fetching them.

`fetch` fills the Hub's cache where there is a network. A preparation reads from the cache alone
(`cached_files`), so that it does the same with a network and without. Which files make a split is
asked once for each commit and noted in the cache beside them, so the note travels with them.
"""

import glob
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from utils.config.errors import ConfigurationError, StorageError
from utils.config.preparation import PreparationArguments, Source, sources_of
from utils.data.prepare.sources import COMPRESSIONS, RECORD_KINDS, SPLIT_NAMES
from utils.data.prepare.workspace import commits_begun_with
from utils.support.files import replace_text
from utils.support.host import host_name

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

logger = logging.getLogger(__name__)

Kind = Literal["dataset", "model"]

PARQUET_BRANCH = "refs/convert/parquet"
_DATASET = re.compile(r"(hf://datasets/)?(\w[\w.-]*/[\w.-]+)(?(1)(?:@(.+?))?/?|)")
_MODEL = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# What loads a tokenizer and a configuration; no pickles, and no code.
_SMALL_FILES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_FOLDERS_OF_A_MODEL = {"", "additional_chat_templates"}  # not original/, metal/, onnx/
_DATED_FILES = 100  # of which the Hub is asked when they last changed


@dataclass(frozen=True)
class HubDataset:
    """A dataset as a source names it; None: the newest revision, the only or default subset."""

    name: str
    revision: str | None
    subset: str | None

    @property
    def key(self) -> str:
        """The name that a commit is recorded under."""
        return f"{self.name}@{self.revision or 'main'}"


@dataclass(frozen=True)
class Listing:
    """The files of each split of a subset at one commit; mtime_ns: when the newest was committed.

    `others` are the dataset's further subsets.
    """

    subset: str
    others: Sequence[str]
    splits: Mapping[str, Sequence[str]]
    mtime_ns: int


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset in the cache, under the name it has everywhere."""

    path: str
    url: str
    mtime_ns: int


def hub_dataset(path: str, source: Source) -> HubDataset | None:
    """Return the dataset that a path of a source names; None for a local path, which wins."""
    found = _DATASET.fullmatch(path)
    suffix = Path(path).suffix.lower()
    is_url = path.startswith("hf://")
    if not is_url and (
        found is None or os.path.lexists(path) or suffix in {*RECORD_KINDS, *COMPRESSIONS, ".txt"}
    ):
        given = [name for name in ("subset", "revision", "max_files") if getattr(source, name)]
        if given:
            raise ValueError(f"{given[0]} is for datasets of the Hub, and this is a local path")
        return None
    if found is None:
        raise ValueError("give hf://datasets/OWNER/NAME, and the rest as subset, revision, split")
    return HubDataset(found[2], source.revision or found[3], source.subset)


class HubCache:
    """The Hub's cache in the user's HF_HOME, or below `offline_dir`.

    `commits` holds, by `HubDataset.key`, those that the output folder was begun with: shards, and
    a second start, read the same files although the dataset may have changed meanwhile. `read`
    are the commits of what this preparation reads.
    """

    def __init__(self, arguments: PreparationArguments):
        from huggingface_hub import constants, is_offline_mode

        home = arguments.offline_dir
        self.folder = (Path(home) / "hub" if home else Path(constants.HF_HUB_CACHE)).absolute()
        self.is_offline = is_offline_mode()
        self.commits = commits_begun_with(Path(arguments.output_dir))
        self.read: dict[str, str] = {}

    def resolve(
        self, kind: Kind, name: str, revision: str | None, *, local: bool
    ) -> "ResolvedRevision":
        """Return the commit of a revision, from the Hub or (`local`) as the cache has it."""
        from huggingface_hub import HfApi

        return HfApi().resolve_revision(
            name, repo_type=kind, revision=revision, cache_dir=self.folder, local_files_only=local
        )

    def revision_of(self, dataset: HubDataset, *, local: bool) -> "ResolvedRevision":
        """Return the commit to read: the recorded one, else what the revision is now."""
        revision = self.commits.get(dataset.key, dataset.revision)
        return self.resolve("dataset", dataset.name, revision, local=local)

    def snapshot(self, kind: Kind, name: str, commit: str) -> Path:
        """Return the folder of the files of a commit."""
        from huggingface_hub.file_download import repo_folder_name

        repository = repo_folder_name(repo_id=name, repo_type=kind)
        return self.folder / repository / "snapshots" / commit

    def listing(self, dataset: HubDataset, commit: str) -> Listing:
        """Return the files of a dataset at a commit, as noted in the cache, or as the Hub says.

        Raises ValueError with what is wrong, FileNotFoundError offline without a note.
        """
        folder = self.snapshot("dataset", dataset.name, commit).parents[1] / "stoker"
        note = folder / f"{commit}--{quote(dataset.subset or '', safe='')}.json"
        if note.is_file():
            return Listing(**json.loads(note.read_text(encoding="utf-8")))
        if self.is_offline:
            raise FileNotFoundError(note)
        found = _ask_for_files(dataset, commit)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(note, json.dumps(asdict(found), indent=1))
        return found

    def files_of_model(self, name: str, revision: "ResolvedRevision", weights: bool) -> list[str]:
        """Return the names of a model's files that loading it needs, with or without weights."""
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            cached = get_cached_repo_tree(
                name, revision=revision.resolved, cache_dir=str(self.folder)
            )
            names = [file.path for file in cached]
        except CachedRepoTreeNotFoundError:
            names = HfApi().list_repo_files(name, revision=revision.resolved)
        wanted = [file for file in names if _belongs_to_model(file, weights)]
        if weights and not any(file.endswith(".safetensors") for file in wanted):
            raise ValueError("has no weights as safetensors, and nothing else is loaded")
        return wanted


def cached_files(
    cache: HubCache, source: Source
) -> tuple[list[str], dict[str, HubFile], list[str]]:
    """Return the paths of a source, with the cached files of its datasets in their place.

    Then these files by path, and what is wrong or not in the cache.
    """
    paths: list[str] = []
    files: dict[str, HubFile] = {}
    problems: list[str] = []
    for path in source.paths:
        try:
            dataset = hub_dataset(path, source)
            found = _cached(cache, dataset, source) if dataset else []
        except (ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
            continue
        files |= {file.path: file for file in found}
        paths.extend([file.path for file in found] if dataset else [path])
    return paths, files, problems


def _cached(cache: HubCache, dataset: HubDataset, source: Source) -> list[HubFile]:
    """Return the files that a source reads of a dataset; raises ValueError if any is missing."""
    from huggingface_hub.errors import RevisionResolutionError

    try:
        commit = cache.revision_of(dataset, local=True).resolved
        listing = cache.listing(dataset, commit)
        split, names = files_of_split(dataset, listing, source)
    except (FileNotFoundError, RevisionResolutionError) as error:
        raise ValueError(_not_in_cache(dataset, cache, dataset.key)) from error
    snapshot = cache.snapshot("dataset", dataset.name, commit)
    if missing := [name for name in names if not (snapshot / name).exists()]:
        what = f"{len(missing)} of {len(names)} files ({missing[0]})"
        raise ValueError(_not_in_cache(dataset, cache, what))
    cache.read[dataset.key] = commit
    others = [name for name in listing.splits if name != split]
    logger.info(
        f"{dataset.name}, subset {listing.subset}, split {split}: {len(names)} files of commit "
        f"{commit[:10]}" + (f"; not used: {', '.join(others)}" if others else "")
    )
    url = f"hf://datasets/{dataset.name}@{commit}/"
    return [HubFile(str(snapshot / name), url + name, listing.mtime_ns) for name in names]


def _not_in_cache(dataset: HubDataset, cache: HubCache, what: str) -> str:
    is_url_like = f"no such file or folder, and as a dataset of the Hub ({what}) "
    return (
        f"{is_url_like}it is not in the cache {cache.folder}. Where there is a network (a login "
        "node) run the same command with HF_HUB_OFFLINE=0 and that HF_HOME, or with --offline_dir "
        f"DIR, and let jobs read from there: export HF_HOME=DIR in slurm/cluster.env"
    )


def files_of_split(
    dataset: HubDataset, listing: Listing, source: Source
) -> tuple[str, Sequence[str]]:
    """Return the split that a source takes of a dataset, and its first `max_files` files.

    That is the one it names, else the one named as it; the only split needs no name. Raises
    ValueError with those that there are.
    """
    wanted = source.from_split or source.split
    by_meaning = {SPLIT_NAMES.get(name, name): name for name in listing.splits}
    split = wanted if wanted in listing.splits else by_meaning.get(SPLIT_NAMES.get(wanted, wanted))
    if split is None and source.from_split is None and len(listing.splits) == 1:
        (split,) = listing.splits
    if split is None:
        raise ValueError(
            f"has no split {wanted!r} but {', '.join(listing.splits)}: in a recipe give "
            f"{{path: {dataset.name}, {_subset_key(dataset)}split: NAME}}"
        )
    return split, list(listing.splits[split])[: source.max_files]


def _subset_key(dataset: HubDataset) -> str:
    return f"subset: {dataset.subset}, " if dataset.subset else ""


# --- which files


def _ask_for_files(dataset: HubDataset, commit: str) -> Listing:
    """Ask the Hub for the splits of a subset; the dataset's card says which files they have.

    Raises ValueError where the subset has to be given, or is none of the dataset's.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    if dataset.revision == PARQUET_BRANCH:  # has no card: SUBSET/SPLIT/NUMBER.parquet
        subset, subsets = dataset.subset, _subsets_of_parquet_branch(dataset.name, commit)
        if subset is None and len(subsets) == 1:
            (subset,) = subsets
        if subset not in subsets:
            raise ValueError(_choose_subset(dataset, list(subsets)))
        names, splits = list(subsets), subsets[subset]
    else:
        subset, names, splits = _read_card(dataset, commit)
    files = [file for split in splits.values() for file in split]
    dated = api.get_paths_info(
        dataset.name, files[:_DATED_FILES], revision=commit, repo_type="dataset", expand=True
    )
    dates = [file.last_commit.date for file in dated if file.last_commit is not None]
    seconds = max(dates, default=datetime.now(UTC)).timestamp()
    others = [name for name in names if name != subset]
    return Listing(subset, others, splits, int(seconds) * 10**9)


def _read_card(
    dataset: HubDataset, commit: str
) -> tuple[str, Sequence[str], dict[str, list[str]]]:
    """Return a dataset's subset, the names of all, and the files of its splits as its card says."""
    from datasets import get_dataset_config_names, load_dataset_builder

    # Its own cache would answer for a dataset that cannot be reached: it gets an empty one.
    with tempfile.TemporaryDirectory() as empty:
        try:
            builder = load_dataset_builder(
                dataset.name, dataset.subset, revision=commit, cache_dir=empty
            )
        except ValueError as error:
            if "onfig" not in str(error):
                raise
            names = get_dataset_config_names(dataset.name, revision=commit, cache_dir=empty)
            raise ValueError(_choose_subset(dataset, names)) from error
    prefix = f"hf://datasets/{dataset.name}@{commit}/"
    splits = {
        str(split): [file.removeprefix(prefix) for file in files]
        for split, files in (builder.config.data_files or {}).items()
    }
    if any("://" in file for files in splits.values() for file in files):
        raise ValueError("its card names files outside of the dataset: download them yourself")
    return builder.config.name, list(builder.builder_configs), splits


def _subsets_of_parquet_branch(name: str, commit: str) -> dict[str, dict[str, list[str]]]:
    from huggingface_hub import HfApi

    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(HfApi().list_repo_files(name, repo_type="dataset", revision=commit)):
        if file.endswith(".parquet") and file.count("/") == 2:
            subset, split, _ = file.split("/")
            if split.startswith("partial-"):
                logger.warning(f"{name}: of {subset} {split} the Hub has converted the first 5 GB")
            found.setdefault(subset, {}).setdefault(split.removeprefix("partial-"), []).append(file)
    return found


def _choose_subset(dataset: HubDataset, subsets: Sequence[str]) -> str:
    fault = f"has no subset {dataset.subset!r}" if dataset.subset else "has several subsets"
    return (
        f"{fault}: {', '.join(subsets)}; in a recipe choose one: "
        f"sources: [{{path: {dataset.name}, subset: {subsets[0] if subsets else 'NAME'}}}]"
    )


def _belongs_to_model(file: str, weights: bool) -> bool:
    path = PurePosixPath(file)
    if (str(path.parent) if "/" in file else "") not in _FOLDERS_OF_A_MODEL:
        return False
    if path.suffix == ".safetensors":
        return weights and not path.name.startswith("consolidated")  # the same, as Mistral has it
    return path.suffix in _SMALL_FILES


# --- fetching


@dataclass
class Wanted:
    """Files of one commit that are to be in the cache; sizes in bytes of those that are not."""

    kind: Kind
    name: str
    revision: "ResolvedRevision"
    files: dict[str, None]  # in order, each once
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} at {self.revision.resolved[:10]}"


def fetch(arguments: PreparationArguments) -> None:
    """Download what the settings name of the Hub, and is not in the cache; nothing offline.

    Says how much it is before it begins. Raises ConfigurationError with everything that the Hub
    does not have or give, StorageError where there is no room for it.
    """
    cache = HubCache(arguments)
    if cache.is_offline:
        return
    wanted: dict[tuple[str, str, str], Wanted] = {}
    problems: list[str] = []

    def want(kind: Kind, name: str, revision: "ResolvedRevision", files: Iterable[str]) -> None:
        key = (kind, name, revision.resolved)
        entry = wanted.setdefault(key, Wanted(kind, name, revision, {}, {}))
        entry.files.update(dict.fromkeys(files))

    for path, source in [(path, source) for source in sources_of(arguments) for path in source.paths]:
        try:
            if dataset := hub_dataset(path, source):
                revision = cache.revision_of(dataset, local=False)
                listing = cache.listing(dataset, revision.resolved)
                if listing.others and dataset.subset is None:
                    logger.info(f"{path}: subset {listing.subset}; not {', '.join(listing.others)}")
                want("dataset", dataset.name, revision, files_of_split(dataset, listing, source)[1])
        except Exception as error:
            problems.append(f"{path}: {fault_of('dataset', path, error)}")
    tokenizer = arguments.tokenizer_name_or_path
    models = {name: True for name in arguments.models}
    for name, weights in {tokenizer: False, **models}.items():
        if _MODEL.fullmatch(name) is None or Path(name).exists():
            if weights:
                problems.append(f"models: {name}: give the Hub's OWNER/NAME, not a folder")
            continue
        try:
            revision = cache.resolve("model", name, None, local=False)
            want("model", name, revision, cache.files_of_model(name, revision, weights))
        except Exception as error:
            problems.append(f"{name}: {fault_of('model', name, error)}")
    for entry in wanted.values():
        try:
            _measure(entry, cache)
        except Exception as error:
            problems.append(f"{entry.name}: {fault_of(entry.kind, entry.name, error)}")
    if problems:
        raise ConfigurationError(problems)
    _download([entry for entry in wanted.values() if entry.sizes], cache.folder)


def _measure(entry: Wanted, cache: HubCache) -> None:
    """Note the sizes of the files that are not in the cache; an entry with none is complete."""
    snapshot = cache.snapshot(entry.kind, entry.name, entry.revision.resolved)
    if missing := [name for name in entry.files if not (snapshot / name).exists()]:
        infos = _snapshot(entry, missing, cache.folder, dry_run=True)
        entry.sizes = {info.filename: info.file_size or 0 for info in infos}


def _snapshot(entry: Wanted, files: Iterable[str], folder: Path, dry_run: bool = False) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        entry.name,
        repo_type=entry.kind,
        revision=entry.revision,
        cache_dir=folder,
        allow_patterns=[glob.escape(name) for name in files],
        dry_run=dry_run,
    )


def _download(wanted: Sequence[Wanted], folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, total = shutil.disk_usage(existing).free, sum(sum(entry.sizes.values()) for entry in wanted)
    for entry in wanted:
        size = _gb(sum(entry.sizes.values()))
        logger.info(f"to download: {entry}: {len(entry.sizes)} files, {size}")
    if not wanted:
        return
    logger.info(f"{_gb(total)} in all, into {folder}, where {_gb(free)} are free")
    if total > free:
        raise StorageError(
            f"{host_name()}: {folder} has {_gb(free)} free, and {_gb(total)} are to be downloaded: "
            "export HF_HOME=DIR on a larger disk (also in slurm/cluster.env), or take less: "
            "in a recipe subset or max_files of a source"
        )
    for entry in wanted:
        began = time.monotonic()
        try:
            _snapshot(entry, entry.files, folder)
        except Exception as error:
            fault = fault_of(entry.kind, entry.name, error)
            raise ConfigurationError(f"{entry.name}: {fault}") from error
        seconds = time.monotonic() - began
        logger.info(f"downloaded: {entry}: {_gb(sum(entry.sizes.values()))} in {seconds:.0f} s")


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size > 1e8 else f"{size / 1e6:,.1f} MB"


def fault_of(kind: Kind, name: str, error: Exception) -> str:
    """Say what is wrong with a dataset or model of the Hub; other errors are raised again."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    text = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, GatedRepoError) or "gated dataset" in text:
        token = "your HF_TOKEN has no access" if get_token() else "there is no HF_TOKEN"
        return (
            f"is gated, and {token}: accept its terms at {page}, then put the token of that "
            "account (https://huggingface.co/settings/tokens) into .env as HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"has no such revision: {page}/tree/main lists its branches and tags"
    if isinstance(error, RepositoryNotFoundError | DatasetNotFoundError):
        return (
            f"neither a local path nor a {kind} of the Hub (at {page}); a private one needs "
            "HF_TOKEN in .env"
        )
    if "scripts are no longer supported" in text:
        return (
            "is made by a script, which is not run. The Hub has most of these as Parquet too: in a "
            f"recipe give {{path: {name}, revision: {PARQUET_BRANCH}}}"
        )
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answers {text}; an HF_TOKEN that is not valid any more does that too"
    if isinstance(error, ValueError):
        return str(error)
    unreachable = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "ProxyError")
    causes = [error, error.__cause__, error.__context__]
    if isinstance(error, ConnectionError) or any(
        type(each).__name__ in (*unreachable, "RevisionResolutionError", "LocalEntryNotFoundError")
        for each in causes
    ):
        return (
            f"the Hub cannot be reached from here ({text}). Run this where there is a network, "
            "with --offline_dir DIR for nodes that have none"
        )
    raise error
