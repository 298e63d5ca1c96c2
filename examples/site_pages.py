"""Copies README.md and docs/ to build/pages for the site's generator: see `make site`.

The documents are written for GitHub. On the site a link to another file of the repository leads to
`Repository` of `[project.urls]` in pyproject.toml; without one its text stays. Python-Markdown
wants a blank line before a list and four spaces within it; GitHub does not.
"""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TO = ROOT / "build" / "pages"
LINK = re.compile(
    r"```.*?```|`[^`\n]*`"  # code, as it is
    r'|(?P<start>!?\[(?P<text>[^][]*)\]\(|\]\(|(?:src|srcset|href)=")'
    r'(?P<file>[^)"#\s:]+)(?P<end>(?:#[^)"\s]*)?(?:[)"]|(?=\s)))',
    re.DOTALL,
)
ITEM = re.compile(r" *(?:[-*+]|\d+[.)]) +(?=\S)")


def published() -> dict[Path, Path]:
    """Return the path on the site of each file of the repository that is there."""
    files = (path for path in (ROOT / "docs").rglob("*") if path.is_file())
    pages = {path: path.relative_to(ROOT / "docs") for path in files}
    pages |= {path: Path(path.name) for path in ROOT.glob("*.md")}
    return pages | {ROOT / "README.md": Path("index.md")}


def with_links(text: str, source: Path, pages: dict[Path, Path], repository: str) -> str:
    """Return a document's text with the links of the site; a broken one ends the program."""

    def moved(link: re.Match[str]) -> str:
        if not link["file"]:
            return link[0]
        target = Path(os.path.normpath(source.parent / link["file"]))
        picture = link["start"].startswith(("!", "src"))
        if target in pages:
            to = os.path.relpath(pages[target], pages[source].parent)
        elif ROOT not in target.parents or not target.exists() or picture:
            wrong = "is no picture in docs/" if picture else "does not exist"
            sys.exit(f"{source.relative_to(ROOT)} links to {link['file']}, which {wrong}")
        elif repository:
            to = f"{repository}/blob/HEAD/{target.relative_to(ROOT)}"
        else:
            return link["text"] or link[0]
        return link["start"] + to + link["end"]

    return LINK.sub(moved, text)


def with_lists(text: str) -> str:
    """Return a document's text with lists that Python-Markdown reads as GitHub does."""
    lines = [""]
    columns: list[int] = []  # where the text of each open list begins
    fence = ""
    begins_with_item = False  # the lines since the last empty one
    for line in text.split("\n"):
        words = line.lstrip()
        indent = len(line) - len(words)
        item = None if fence else ITEM.match(line)
        if words and not fence and (item or not lines[-1]):
            columns = [column for column in columns if column <= indent]
        if not lines[-1]:
            begins_with_item = bool(item)
        elif item and not begins_with_item:
            lines.append("")
            begins_with_item = True
        cut = min(indent, columns[-1]) if columns else 0
        lines.append(" " * 4 * len(columns) + line[cut:] if words else "")
        if item:
            columns.append(item.end())
        if words.startswith(fence or ("```", "~~~")):
            fence = "" if fence else words[:3]
    return "\n".join(lines[1:])


def main() -> None:
    """Write build/pages anew. The navigation has to name each page, and nothing else."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    pages = published()
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"\S+\.md$", navigation, flags=re.MULTILINE))
    if odd := named ^ {str(page) for page in pages.values() if page.suffix == ".md"}:
        sys.exit(f"`nav` of mkdocs.yml and the documents differ: {', '.join(sorted(odd))}")
    shutil.rmtree(TO, ignore_errors=True)
    for source, page in pages.items():
        (TO / page).parent.mkdir(parents=True, exist_ok=True)
        if page.suffix != ".md":
            shutil.copyfile(source, TO / page)
            continue
        text = with_links(source.read_text(), source, pages, urls.get("Repository", ""))
        (TO / page).write_text(with_lists(text))


if __name__ == "__main__":
    main()
