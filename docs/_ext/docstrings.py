"""Docstrings as they are written here, for autodoc: backticks are code, and arguments in columns stay in columns.

They are plain text, not reStructuredText, so that they read well in a terminal.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

COLUMNS = re.compile(r"^\s*[\w\"'`].*?\S {2,}\S", re.MULTILINE)  # a name, some spaces, what it is
CODE = re.compile(r"(`+[^`\n]+`+)")
MARKUP = re.compile(r"([*|\\]|_(?=\W|$))")


def paragraphs(text: str) -> list[str]:
    """reStructuredText of a docstring's paragraphs: those in columns, or indented, as they stand; others as prose."""
    made = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if COLUMNS.search(part) or part.startswith("  "):
            made.append("::\n\n" + "\n".join(f"    {line}" for line in part.splitlines()))
        else:
            pieces = CODE.split(" ".join(part.split()))
            made.append("".join(f"``{p.strip('`')}``" if CODE.fullmatch(p) else MARKUP.sub(r"\\\1", p) for p in pieces))
    return made


def process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [*"\n\n".join(paragraphs("\n".join(lines))).splitlines(), ""]


def signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, text: str | None, returns: str | None
) -> Any:
    """A class is called with the arguments of its __init__, also where a parent's __new__ takes any."""
    if what != "class" or text != "(*args, **kwargs)":
        return None
    _, *others = inspect.signature(thing.__init__).parameters.values()
    return stringify_signature(inspect.Signature(others), show_annotation=True, unqualified_typehints=True), returns


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True}
