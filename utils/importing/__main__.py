"""Convert another toolkit's config to a data recipe and a training recipe, and note differences.

python -m utils.importing axolotl.yaml [--kind axolotl] [--gpus 8] [--output_dir DIR]
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, entry_text, load_file

if TYPE_CHECKING:
    from utils.importing.toolkits import Conversion

CHANGED = "This changes the training, or may:"


def recipe_texts(state: "Conversion", folder: Path) -> dict[Path, str]:
    """Return {path: text} of the files to write into `folder`.

    The last file is the training recipe. The other files are the data recipes and, if needed, a
    chat template and a Python file with functions that build prompts.
    """
    source, script = state.path, "pretrain.py" if state.pretraining else "sft_train.py"
    run, code = folder / f"{source.stem}.yaml", folder / f"{source.stem}_format.py"
    texts = {}
    if state.functions:
        texts[code] = f"# Prompts of {source.name!r}, as {state.kind} makes them.\n"
        texts[code] += "".join(state.functions.values())
    if state.template:
        template = folder / f"{source.stem}.jinja"
        texts[template] = state.template
        state.data["chat_template"] = str(template)
    recipes = [(run, script, state.run)]
    for number, recipe in enumerate(state.data_recipes(), 1):
        for entry in (*recipe["sources"], *recipe.get("eval_sources", ())):
            if isinstance(entry, dict) and entry.get("format") in state.functions:
                entry["format"] = f"{code}:{entry['format']}"
        file = folder / f"{source.stem}_data{f'_{number}' if number > 1 else ''}.yaml"
        lines = {key: (value, "") for key, value in recipe.items()}
        recipes.insert(-1, (file, "prepare_data.py", lines))
    for file, command, lines in recipes:
        head = f"# Made from {source.name} of {state.kind}:\n#   python {command} --config {file}\n"
        if file == run and state.changes:
            head += f"# {CHANGED}\n{listing(state.changes, '#   ')}"
        texts[file] = head + "".join(entry_text(key, *entry) for key, entry in lines.items())
    if state.notes:
        notes = listing(state.notes, "#   ")
        texts[run] += f"\n# Without a counterpart, or done otherwise:\n{notes}"
    return texts


def listing(reasons: Mapping[str, Sequence[str]], margin: str) -> str:
    """Return one line of text for each reason: the keys, then the reason.

    reasons: {reason: keys}. margin: the text at the beginning of each line.
    """
    lines = (f"{', '.join(map(str, keys))}: {why}" for why, keys in reasons.items())
    return "".join(f"{margin}{' '.join(line.split())}\n" for line in lines)  # no line breaks


def next_steps(state: "Conversion", files: Sequence[Path]) -> str:
    """Return a text: how the training differs from the original, and the commands to run next.

    files: the paths from `recipe_texts`.
    """
    changes = f"\n{CHANGED}\n{listing(state.changes, '  ')}" if state.changes else ""
    script = "pretrain.py" if state.pretraining else "sft_train.py"
    *data, run = (file for file in files if file.suffix == ".yaml")
    commands = [*state.commands, *(f"python prepare_data.py --config {file}" for file in data)]
    lines = "".join(f"  {each}\n" for each in (*commands, f"python {script} --config {run}"))
    return f"{changes}\nNext:\n{lines}"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a config, print or write the recipes, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.importing", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("config", type=Path, help="the other toolkit's YAML file")
    kinds = ("axolotl", "llamafactory", "trl")
    parser.add_argument("--kind", choices=kinds, help="whose it is; told by its keys otherwise")
    parser.add_argument("--gpus", type=int, help="GPUs it ran on, for the global batch (1)")
    parser.add_argument("--output_dir", type=Path, help="folder for the recipes, else printed")
    arguments = parser.parse_args(argv)
    folder = arguments.output_dir or Path()
    try:
        load_file(arguments.config)  # report a faulty file before the slow imports
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # no line about CPU kernels
        from utils.importing.conversion import convert  # slow to import: transformers

        converted = convert(arguments.config, arguments.kind, arguments.gpus or 1)
        if arguments.gpus is None and "--gpus" in converted.run["global_batch_size"][1]:
            converted.change("global_batch_size", "counted for 1 GPU: give --gpus N")
        texts = recipe_texts(converted, folder)
        found = [str(file) for file in texts if file.exists()]
        if arguments.output_dir and found:
            raise ConfigurationError(f"{', '.join(found)} already there: name another --output_dir")
    except (YamlError, ConfigurationError) as error:
        sys.stderr.write(f"{arguments.config} cannot be converted:\n{error}\n")
        return ConfigurationError.exit_code
    for file, text in texts.items():
        if arguments.output_dir:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{file}\n" if arguments.output_dir else f"# ---- {file}\n{text}\n")
    if arguments.output_dir:
        sys.stdout.write(next_steps(converted, list(texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
