"""Downloads from the Hugging Face Hub: the datasets, tokenizer and models in the settings."""

import glob
import logging
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.config.errors import ConfigurationError, StorageError
from utils.config.preparation import PreparationArguments, Source, check_preparation, parse_sources
from utils.host.foreign import library_errors
from utils.host.hub import missing_from_cache, stay_offline
from utils.host.machine import host_name
from utils.prepare.hub_datasets import PARQUET_BRANCH, HubCache, Kind, files_of_split, hub_dataset
from utils.prepare.tokenizer import load_prepared_tokenizer
from utils.prepare.work_plan import plan_preparation

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

logger = logging.getLogger(__name__)

_MODEL = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(.+))?")
# The files of a model's configuration and tokenizer, without pickles and code.
_SMALL_FILES = ["*.jinja", "*.json", "*.model", "*.txt", "*.tiktoken"]
# Not downloaded: other formats in subfolders (onnx/), and Mistral's second copy of the weights.
# *.jinja files in subfolders are downloaded: additional_chat_templates/ has named chat templates.
_OTHER_FILES = [f"*/{name}" for name in (*_SMALL_FILES[1:], "*.safetensors")]
_OTHER_FILES += ["*/*/*", "*consolidated*.safetensors"]


class Download(NamedTuple):
    """A download from a Hub repository: the files of one commit whose names match `patterns`.

    part: describes the files in log lines.
    """

    kind: Kind
    name: str
    part: str
    revision: "ResolvedRevision"
    patterns: list[str]

    def __str__(self) -> str:
        return f"{self.name}{self.part}, commit {self.revision.resolved[:10]}"

    def run(self, cache: HubCache, *, dry_run: bool = False) -> Any:
        """Download missing files. With `dry_run`, return a list of all files instead.

        The list has each file's name, local path and size in bytes.
        """
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            cache_dir=cache.folder,
            allow_patterns=self.patterns,
            ignore_patterns=_OTHER_FILES if self.kind == "model" else None,
            dry_run=dry_run,
        )


def fetch(arguments: PreparationArguments) -> dict[str, Path]:
    """Download the files that the settings name and that the Hub's cache lacks.

    Returns {name in the settings: folder in the cache} of datasets, models and the tokenizer.
    In offline mode, downloads nothing and returns {}. Raises ConfigurationError for names that
    cannot be downloaded, and StorageError if the disk has too little space.
    """
    from huggingface_hub import is_offline_mode

    check_preparation(arguments)
    if is_offline_mode():
        if problems := [
            text for model in arguments.models if (text := missing_from_cache(*model.split("@")))
        ]:
            raise ConfigurationError(problems)
        return {}
    cache = HubCache(arguments)
    folders, downloads, size = _missing_files(arguments, cache)
    if downloads:
        check_disk_space(cache.folder, size)
    for download in downloads:
        began = time.monotonic()
        try:
            download.run(cache)
        except Exception as error:
            raise ConfigurationError(f"{download}: {describe_fault(error)}") from error
        logger.info(f"downloaded: {download}, in {time.monotonic() - began:.0f} s")
    return folders


def _missing_files(
    arguments: PreparationArguments, cache: HubCache
) -> tuple[dict[str, Path], list[Download], int]:
    """Return ({name: cache folder}, downloads of missing files, their total size in bytes).

    Raises ConfigurationError for unknown names, and for an unreachable Hub if `offline_dir` is set.
    Without `offline_dir`, log a warning if the Hub is unreachable, and return no downloads, because
    the cache may be enough.
    """
    datasets: list[tuple[str, Any]] = [
        (path, source) for source in parse_sources(arguments) for path in source.paths
    ]
    models = dict.fromkeys(arguments.models, True)
    if arguments.tokenizer_name_or_path:
        models = {arguments.tokenizer_name_or_path: False} | models
    folders: dict[str, Path] = {}
    sizes: dict[str, int] = {}  # by path
    downloads: list[Download] = []
    problems: dict[str, list[str]] = {}  # names by fault
    for name, detail in [*datasets, *models.items()]:
        try:
            download = (_dataset_download if isinstance(detail, Source) else _model_download)(
                cache, name, detail
            )
            files = download.run(cache, dry_run=True) if download else []
            if detail is True and not any(file.filename.endswith(".safetensors") for file in files):
                raise ValueError("has no weights as safetensors, and others are not loaded")
        except Exception as error:
            if _is_connection_error(error) and not arguments.offline_dir:
                logger.warning("%s: using the cache of the Hub", error.__cause__ or error)
                stay_offline()
                return fetch(arguments), [], 0
            problems.setdefault(describe_fault(error), []).append(name)
            continue
        if download:
            folders[name] = cache.snapshot(download.kind, download.name, download.revision.resolved)
        # huggingface_hub counts a file as cached if its blob exists, even if the snapshot lacks it.
        missing = [file for file in files if not Path(file.local_path).exists()]
        missing = [file for file in missing if file.local_path not in sizes]
        if download and missing:
            new_sizes = {file.local_path: file.file_size or 0 for file in missing}
            logger.info(
                f"to download: {download}: {len(missing)} files, {_gb(sum(new_sizes.values()))}"
            )
            downloads.append(download)
            sizes |= new_sizes
    if problems:
        raise ConfigurationError(
            [f"{', '.join(names)}: {text}" for text, names in problems.items()]
        )
    return folders, downloads, sum(sizes.values())


def _dataset_download(cache: HubCache, path: str, source: Source) -> Download | None:
    """Return the download of a Hub dataset, or None for a local path.

    Raises ValueError for an unknown subset or split, or a local path that does not exist. For an
    unknown dataset, the error of the Hub's client is raised.
    """
    dataset = hub_dataset(path, source)
    if dataset is None:
        if not (glob.has_magic(path) or os.path.lexists(path)):
            raise ValueError("no such file or folder")  # before anything is downloaded
        return None
    revision, listing = cache.listing(dataset, ask=True)
    split, files = files_of_split(dataset, listing, source)
    if listing.others and dataset.subset is None:
        logger.info(f"{path}: subset {listing.subset}; not {', '.join(listing.others)}")
    patterns = [glob.escape(name) for name in files]
    return Download("dataset", dataset.name, f", {listing.subset}, {split}", revision, patterns)


def _model_download(cache: HubCache, name: str, weights: bool) -> Download | None:
    """Return the download of a model (`weights` is True) or of a tokenizer (False).

    Returns None for a local tokenizer. Raises ValueError for a local model.
    """
    match = _MODEL.fullmatch(name)
    if match is None or Path(name).exists():
        if weights:
            raise ValueError("is a local path; models names those to download, as OWNER/NAME")
        return None
    revision = cache.resolve("model", match[1], match[2], ask=True)
    if weights:
        return Download("model", match[1], "", revision, [*_SMALL_FILES, "*.safetensors"])
    return Download("model", match[1], ", tokenizer", revision, _SMALL_FILES)


def check_disk_space(folder: Path, size: int) -> None:
    """Log a download's size in bytes and the free space of the folder's disk.

    Raises StorageError if the free space is too small.
    """
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


def _is_connection_error(error: BaseException) -> bool:
    from httpx2 import TransportError  # the client's own HTTP library
    from huggingface_hub import errors

    unreachable = (
        TransportError, ConnectionError, errors.RevisionResolutionError,
        errors.LocalEntryNotFoundError,
    )  # fmt: skip
    return isinstance(error, unreachable) or isinstance(error.__cause__, unreachable)


def describe_fault(error: Exception) -> str:
    """Return the text of an error of the Hub's client or of `datasets`, with advice.

    Re-raises any other error.
    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    text = " ".join((str(error) or repr(error)).split()).rstrip(".")
    if _is_connection_error(error):
        return f"{error.__cause__ or text}. Run this command where there is a network"
    if "scripts are no longer supported" in text:
        return f"{text}. Most such datasets have Parquet files: give revision: {PARQUET_BRANCH}"
    known = errors.HfHubHTTPError | errors.DryRunError | FileNotFoundError | ValueError
    if not isinstance(error, known):
        raise error
    if isinstance(error, errors.GatedRepoError) or "gated dataset" in text:
        return f"{text}. Put the HF_TOKEN of an account that has accepted its terms into .env"
    if isinstance(error, errors.RepositoryNotFoundError | DatasetNotFoundError):
        return "no such local path, and no such name on the Hub; private ones need HF_TOKEN in .env"
    return text


def fill_offline_dir(arguments: PreparationArguments) -> None:
    """Fill the folder `offline_dir` with the files that the settings name.

    Also check that the tokenizer and the model configurations load. Raises ConfigurationError if a
    download or loading fails, or if this process is offline.
    """
    from huggingface_hub import is_offline_mode
    from transformers import AutoConfig

    if is_offline_mode():
        raise ConfigurationError(
            "offline_dir: this process is offline (HF_HUB_OFFLINE=1, as Slurm jobs are): run the "
            "command where there is a network, with HF_HUB_OFFLINE=0"
        )
    folders = fetch(arguments)
    if arguments.sources:
        name = arguments.tokenizer_name_or_path
        plan = plan_preparation(arguments)
        plan.log()
        load_prepared_tokenizer(
            replace(arguments, tokenizer_name_or_path=str(folders.get(name, name))), plan
        )
    for model in arguments.models:
        with library_errors(model, "its configuration cannot be loaded"):
            AutoConfig.from_pretrained(
                folders[model], local_files_only=True, trust_remote_code=False
            )
    home = Path(str(arguments.offline_dir)).absolute()
    logger.info(
        f"{home} holds everything: all files are there, and the tokenizer and configurations load "
        "without a request to the Hub. Nothing is prepared yet. If jobs cannot read it there, copy "
        f"it (rsync -a); name it in slurm/cluster.env:\n  export HF_HOME={home}"
    )
