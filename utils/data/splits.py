"""Find a split's directory and its Arrow files in what `datasets` wrote to disk."""

import json
from pathlib import Path

from utils.config.errors import ConfigurationError

STATE_FILE = "state.json"
DICT_FILE = "dataset_dict.json"


def find_split(path: str | Path, default_split: str = "train") -> Path:
    """Return the directory of one split.

    `path` may be a split itself, or a folder of splits (a `DatasetDict`, or the output of
    `prepare_data.py`), of which `default_split` is taken.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        raise ConfigurationError(f"{path}: no such directory; give the folder of a token dataset.")
    if not directory.is_dir():
        raise ConfigurationError(
            f"{path}: is a file; give the folder that `datasets` save_to_disk or prepare_data.py "
            "wrote."
        )
    for candidate in (directory, directory / default_split):
        if (candidate / STATE_FILE).is_file():
            return candidate.resolve()
    raise ConfigurationError(_why_not_a_split(directory, default_split))


def data_files(directory: Path) -> list[Path]:
    """Return a split's Arrow files in row order, as its state.json lists them."""
    state = read_json_object(directory / STATE_FILE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigurationError(
            f"{directory}: rows go through an indices mapping; call `flatten_indices()` on the "
            "dataset and save it again."
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        raise ConfigurationError(
            f"{directory / STATE_FILE}: `_data_files` does not list file names; the dataset was "
            "not written by `datasets` save_to_disk, or is damaged. Save it again."
        )
    files = [directory / entry["filename"] for entry in entries]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"{directory}: {len(missing)} of {len(files)} data files are missing, first "
            f"{missing[0]}; copy the whole folder or prepare it again."
        )
    return files


def read_json_object(path: Path) -> dict:
    """Return the JSON object in `path`; unreadable or other content is a ConfigurationError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read as JSON ({error}); save the dataset again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: not a JSON object; save the dataset again.")
    return content


def _why_not_a_split(directory: Path, default_split: str) -> str:
    splits = sorted(state.parent.name for state in directory.glob(f"*/{STATE_FILE}"))
    if splits:
        return (
            f"{directory}: has no split {default_split!r}; it has {', '.join(splits)}. "
            f"Name one, for example {directory / splits[0]}."
        )
    if (directory / DICT_FILE).is_file():
        return f"{directory}: {DICT_FILE} is there but no split is; copy the whole folder."
    return (
        f"{directory}: not a token dataset (no {STATE_FILE} in it or in {default_split}/). Make "
        "one with prepare_data.py, or with `datasets`: Dataset.save_to_disk."
    )
