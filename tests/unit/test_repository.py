"""The repository keeps its own rules: recipes, documents, imports, sizes."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks.figures import (
    exactness,
    float8,
    interruptions,
    loss_plot,
    speed,
    speed_plot,
    staging,
)
from utils.observe.history import read_run

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "utils").rglob("*.py"))
SCRIPTS = ["prepare_data.py", "pretrain.py", "report.py", "sft_train.py"]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Each package may import the packages named here, and itself.
ALLOWED = {
    "run": {
        "publish", "training", "plan", "model", "kernels", "callbacks", "observe", "prepare",
        "checkpoints", "data", "launch", "config", "host",
    },
    "training": {
        "plan", "model", "callbacks", "checkpoints", "kernels", "data", "launch", "config", "host",
    },
    "plan": {
        "model", "checkpoints", "prepare", "data", "kernels", "launch", "config", "host",
    },
    "callbacks": {"model", "checkpoints", "prepare", "data", "launch", "config", "host"},
    "publish": {"model", "callbacks", "checkpoints", "data", "launch", "config", "host"},
    "submit": {"observe", "prepare", "launch", "config", "host"},
    "observe": {"checkpoints", "launch", "config", "host"},
    "doctor": {"kernels", "config", "host"},
    "importing": {"config"},
    "model": {"checkpoints", "data", "kernels", "launch", "config", "host"},
    "prepare": {"data", "config", "host"},
    "checkpoints": {"config", "host"},
    "data": {"launch", "config", "host"},
    "kernels": {"config", "host"},
    "launch": {"config", "host"},
    "config": {"host"},  # only its redaction, see below
    "host": {"config"},  # only its errors, see below
}  # fmt: skip
# Modules and functions must be readable in one sitting. Raising a limit is a decision.
MODULE_LINES = 400
FUNCTION_LINES = 60
SCRIPT_LINES = 120
MAIN_LINES = 51


def imported(path: Path) -> set[str]:
    """Return the modules of this repository that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.split(".")[0] in {"utils", "prepare_data", "pretrain"}}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_small_says_what_it_owns_and_imports_one_way(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no docstring"
    assert text.count("\n") <= MODULE_LINES
    assert path.stem not in {"misc", "common", "helpers", "utils", "general"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"
    package = path.relative_to(ROOT / "utils").parts[0]
    for name in imported(path):
        assert name.startswith("utils."), f"{path} imports the script {name}"
        other = name.split(".")[1]
        assert other in ALLOWED.get(package, set()) | {package}, f"{package} imports {name}"
        if package == "host" and other == "config":
            assert name == "utils.config.errors"
        if package == "config" and other == "host":
            assert name == "utils.host.redaction"


# main: each command's entry. The others have the same value in each module.
MANY_TIMES = {"main", "logger", "ROOT", "GIB", "SAMPLING"}


def test_a_public_name_of_utils_is_defined_in_one_module():
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                places.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    public = {name for name in places if not name.startswith("_")} - MANY_TIMES
    assert len(public) > 1000
    assert {name: places[name] for name in public if len(places[name]) > 1} == {}


def test_modules_of_tests_have_names_of_their_own():
    """Without that pytest cannot import the second one ("import file mismatch")."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not [name for name, count in Counter(names).items() if count > 1]


@pytest.mark.parametrize("script", [*SCRIPTS, "status.py", "chat.py"])
def test_a_script_is_a_short_story(script):
    text = (ROOT / script).read_text()
    assert text.count("\n") <= SCRIPT_LINES
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    first = ["parse_options"] if script == "status.py" else []  # its many options
    assert [function.name for function in functions] == [*first, "main"]
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno < MAIN_LINES


def test_both_training_scripts_take_the_same_steps():
    """`diff pretrain.py sft_train.py` shows only the differences of the two trainings."""

    def steps(script: str) -> list[str]:
        main = next(
            node
            for node in ast.parse((ROOT / script).read_text()).body
            if isinstance(node, ast.FunctionDef)
        )
        calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        return [ast.unparse(call.func) for call in calls]

    pretraining = steps("pretrain.py")
    renamed = {"parse_fine_tuning": "parse_pretraining", "FineTuneTrainer": "PackedTrainer"}
    assert [renamed.get(name, name) for name in steps("sft_train.py")] == pretraining


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/**/*.yaml")), ids=lambda p: p.name)
def test_a_recipe_is_a_mapping_and_says_its_command(recipe):
    assert isinstance(yaml.safe_load(recipe.read_text()), dict)
    script = {"pretrain": "pretrain.py", "sft": "sft_train.py"}.get(recipe.parent.name)
    if script:
        assert f"python {script} --config {recipe.relative_to(ROOT)}" in recipe.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_paths_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+?)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(
        r"`((?:utils|recipes|tests|docs|accelerate_configs|examples)/[^`\s]*)`", text
    ):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


# Examples in messages and docstrings, and accelerate's own file.
MADE_UP = {"recipes/demo.yaml", "recipes/sweep/FILE.yaml", "recipes/data/my_data.yaml",
           "utils/environment.py"}  # fmt: skip
NAMED = re.compile(
    r"\b(?:utils|docs|slurm|recipes|accelerate_configs|benchmarks|tests|examples)"
    r"/[\w/.-]+?\.(?:py|md|sh|yaml|jinja|json)(?:#[\w-]+)?|python3? -m ((?:utils|benchmarks)[\w.]*)"
)


def test_files_anchors_and_modules_that_code_names_exist():
    """Check names in messages, comments and docstrings."""
    code = [*MODULES, *(ROOT / script for script in SCRIPTS), *(ROOT / "slurm").glob("*.sh")]
    missing = []
    for path in code:
        for found in NAMED.finditer(path.read_text()):
            name, _, anchor = found[0].partition("#")
            if found[1]:
                module = ROOT / found[1].rstrip(".").replace(".", "/")
                there = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
            else:
                there = name in MADE_UP or (ROOT / name).exists()
            if there and anchor:
                headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
                kept = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
                there = anchor in kept
            if not there:
                missing.append(f"{path.relative_to(ROOT)}: {found[0]}")
    assert not missing


def test_the_ways_in_the_architecture_are_short_and_follow_the_imports():
    """Limit the files that a reader opens for a document, a chat, a flag and a checkpoint."""
    ways = (ROOT / "docs" / "internals" / "architecture.md").read_text().split("\n## ")[1:5]
    for way, at_most in zip(ways, (12, 12, 6, 12), strict=True):
        script, *files = re.findall(r"^\| `(\S+\.py)` \|", way, flags=re.MULTILINE)
        assert 4 < len(files) <= at_most, way.split("\n")[0]
        imported = imported_files(script)
        for file in files:
            assert file in imported, f"no file above imports {file}"
            imported |= imported_files(file)


def imported_files(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{(module or '').replace('.', '/')}.py" for module in modules}


def test_the_schemas_are_those_of_the_settings_and_each_recipe_names_and_passes_its_own():
    sys.path.insert(0, str(ROOT / "examples"))
    import recipe_schemas

    found = {path: path.read_text() for path in recipe_schemas.FOLDER.glob("*.json")}
    assert found == recipe_schemas.schemas(), "run make figures"
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    kinds |= {float: "number", type(None): "null"}
    for recipe in [*ROOT.glob("recipes/sft/**/*.yaml"), *ROOT.glob("recipes/pretrain/**/*.yaml"),
                   *ROOT.glob("recipes/data/*.yaml")]:  # fmt: skip
        schema = recipe.parent / recipe.read_text().splitlines()[0].partition("$schema=")[2]
        rules = json.loads(found[schema.resolve()])["properties"]
        for name, value in yaml.safe_load(recipe.read_text()).items():
            rule = rules[name]
            allowed = rule.get("type", [])
            fits = kinds[type(value)] in allowed or (type(value) is int and "number" in allowed)
            assert value in rule.get("enum", [value]), f"{recipe.name}: {name}"
            assert fits or "enum" in rule or name == "extends", f"{recipe.name}: {name}"


def test_the_figures_of_the_documents_are_those_of_the_result_files():
    sys.path.insert(0, str(ROOT / "examples"))
    import demo_figures
    import recipes_table
    import settings_tables

    for path, renew, found in (
        (ROOT / "docs" / "demo.md", demo_figures.with_figures, "| pretrain |"),
        (recipes_table.DOCUMENT, recipes_table.with_tables, "\n- ["),
        (settings_tables.DOCUMENT, settings_tables.with_tables, "\n- `"),
        (interruptions.DOCUMENT, interruptions.with_table, " pretraining |"),
        (staging.DOCUMENT, staging.with_table, "| `stage_data: true` |"),
        (exactness.DOCUMENT, exactness.with_figures, "| one rank |"),
        (float8.DOCUMENT, float8.with_figures, "| `fp8: true` |"),
    ):
        document = path.read_text()
        assert renew(document) == document, "run make figures"
        assert document.count(found) > (40 if found[0] == "\n" else 0), path.name
    for path, figures in speed.documents().items():
        document = path.read_text()
        assert speed.with_figures(document, figures) == document, "run make figures"
        assert figures in document
        assert figures.count("| Stoker") >= 1, f"no figures for {path.name}"
    fp8 = json.loads(float8.RESULT.read_text())
    rowwise, tensorwise = (float8.gain(fp8, name) for name in ("rowwise", "tensorwise"))
    said = (
        f"trained {rowwise:.2f} times as fast as in bf16, with `tensorwise` {tensorwise:.2f} times"
    )
    assert said in " ".join((ROOT / "docs" / "running.md").read_text().split())
    before = speed_plot.PICTURE.read_text()
    assert speed_plot.drawn(speed_plot.results()) == before, "run make figures"


def test_the_readmes_picture_is_that_of_the_recorded_run():
    """`make figures` draws it; each loss equals that of the uninterrupted run."""
    run, picture = loss_plot.RECORD, loss_plot.PICTURE.read_text()
    assert loss_plot.drawn() == picture, "run make figures"
    assert "largest difference of 115 logged losses: 0<" in picture
    whole = dict(json.loads((run / "uninterrupted.json").read_text())["losses"])
    starts = read_run(run).starts
    assert [start.lost_steps > 0 for start in starts] == [True, True, False]
    lines = [line for start in starts for line in start.lines if "loss" in line]
    assert all(line["loss"] == whole[line["step"]] for line in lines)
    assert {line["step"] for line in lines} == set(whole)


@pytest.mark.parametrize("script", ["pretrain", "sft_train"])
def test_a_script_sets_the_environment_before_the_libraries_that_read_it(script):
    program = f"import sys, {script}; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
