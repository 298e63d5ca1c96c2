"""Downloads from the Hugging Face Hub: the datasets, tokenizer and models that the settings name.

`fetch` fills the Hub's cache where there is a network. `fill_offline_dir` fills a folder that jobs
without a network use as HF_HOME, and checks that it holds what they need.
"""

import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError, StorageError
from utils.config.preparation import PreparationArguments, Source, check_preparation, sources_of
from utils.host.foreign import foreign
from utils.host.machine import host_name
from utils.prepare.hub import (
    PARQUET_BRANCH,
    HubCache,
    Kind,
    files_of_split,
    hub_dataset,
    list_model_files,
)
from utils.prepare.tokenizer import given_tokenizer
from utils.prepare.work_plan import plan_preparation

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

logger = logging.getLogger(__name__)

_MODEL = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(.+))?")


@dataclass(frozen=True)
class Download:
    """Files of one commit of a dataset or model that must be in the cache; part: for the log."""

    kind: Kind
    name: str
    part: str
    revision: "ResolvedRevision"
    files: Sequence[str]

    def __str__(self) -> str:
        return f"{self.name}{self.part}, commit {self.revision.resolved[:10]}"

    def run(self, cache: Path, dry_run: bool = False) -> Any:
        """Download the files; with `dry_run`, return the name and size of each instead."""
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            cache_dir=cache,
            allow_patterns=[glob.escape(name) for name in self.files],
            dry_run=dry_run,
        )


def fetch(arguments: PreparationArguments) -> None:
    """Download the files that the settings name and the cache lacks; does nothing when offline.

    Logs the size before the download begins. Raises ConfigurationError with every dataset and model
    that cannot be downloaded, and StorageError if the disk has too little room.
    """
    from huggingface_hub import is_offline_mode

    check_preparation(arguments)
    if is_offline_mode():
        return
    cache = HubCache(arguments)
    downloads, size = _missing_files(arguments, cache)
    if downloads:
        _check_room(cache.folder, size)
    for download in downloads:
        began = time.monotonic()
        try:
            download.run(cache.folder)
        except Exception as error:
            fault = describe_fault(download.kind, download.name, error)
            raise ConfigurationError(f"{download.name}: {fault}") from error
        logger.info(f"downloaded: {download}, in {time.monotonic() - began:.0f} s")


def _missing_files(arguments: PreparationArguments, cache: HubCache) -> tuple[list[Download], int]:
    """Return the downloads that the cache lacks, and their size in bytes.

    Returns no downloads if the Hub cannot be reached and no models are wanted: the cache may be
    enough. Raises ConfigurationError with every dataset and model that cannot be downloaded.
    """
    named: list[tuple[Kind, str, Any]] = [
        ("dataset", path, source) for source in sources_of(arguments) for path in source.paths
    ]
    named += [("model", *model) for model in _models(arguments).items()]
    sizes: dict[tuple[str, str], int] = {}  # by commit and file
    downloads: list[Download] = []
    problems = []
    for kind, given, detail in named:
        try:
            wanted = (_dataset if kind == "dataset" else _model)(cache, given, detail)
            if wanted is None:
                continue
            commit = wanted.revision.resolved
            snapshot = cache.snapshot(kind, wanted.name, commit)
            absent = [name for name in wanted.files if not (snapshot / name).exists()]
            absent = [name for name in absent if (commit, name) not in sizes]
            if not absent:
                continue
            download = replace(wanted, files=absent)
            answers = download.run(cache.folder, dry_run=True)
            own = {(commit, answer.filename): answer.file_size or 0 for answer in answers}
            logger.info(f"to download: {download}: {len(own)} files, {_gb(sum(own.values()))}")
            downloads.append(download)
            sizes |= own
        except Exception as error:
            if _is_unreachable(error) and not arguments.models:
                logger.warning("the Hub cannot be reached, what is in its cache is used: %s", error)
                return [], 0
            problems.append(f"{given}: {describe_fault(kind, given, error)}")
    if problems:
        raise ConfigurationError(problems)
    return downloads, sum(sizes.values())


def _models(arguments: PreparationArguments) -> dict[str, bool]:
    """Return the names of the tokenizer and the models, and whether the weights are needed."""
    return {arguments.tokenizer_name_or_path: False} | dict.fromkeys(arguments.models, True)


def _dataset(cache: HubCache, path: str, source: Source) -> Download | None:
    """Return a dataset as a Download of all files to read; None for a local path.

    Raises ValueError for a missing path, subset or split.
    """
    dataset = hub_dataset(path, source)
    if dataset is None:
        if not (glob.has_magic(path) or os.path.lexists(path)):
            raise ValueError("no such file or folder")  # say so before anything is downloaded
        return None
    revision, listing = cache.listing(dataset, ask=True)
    split, files = files_of_split(dataset, listing, source)
    if listing.others and dataset.subset is None:
        logger.info(f"{path}: subset {listing.subset}; not {', '.join(listing.others)}")
    return Download("dataset", dataset.name, f", {listing.subset}, {split}", revision, files)


def _model(cache: HubCache, given: str, weights: bool) -> Download | None:
    """Return a model or tokenizer as a Download of its files; None for a local tokenizer.

    Raises ValueError for a local model, or one without weights as safetensors.
    """
    found = _MODEL.fullmatch(given)
    if found is None or Path(given).exists():
        if weights:
            raise ValueError("is a local path; models names those to download, as OWNER/NAME")
        return None
    revision = cache.resolve("model", found[1], found[2], ask=True)
    files = list_model_files(cache, found[1], revision.resolved, weights)
    return Download("model", found[1], "" if weights else ", tokenizer", revision, files)


def _check_room(folder: Path, size: int) -> None:
    """Log the size of the download and the free space; raises StorageError if space is short."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    logger.info(f"to download in all: {_gb(size)}, into {folder}, where {_gb(free)} are free")
    if size > free:
        raise StorageError(
            f"{host_name()}: {folder} has {_gb(free)} free, and {_gb(size)} are to be downloaded: "
            "export HF_HOME=DIR on a larger disk (also in slurm/cluster.env), or take less of a "
            "source: subset or max_files in a recipe"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _is_unreachable(error: BaseException) -> bool:
    """Tell whether an error of the Hub's client says that there is no connection."""
    from httpx2 import TransportError  # the client's own HTTP library
    from huggingface_hub import errors

    unreachable = (
        TransportError, ConnectionError, errors.RevisionResolutionError,
        errors.LocalEntryNotFoundError,
    )  # fmt: skip
    return isinstance(error, unreachable) or isinstance(error.__cause__, unreachable)


def describe_fault(kind: Kind, given: str, error: Exception) -> str:
    """Return what is wrong with a dataset or model of the Hub, and what to do.

    Raises `error` again if its cause is not known here.
    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants, errors, get_token

    name = given.removeprefix("hf://datasets/").partition("@")[0]
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    text = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, errors.GatedRepoError) or "gated dataset" in text:
        token = "your HF_TOKEN has no access" if get_token() else "there is no HF_TOKEN"
        return (
            f"is gated, and {token}: accept its terms at {page}, and put a token of that account "
            "(https://huggingface.co/settings/tokens) into .env as HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no such revision: {page}/tree/main lists branches and tags"
    if isinstance(error, errors.RepositoryNotFoundError | DatasetNotFoundError):
        return (
            f"no such local path, and no such {kind} on the Hub; private ones need HF_TOKEN in .env"
        )
    if "scripts are no longer supported" in text:
        return (
            "is made by a script, which is not run; most such datasets have a branch of Parquet "
            f"files: in a recipe give {{path: {name}, revision: {PARQUET_BRANCH}}}"
        )
    if _is_unreachable(error):
        return (
            f"the Hub cannot be reached from here ({error.__cause__ or error}). Run this command "
            "where there is a network; with --offline_dir DIR it gathers what machines without one "
            "need"
        )
    if not isinstance(error, errors.HfHubHTTPError | ValueError | FileNotFoundError):
        raise error
    return f"the Hub answers: {text}" if isinstance(error, errors.HfHubHTTPError) else str(error)


# --- for machines without a network


def fill_offline_dir(arguments: PreparationArguments) -> None:
    """Fetch into `offline_dir`, and check that the folder holds what a job needs.

    All files have to be there. The tokenizer and the models' configurations are loaded, without a
    request to the Hub. Raises ConfigurationError for a download that fails, and for a file that is
    missing or does not load.
    """
    from huggingface_hub import is_offline_mode
    from transformers import AutoConfig

    if is_offline_mode():
        raise ConfigurationError(
            "offline_dir: this process is offline (HF_HUB_OFFLINE=1, as Slurm jobs are): run the "
            "command where there is a network, with HF_HUB_OFFLINE=0"
        )
    fetch(arguments)
    home = Path(str(arguments.offline_dir)).absolute()
    folders = _complete_folders(arguments, home)
    with _offline_mode():
        tokenizer = str(folders[arguments.tokenizer_name_or_path])
        plan = plan_preparation(arguments)
        given_tokenizer(replace(arguments, tokenizer_name_or_path=tokenizer), plan)
        for model in arguments.models:
            with foreign(model, "its configuration cannot be loaded"):
                AutoConfig.from_pretrained(folders[model], trust_remote_code=False)
    logger.info(
        f"{home} holds everything: all files are there, and the tokenizer and configurations load "
        "without a request to the Hub. Nothing is prepared yet. If jobs cannot read it there, copy "
        f"it (rsync -a); name it in slurm/cluster.env:\n  export HF_HOME={home}"
    )


@contextmanager
def _offline_mode() -> Iterator[None]:
    """Let the Hub's client refuse all requests in a with block, as HF_HUB_OFFLINE=1 does."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _complete_folders(arguments: PreparationArguments, home: Path) -> dict[str, Path]:
    """Return the folder of the tokenizer and of each model.

    Raises ConfigurationError with those that are not in the cache, or lack one of their files.
    """
    cache = HubCache(arguments)
    folders: dict[str, Path] = {}
    problems = []
    for given, weights in _models(arguments).items():
        try:
            folders[given] = _complete_folder(cache, given, weights)
        except Exception as error:
            problems.append(f"{given}: {describe_fault('model', given, error)}")
    if problems:
        advice = f"offline_dir: {home} does not hold what a job needs, see above: run the command "
        advice += "again where there is a network, it fetches what is missing"
        raise ConfigurationError([*problems, advice])
    return folders


def _complete_folder(cache: HubCache, given: str, weights: bool) -> Path:
    """Return the folder of a model or tokenizer: in the cache, or the local folder.

    Raises FileNotFoundError if one of its files is missing, and the errors of the Hub's client.
    """
    found = _MODEL.fullmatch(given)
    if found is None or Path(given).exists():
        return Path(given)
    revision = cache.resolve("model", found[1], found[2], ask=False)
    folder = cache.snapshot("model", found[1], revision.resolved)
    files = list_model_files(cache, found[1], revision.resolved, weights)
    if missing := [name for name in files if not (folder / name).exists()]:
        raise FileNotFoundError(f"{len(missing)} of {len(files)} files are missing: {missing[0]}")
    return folder
