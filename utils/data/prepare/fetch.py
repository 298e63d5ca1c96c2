"""Fetching what a preparation, and the training after it, need of the Hugging Face Hub.

`fetch` fills the Hub's cache where there is a network. `fill_offline_dir` fills a folder that jobs
without a network take for HF_HOME, and checks it as they will find it: in a process of its own
(`main` here) that has that HF_HOME, is offline and may open no connection.
"""

import glob
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from utils.config.errors import ConfigurationError, StorageError
from utils.config.preparation import PreparationArguments, Source, check_preparation, sources_of
from utils.data.prepare.hub import PARQUET_BRANCH, HubCache, Kind, files_of_split, hub_dataset
from utils.data.prepare.plan import plan_preparation
from utils.data.prepare.tokenizer import given_tokenizer
from utils.launch.script import run_script
from utils.support.foreign import foreign
from utils.support.host import host_name

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
_MODEL = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(.+))?")
_UNREACHABLE = {
    *("ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "ProxyError"),
    *("RevisionResolutionError", "LocalEntryNotFoundError", "ConnectionError"),
}
# What would lead a check elsewhere than to HF_HOME; and jobs need no token.
_LEFT_OUT = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_WRITE_TOKEN"}


@dataclass(frozen=True)
class Wanted:
    """Files of one commit that are to be in the cache."""

    kind: Kind
    name: str
    what: str
    revision: "ResolvedRevision"
    files: Sequence[str]

    def __str__(self) -> str:
        return f"{self.name}{self.what}, commit {self.revision.resolved[:10]}"

    def download(self, folder: Path, dry_run: bool = False) -> Any:
        """Download the files, or return what the Hub says of each."""
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            cache_dir=folder,
            allow_patterns=[glob.escape(name) for name in self.files],
            dry_run=dry_run,
        )


def fetch(arguments: PreparationArguments) -> None:
    """Download what the settings name of the Hub and the cache lacks; nothing if offline.

    Says how much it is before it begins. Raises ConfigurationError with everything that the Hub
    does not have or give, StorageError where there is no room.
    """
    from huggingface_hub import is_offline_mode

    check_preparation(arguments)
    if is_offline_mode():
        return
    cache = HubCache(arguments)
    orders, size = _missing(arguments, cache)
    if orders:
        _check_room(cache.folder, size)
    for order in orders:
        began = time.monotonic()
        try:
            order.download(cache.folder)
        except Exception as error:
            fault = fault_of(order.kind, order.name, error)
            raise ConfigurationError(f"{order.name}: {fault}") from error
        logger.info(f"downloaded: {order}, in {time.monotonic() - began:.0f} s")


def _missing(arguments: PreparationArguments, cache: HubCache) -> tuple[list[Wanted], int]:
    """Return what is to be downloaded, and its size in bytes; nothing where no Hub is reached."""
    sizes: dict[tuple[str, str], int] = {}  # by commit and name
    orders: list[Wanted] = []
    problems = []
    for kind, given, find in _named(arguments, cache):
        try:
            if (wanted := find()) is None:
                continue
            commit = wanted.revision.resolved
            snapshot = cache.snapshot(kind, wanted.name, commit)
            absent = [name for name in wanted.files if not (snapshot / name).exists()]
            order = replace(wanted, files=[name for name in absent if (commit, name) not in sizes])
            if order.files:
                answers = order.download(cache.folder, dry_run=True)
                own = {(commit, each.filename): each.file_size or 0 for each in answers}
                logger.info(f"to download: {order}: {len(own)} files, {_gb(sum(own.values()))}")
                orders.append(order)
                sizes |= own
        except Exception as error:
            if _is_unreachable(error) and not arguments.models:
                logger.warning("the Hub cannot be reached, what is in its cache is used: %s", error)
                return [], 0
            problems.append(f"{given}: {fault_of(kind, given, error)}")
    if problems:
        raise ConfigurationError(problems)
    return orders, sum(sizes.values())


def _named(
    arguments: PreparationArguments, cache: HubCache
) -> Iterator[tuple[Kind, str, Callable[[], Wanted | None]]]:
    """Yield what the settings name, and what finds it on the Hub: None for what is local."""
    for source in sources_of(arguments):
        for path in source.paths:
            yield "dataset", path, partial(_dataset, cache, path, source)
    weights = dict.fromkeys(arguments.models, True)
    for name, has_weights in {arguments.tokenizer_name_or_path: False, **weights}.items():
        yield "model", name, partial(_model, cache, name, has_weights)


def _dataset(cache: HubCache, path: str, source: Source) -> Wanted | None:
    dataset = hub_dataset(path, source)
    if dataset is None:
        if not (glob.has_magic(path) or os.path.lexists(path)):
            raise ValueError("no such file or folder")  # said before anything is downloaded
        return None
    revision, listing = cache.listing(dataset, ask=True)
    split, files = files_of_split(dataset, listing, source)
    if listing.others and dataset.subset is None:
        logger.info(f"{path}: subset {listing.subset}; not {', '.join(listing.others)}")
    return Wanted("dataset", dataset.name, f", {listing.subset}, {split}", revision, files)


def _model(cache: HubCache, given: str, weights: bool) -> Wanted | None:
    found = _MODEL.fullmatch(given)
    if found is None or Path(given).exists():
        if weights:
            raise ValueError("is a local path; models names those to download, as OWNER/NAME")
        return None
    revision = cache.resolve("model", found[1], found[2], ask=True)
    files = cache.files_of_model(found[1], revision.resolved, weights, ask=True)
    return Wanted("model", found[1], "" if weights else ", tokenizer", revision, files)


def _check_room(folder: Path, size: int) -> None:
    """Log what is to be downloaded, and what room there is; raises StorageError if too little."""
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
    names = {type(each).__name__ for each in (error, error.__cause__)}
    return bool(names & _UNREACHABLE)


def fault_of(kind: Kind, given: str, error: Exception) -> str:
    """Say what is wrong with a dataset or model of the Hub, and what to do; else raise it again."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants, errors, get_token

    name = given.removeprefix("hf://datasets/").partition("@")[0]
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    text = (str(error).strip() or repr(error)).splitlines()[0]
    token = "your HF_TOKEN has no access" if get_token() else "there is no HF_TOKEN"
    # The first that holds: some errors are others' kinds.
    faults = {
        f"is gated, and {token}: accept its terms at {page}, and put a token of that account "
        "(https://huggingface.co/settings/tokens) into .env as HF_TOKEN": isinstance(
            error, errors.GatedRepoError
        )
        or "gated dataset" in text,
        f"has no such revision: {page}/tree/main lists branches and tags": isinstance(
            error, errors.RevisionNotFoundError
        ),
        f"no such local path, and no such {kind} on the Hub; private ones need HF_TOKEN in "
        ".env": isinstance(error, errors.RepositoryNotFoundError | DatasetNotFoundError),
        "is made by a script, which is not run; most such datasets have a branch of Parquet files: "
        f"in a recipe give {{path: {name}, revision: {PARQUET_BRANCH}}}": (
            "scripts are no longer supported" in text
        ),
        f"the Hub answers: {text}": isinstance(error, errors.HfHubHTTPError),
        f"the Hub cannot be reached from here ({error.__cause__ or error}). Run this command where "
        "there is a network; with --offline_dir DIR it gathers what machines without one need": (
            _is_unreachable(error)
        ),
        str(error): isinstance(error, ValueError | FileNotFoundError),
    }
    for fault, holds in faults.items():
        if holds:
            return fault
    raise error


# --- for machines without a network


def fill_offline_dir(arguments: PreparationArguments) -> None:
    """Fetch into `offline_dir` and check that everything loads from there without a network.

    Raises ConfigurationError for what cannot be fetched, or does not load.
    """
    from huggingface_hub import is_offline_mode

    home = Path(str(arguments.offline_dir)).absolute()
    if is_offline_mode():
        raise ConfigurationError(
            "offline_dir: this process is offline (HF_HUB_OFFLINE=1, as Slurm jobs are): run the "
            "command where there is a network, with HF_HUB_OFFLINE=0"
        )
    fetch(arguments)
    environment = {name: word for name, word in os.environ.items() if name not in _LEFT_OUT}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = json.dumps(asdict(replace(arguments, offline_dir=None)))
    command = [sys.executable, "-m", "utils.data.prepare.fetch"]
    checked = subprocess.run(command, input=settings, env=environment, text=True, check=False)
    if checked.returncode:
        raise ConfigurationError(
            f"offline_dir: {home} does not hold what a job needs, see above: run the command "
            "again, it fetches what is missing"
        )
    logger.info(
        f"{home} holds everything, as checked without a network. Nothing is prepared yet. If jobs "
        "cannot read it there, copy it (rsync -a); name it in slurm/cluster.env:\n"
        f"  export HF_HOME={home}"
    )


def main() -> int:
    """Load what the settings (JSON on standard input) name, without a network."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    _block_network()
    arguments = PreparationArguments(**json.load(sys.stdin))
    given_tokenizer(arguments, plan_preparation(arguments))
    problems = []
    for given in arguments.models:
        try:
            _check_model(HubCache(arguments), given)
        except (OSError, ValueError, LookupError) as error:
            problems.append(f"models: {given}: {(str(error) or repr(error)).splitlines()[0]}")
    if problems:
        raise ConfigurationError(problems)
    return 0


def _block_network() -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError("a connection was tried, and jobs have no network")

    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, refuse)


def _check_model(cache: HubCache, given: str) -> None:
    """Load a model's configuration; raises OSError where any of its files is not in the cache."""
    from transformers import AutoConfig

    name, _, branch = given.partition("@")
    revision = cache.resolve("model", name, branch or None, ask=False)
    snapshot = cache.snapshot("model", name, revision.resolved)
    files = cache.files_of_model(name, revision.resolved, weights=True, ask=False)
    if missing := [file for file in files if not (snapshot / file).exists()]:
        raise FileNotFoundError(f"{len(missing)} of {len(files)} files are missing: {missing[0]}")
    with foreign(given, "its configuration cannot be loaded"):
        AutoConfig.from_pretrained(name, revision=revision.resolved, trust_remote_code=False)
    logger.info(f"{given}: {len(files)} files of commit {revision.resolved[:10]}")


if __name__ == "__main__":
    sys.exit(run_script(main))
