"""Figures in documents: what stands between two marks is made anew from result files."""

import re


def replace_between(document: str, begin: str, end: str, text: str) -> str:
    """Return the document with `text` between the marks, on lines of its own."""
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{begin}\n{text}\n{end}", document, flags=re.DOTALL)
