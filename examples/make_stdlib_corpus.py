"""Write a small real corpus out of Python's own standard library, as plain JSONL.

    python examples/make_stdlib_corpus.py --output_dir data/stdlib

Every machine with Python has these texts, so the demo needs no download:

    pretrain.jsonl           source files                            {"text", "path"}
    pretrain_modules.jsonl   source files of held-out modules
    pretrain_package.jsonl   a package that is held out as a whole
    chats.jsonl              documented functions: instruction -> code   {"messages"}
    chats_heldout.jsonl      functions of the held-out modules and package

No function of a held-out module is in chats.jsonl. The same Python gives the same files.
"""

import argparse
import ast
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# Tests repeat themselves; tables of names and code points are data, not text to learn from.
LEFT_OUT_FOLDERS = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "ensurepip", "msilib"),
}
LONGEST_FILE_BYTES = 300_000
HELD_OUT_PACKAGE = "wsgiref"
HELD_OUT_SHARE = 0.03
SHORTEST_CODE, LONGEST_CODE = 80, 1500
LONGEST_DOCSTRING = 500


def main() -> int:
    """Collect the texts and write the five files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("data/stdlib"))
    output_dir = parser.parse_args().output_dir
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = list(read_sources(library))
    chats = list(unique_chats(sources))
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, split in (("", "train"), ("_modules", "modules"), ("_package", "package")):
        rows = [{"text": text, "path": path} for path, text in sources if split_of(path) == split]
        write_jsonl(output_dir / f"pretrain{name}.jsonl", rows)
    for name, is_held_out in (("", False), ("_heldout", True)):
        chosen = [
            {"messages": messages}
            for path, messages in chats
            if (split_of(path) != "train") == is_held_out
        ]
        write_jsonl(output_dir / f"chats{name}.jsonl", chosen)
    return 0


def read_sources(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (path inside the library, text) of every source file that is kept, sorted by path."""
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if LEFT_OUT_FOLDERS.intersection(path.parts) or file.stat().st_size > LONGEST_FILE_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old files declare another encoding
        if text.strip():
            yield path.as_posix(), text


def split_of(path: str) -> str:
    """Return train, modules or package; a hash of the module's name decides, not its place."""
    module = path.split("/")[0].removesuffix(".py")
    if module == HELD_OUT_PACKAGE:
        return "package"
    share = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") / 2**32
    return "modules" if share < HELD_OUT_SHARE else "train"


def unique_chats(
    sources: Iterable[tuple[str, str]],
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield (path, messages) of every documented function; held-out files claim a copy first."""
    seen: set[str] = set()
    for path, text in sorted(sources, key=lambda source: split_of(source[0]) == "train"):
        for instruction, code in documented_functions(text):
            if code not in seen and instruction not in seen:
                seen.update((code, instruction))
                yield (
                    path,
                    [
                        {"role": "user", "content": instruction},
                        {"role": "assistant", "content": code},
                    ],
                )


def documented_functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, code without docstring) of the functions that a source file documents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(docstring) > LONGEST_DOCSTRING or len(node.body) < 2:
            continue
        if node.body[0].lineno == node.lineno:
            continue  # all on one line: the docstring cannot be cut out by lines
        code = code_without_docstring(node, lines)
        if SHORTEST_CODE <= len(code) <= LONGEST_CODE:
            yield instruction_for(node, docstring), code


def code_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """Return the function's source from `def` on, dedented, comments kept."""
    docstring = node.body[0]
    first = node.lineno - 1
    before = lines[first : docstring.lineno - 1]
    after = lines[(docstring.end_lineno or docstring.lineno) : node.end_lineno]
    return textwrap.dedent("".join([*before, *after])).strip()


def instruction_for(node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> str:
    """Return what a user would ask to get this function."""
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"
    return f"Write the Python function `{signature}`.\n\n{inspect.cleandoc(docstring)}"


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line and say what was written."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # A file that would not change keeps its date: what was prepared from it stays up to date.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}: {text.count(chr(10)):,} documents, {len(text) / 1e6:.2f} MB\n")


if __name__ == "__main__":
    sys.exit(main())
