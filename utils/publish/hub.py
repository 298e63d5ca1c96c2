r"""Upload the finished model of a run to the Hugging Face Hub, with its model card.

    python -m utils.publish.hub runs/my-run OWNER/NAME
    python -m utils.publish.hub runs/my-run OWNER/NAME-lora --adapter --public --dry_run

The upload is one commit of weights, configuration, tokenizer, processor, model card and license. No
file may contain a secret. The token is HF_WRITE_TOKEN from the environment or .env, else the token
that `hf auth login` stored. `push_to_hub: true` in a recipe does the same at the end of a run.
"""

import argparse
import fnmatch
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import how_to_rewrite
from utils.checkpoints.files import FINAL, PROCESSOR_FILES, readable
from utils.config.errors import ConfigurationError
from utils.host.atomic_files import paths_inside
from utils.host.foreign import library_errors, read_object
from utils.host.hub import upload_fault
from utils.host.redaction import load_env_file, redact
from utils.launch.script import configure_logging, run_script

logger = logging.getLogger(__name__)

CARD = "README.md"
ADAPTER_FOLDER = "adapter"
RESULTS = "lm_eval.json"
ADAPTER_CONFIG = "adapter_config.json"
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+|[\w-]+")
TEXTS = (
    CARD, "config.json", "generation_config.json", ADAPTER_CONFIG, "*.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "LICENSE*",
    *PROCESSOR_FILES,
)  # fmt: skip
ALLOWED = (*TEXTS, "*.safetensors", "tokenizer.model", "spiece.model")
# An upload also deletes old weight files on the Hub. If an old single file stayed there,
# transformers would load this file instead of the new sharded weights.
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
NO_TOKEN = (
    f"no token of the Hub: make one with write access ({TOKENS_PAGE}) and put it into .env as "
    "HF_WRITE_TOKEN=hf_... (cp .env.example .env && chmod 600 .env), or `hf auth login`."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Upload the model of the run that the command line names; return the exit code."""
    configure_logging()
    load_env_file()
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("publish", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="directory of a finished run")
    add("name", metavar="OWNER/NAME", help="of the model on the Hub; it is made if it is new")
    add("--adapter", action="store_true", help="the LoRA adapter, not the merged model")
    add("--public", action="store_true", help="make a new model visible to all, not private")
    add("--base_model", metavar="OWNER/NAME", help="the base's name, where the run knows a path")
    add("--dry_run", action="store_true", help="check, say what would be uploaded, and stop")
    options = parser.parse_args(argv)
    files = files_to_publish(
        options.run, options.name, adapter=options.adapter, base_model=options.base_model
    )
    if not options.dry_run:
        logger.info("published: %s", upload(files, options.name, private=not options.public))
    return 0


def files_to_publish(
    run: Path, name: str, *, adapter: bool = False, base_model: str | None = None
) -> dict[str, Path | bytes]:
    """Return {file name on the Hub: path, or content as bytes} of all files to upload.

    The list is logged. name: the model's name on the Hub. Raises ConfigurationError for an invalid
    name, an unfinished run, a secret in a file, or an adapter whose base model has no name on the
    Hub.
    """
    directory = run / (ADAPTER_FOLDER if adapter else FINAL)
    for hub_name in filter(None, (name, base_model)):
        _check_hub_name(hub_name)
    if not directory.is_dir():
        raise ConfigurationError(
            f"{run} has no {directory.name}/ yet, which the end of a run writes: resume it first, "
            "or give the directory of a run (its output_dir; --adapter needs a run with LoRA)."
        )
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    allowed = [name for name in names if _matches(name, ALLOWED)]
    paths_inside(directory, allowed, f"the model in {directory}")
    files: dict[str, Path | bytes] = {name: directory / name for name in allowed}
    problem = f"it cannot be published{how_to_rewrite(directory)}"
    if CARD in files:
        with library_errors(directory / CARD, problem):
            files[CARD] = _card_text(run, directory, name, base_model).encode()
    if adapter:
        with library_errors(directory / ADAPTER_CONFIG, problem):
            files[ADAPTER_CONFIG] = _adapter_config(directory, base_model).encode()
    problems = []
    for file in (file for file in allowed if _matches(file, TEXTS)):
        content = files[file]
        raw = content if isinstance(content, bytes) else content.read_bytes()
        for number, line in enumerate(raw.decode(errors="replace").split("\n"), start=1):
            if redact(line) != line:
                problems.append(
                    f"{directory / file}:{number}: it holds what looks like a token or a password: "
                    "remove it there (and make a new one if others could read it); nothing was "
                    "uploaded."
                )
    if problems:
        raise ConfigurationError(problems)
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size
             for name, file in files.items()}  # fmt: skip
    listed = "\n".join(f"  {name}  {readable(size)}" for name, size in sizes.items())
    total = f"{len(files)} files, {readable(sum(sizes.values()))}"
    logger.info("%s as %s, %s:\n%s", directory, name, total, listed)
    if others := sorted({path.name for path in directory.iterdir()} - files.keys()):
        logger.warning("left out, since they belong to no model: %s", ", ".join(others))
    return files


def upload(files: Mapping[str, Path | bytes], name: str, *, private: bool) -> str:
    """Upload files in one commit; return the model's URL. private: make a new model private.

    files: {file name on the Hub: path, or content as bytes}. An existing model stays private or
    public. Its history and its other files are kept, except old weights. Raises ConfigurationError
    if the upload fails.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = os.environ.get("HF_WRITE_TOKEN") or get_token()
    if token is None:
        raise ConfigurationError(NO_TOKEN)
    if fault := upload_fault():
        raise ConfigurationError(f"{name}: {fault}: nothing was uploaded.")
    api = HfApi(token=token)
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        info = api.model_info(url.repo_id)
        visible = "private" if info.private else "public"
        if info.private is not None and info.private != private:
            logger.warning("%s is there already and stays %s", url, visible)
        logger.info("uploading to %s (%s)", url, visible)
        remote_files = [file.rfilename for file in info.siblings or []]
        stale = [
            file for file in remote_files if _matches(file, WEIGHT_PATTERNS) and file not in files
        ]
        operations: list[Any] = [CommitOperationDelete(file) for file in stale]
        operations += [
            CommitOperationAdd(path, file if isinstance(file, bytes) else str(file))
            for path, file in files.items()
        ]
        api.create_commit(url.repo_id, operations, commit_message="Model trained with Stoker")
    except HfHubHTTPError as error:
        cause = str(error.server_message or error).strip().splitlines()[0]
        raise ConfigurationError(
            f"{name}: the Hub answered {error.response.status_code} ({cause}): is the token valid, "
            f"has it write access ({TOKENS_PAGE}), and is {name.split('/')[0]} you or an "
            "organization of yours? If so, try again later."
        ) from error
    except Exception as error:  # network errors of several libraries
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigurationError(f"{name}: the upload failed: {reason}.") from error
    return str(url)


def _check_hub_name(name: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigurationError(
            f"{name!r} is no name on the Hub, give OWNER/NAME: {error}"
        ) from error


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _card_text(run: Path, directory: Path, name: str, base_model: str | None) -> str:
    """Return the model card's text with the model's Hub name and, if any, the lm_eval results."""
    from huggingface_hub import ModelCard

    text = (directory / CARD).read_text(encoding="utf-8")
    if local := re.search(r"^python chat\.py (\S+)", text, re.MULTILINE):
        text = text.replace(local[1], name)
    if base_model is not None:
        card = ModelCard(text, ignore_metadata_errors=True)
        card.data["base_model"] = base_model
        card.data["base_model_relation"] = (
            "adapter" if directory.name == ADAPTER_FOLDER else "finetune"
        )
        text = str(card).replace("vllm serve BASE ", f"vllm serve {base_model} ")
        text = text.replace('("BASE", ', f'("{base_model}", ')
    if directory.name == FINAL and (run / RESULTS).is_file():
        with library_errors(run / RESULTS, "these are no results of lm_eval", "Evaluate again."):
            lines = "\n".join(_benchmark_lines(read_object(run / RESULTS)))
        text = f"{text.rstrip()}\n\n## Benchmarks\n\n{lines}\n"
    return text


def _benchmark_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the results. content: the JSON of lm_eval.json."""
    limit = (content.get("config") or {}).get("limit")
    part = f", with --limit {limit:g}" if limit else ""
    yield f"By lm-evaluation-harness {content.get('lm_eval_version', '')}{part}.\n"
    yield "| task | few-shot | metric | value | standard error |\n|---|---|---|---|---|"
    for task, figures in content["results"].items():
        shots = content.get("n-shot", {}).get(task, "")
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if comma and isinstance(value, float) and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{kind}")
                spread = f"{error:.4f}" if isinstance(error, float) else ""
                yield f"| {task} | {shots} | {metric} ({kind}) | {value:.4f} | {spread} |"


def _adapter_config(directory: Path, base_model: str | None) -> str:
    """Return the text of adapter_config.json with the Hub name of the base model.

    Raises ConfigurationError if this name is unknown.
    """
    from huggingface_hub import ModelCard

    content = read_object(directory / ADAPTER_CONFIG)
    base = str(content["base_model_name_or_path"])
    if base_model is None and (Path(base).is_dir() or not HUB_NAME.fullmatch(base)):
        card = directory / CARD
        if card.is_file():
            base_model = ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
        if base_model is None:
            raise ConfigurationError(
                f"{directory / ADAPTER_CONFIG} names its base by a path ({base}), which nobody "
                "else has: give the base's name on the Hub, --base_model OWNER/NAME."
            )
    content["base_model_name_or_path"] = base_model or base
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(run_script(main))
