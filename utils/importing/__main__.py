"""Convert another toolkit's config to our two recipes, with notes on differences.

python -m utils.importing axolotl.yaml [--kind axolotl] [--gpus 8] [--output_dir DIR]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, entry_text
from utils.importing.conversion import convert
from utils.importing.toolkits import TOOLKITS, Conversion


def recipe_texts(given: Conversion, folder: Path) -> dict[Path, str]:
    """Return {file: text} of the two recipes, and of a chat template inside the config."""
    source, script = given.path, "pretrain.py" if given.pretraining else "sft_train.py"
    data, run = folder / f"{source.stem}_data.yaml", folder / f"{source.stem}.yaml"
    texts = {}
    if given.template:
        template = folder / f"{source.stem}.jinja"
        texts[template] = given.template
        given.data["chat_template"] = str(template)
    values = {key: (value, "") for key, value in given.data.items() if value not in (None, {}, "")}
    for file, command, recipe in ((data, "prepare_data.py", values), (run, script, given.run)):
        head = f"# Made from {source.name} of {given.kind}:\n#   python {command} --config {file}\n"
        texts[file] = head + "".join(entry_text(key, *entry) for key, entry in recipe.items())
    if given.notes:
        notes = "".join(f"#   {', '.join(keys)}: {why}\n" for why, keys in given.notes.items())
        texts[run] += f"\n# Without a counterpart, or done otherwise:\n{notes}"
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.importing", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("config", type=Path, help="the other toolkit's YAML file")
    parser.add_argument("--kind", choices=TOOLKITS, help="whose it is; told by its keys otherwise")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs it ran on, for the global batch")
    parser.add_argument("--output_dir", type=Path, help="folder for the recipes, else printed")
    given = parser.parse_args(argv)
    folder = given.output_dir or Path()
    try:
        texts = recipe_texts(convert(given.config, given.kind, given.gpus), folder)
        if given.output_dir and (there := [str(file) for file in texts if file.exists()]):
            raise ConfigurationError(f"{', '.join(there)} is there: name another --output_dir")
    except (YamlError, ConfigurationError) as error:
        sys.stderr.write(f"{given.config} cannot be converted:\n{error}\n")
        return ConfigurationError.exit_code
    for file, text in texts.items():
        if given.output_dir:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{file}\n" if given.output_dir else f"# ---- {file}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
