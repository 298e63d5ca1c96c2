"""Write a small real corpus out of Python's own standard library, as plain JSONL.

    python examples/make_stdlib_corpus.py --output_dir data/stdlib

Every machine with Python has these texts, so the demo needs no download:

    pretrain.jsonl           source files                               {"text", "path"}
    pretrain_modules.jsonl   source files of held-out modules
    pretrain_package.jsonl   a package that is held out as a whole
    chats.jsonl              questions about its functions, with answers   {"messages"}
    chats_heldout.jsonl      the same facts, each in a wording that is not in chats.jsonl

An answer is the first sentence of a docstring, or a module. The same Python gives the same files.
"""

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
from collections import Counter
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
# The modules that the questions are about, and the characters of an answer.
MODULES = (
    *("shutil", "textwrap", "statistics", "tempfile", "fnmatch", "functools", "glob", "heapq"),
    *("secrets", "shlex", "uuid"),
)
SHORTEST, LONGEST = 20, 80
WHAT = (
    "What does {module}.{function} do?",
    "What is {module}.{function} for?",
    "Describe {module}.{function}.",
    "Explain the function {function} of the module {module}.",
    "Tell me about {function} in {module}.",
    "Say in one sentence what {module}.{function} does.",
)
WHERE = (
    "Which module has the function {function}?",
    "Where do I find {function}?",
    "From which module do I import {function}?",
    "In which module is {function}?",
)


def main() -> int:
    """Collect the texts and write the five files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("data/stdlib"))
    output_dir = parser.parse_args().output_dir
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = list(read_sources(library))
    asked = list(questions(documented_functions(sources)))
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, split in (("", "train"), ("_modules", "modules"), ("_package", "package")):
        rows = [{"text": text, "path": path} for path, text in sources if split_of(path) == split]
        write_jsonl(output_dir / f"pretrain{name}.jsonl", rows)
    for name, wanted in (("", False), ("_heldout", True)):
        chats = [chat(*texts) for is_held_out, *texts in asked if is_held_out == wanted]
        write_jsonl(output_dir / f"chats{name}.jsonl", chats)
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


def documented_functions(sources: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the first sentence of each function's docstring, by module and function.

    A function or sentence that another module has too is left out: its question has two answers.
    """
    texts = dict(sources)
    sentences: dict[tuple[str, str], str] = {}
    for module in MODULES:
        for node in ast.parse(texts.get(f"{module}.py", "")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
                sentence = " ".join(paragraph.split()).split(". ")[0].rstrip(".")
                if SHORTEST <= len(sentence) <= LONGEST and "->" not in sentence:
                    sentences[module, node.name] = sentence
    functions = Counter(function for _, function in sentences)
    counts = Counter(sentences.values())
    return {
        name: sentence
        for name, sentence in sentences.items()
        if functions[name[1]] == counts[sentence] == 1
    }


def questions(sentences: Mapping[tuple[str, str], str]) -> Iterator[tuple[bool, str, str]]:
    """Yield (is held out, question, answer); one wording of each fact is held out, in turn."""
    for number, ((module, function), sentence) in enumerate(sentences.items()):
        for wordings, answer in ((WHAT, sentence), (WHERE, module)):
            for place, wording in enumerate(wordings):
                question = wording.format(module=module, function=function)
                yield place == number % len(wordings), question, answer


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    """Return a question and its answer as a row of chats."""
    user = {"role": "user", "content": question}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line and say what was written."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # A file that would not change keeps its date: what was prepared from it stays up to date.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}: {text.count(chr(10)):,} documents, {len(text) / 1e6:.2f} MB\n")


if __name__ == "__main__":
    sys.exit(main())
