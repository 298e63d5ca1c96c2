"""Write JSON schemas of the recipes, with which editors complete and check them as they are typed.

python examples/recipe_schemas.py
"""

import json
import sys
from pathlib import Path
from types import NoneType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.config.arguments import (  # noqa: E402 - the folder is not ROOT
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.declarations import EMPTY_DEFAULTS, Declaration, declared_settings  # noqa: E402
from utils.config.own_code import OwnCode  # noqa: E402
from utils.config.preparation import PreparationArguments  # noqa: E402

FOLDER = ROOT / "recipes" / "schema"
OF_A_RUN = (RunArguments, DataArguments, ModelArguments, OwnCode)
CLASSES: dict[str, tuple[type, ...]] = {
    "pretrain": (*OF_A_RUN, PretrainConfig),
    "sft": (*OF_A_RUN, FineTuneConfig),
    "data": (PreparationArguments,),
}
TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", dict: "object",
    list: "array", NoneType: "null",
}  # fmt: skip


def schemas() -> dict[Path, str]:
    """Return the text of each schema by file; no key is required, because flags may give it."""
    return {FOLDER / f"{kind}.json": text(classes) for kind, classes in CLASSES.items()}


def text(classes: tuple[type, ...]) -> str:
    """Return the schema of the settings that these classes declare."""
    declared = declared_settings(classes)
    files = {"type": ["string", "array"], "description": "recipes whose settings this one changes"}
    properties = {"extends": files} | {name: rule(each) for name, each in declared.items()}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    return json.dumps(schema, indent=1) + "\n"


def rule(declaration: Declaration) -> dict[str, Any]:
    """Return the schema of a setting's values.

    A list may be a single value, as in `checked_value`.
    """
    kinds = {TYPES[each] for each in declaration.origins if each in TYPES}
    if not declaration.required and declaration.default in EMPTY_DEFAULTS:
        kinds.add("null")
    found: dict[str, Any] = {"description": " ".join(declaration.help.split())}
    if declaration.choices is not None:
        empty = [None] if "null" in kinds else []
        return found | {"enum": [*declaration.choices, *empty]}
    if "array" in kinds:
        kinds |= {"string", "object", "number"}
    return found | {"type": sorted(kinds)}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for path, schema in schemas().items():
        path.write_text(schema)


if __name__ == "__main__":
    main()
