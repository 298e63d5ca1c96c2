"""A folder with everything that jobs without a network need: `prepare_data.py --offline_dir DIR`.

It is what HF_HOME is to them. What is fetched is checked as such a job will find it: in a process
of its own (`main` here) that has that HF_HOME, is offline and may open no connection.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, check_preparation
from utils.data.prepare.hub import HubCache, fetch
from utils.data.prepare.plan import plan_preparation
from utils.data.prepare.tokenizer import given_tokenizer
from utils.launch.script import run_script

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
# What else would lead elsewhere than to HF_HOME; a job needs no token.
_LEFT_OUT = {
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
    *("HF_TOKEN", "HF_WRITE_TOKEN"),
}


def fill_offline_dir(arguments: PreparationArguments) -> None:
    """Fetch into `offline_dir` and check that everything loads from there without a network.

    Raises ConfigurationError for what cannot be fetched, or does not load.
    """
    check_preparation(arguments)
    home = Path(str(arguments.offline_dir)).absolute()
    if HubCache(arguments).is_offline:
        raise ConfigurationError(
            "offline_dir: this process is offline (HF_HUB_OFFLINE=1, as in Slurm jobs): run the "
            "same command on a machine with a network, with HF_HUB_OFFLINE=0"
        )
    fetch(arguments)
    environment = {name: word for name, word in os.environ.items() if name not in _LEFT_OUT}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    checked = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(replace(arguments, offline_dir=None))),
        env=environment,
        text=True,
        check=False,
    )
    if checked.returncode:
        raise ConfigurationError(
            f"offline_dir: {home}: does not hold what a job needs, see above; run the same command "
            "again, which fetches what is missing"
        )
    logger.info(
        f"{home} holds everything, checked without a network. Copy it to where jobs can read it "
        f"if need be, and put this into slurm/cluster.env:\n  export HF_HOME={home}"
    )


def refuse_connection(*_: Any, **__: Any) -> NoReturn:
    """Stand in for what opens connections."""
    raise OSError("there is no network here: a check of what works without one")


def main() -> int:
    """Load what the settings (JSON on standard input) name, with no network; return 0."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, refuse_connection)
    arguments = PreparationArguments(**json.load(sys.stdin))
    plan = plan_preparation(arguments)
    given_tokenizer(arguments, plan)
    cache, problems = HubCache(arguments), []
    for name in arguments.models:
        try:
            _check_model(cache, name)
        except (OSError, ValueError) as error:
            problems.append(f"models: {name}: {(str(error) or repr(error)).splitlines()[0]}")
    if problems:
        raise ConfigurationError(problems)
    return 0


def _check_model(cache: HubCache, name: str) -> None:
    """Raise OSError or ValueError where the cache lacks a file of the model, or its config."""
    from transformers import AutoConfig

    revision = cache.resolve("model", name, None, local=True)
    snapshot = cache.snapshot("model", name, revision.resolved)
    files = cache.files_of_model(name, revision, weights=True)
    if missing := [file for file in files if not (snapshot / file).exists()]:
        raise FileNotFoundError(f"{len(missing)} of {len(files)} files are missing: {missing[0]}")
    AutoConfig.from_pretrained(name, trust_remote_code=False)
    logger.info(f"{name}: {len(files)} files of commit {revision.resolved[:10]}")


if __name__ == "__main__":
    sys.exit(run_script(main))
