"""The directive `command`: what a command of topovq prints, such as `{command} train --help`, when pages are built."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Command(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        from topovq.cli import main

        out = io.StringIO()
        os.environ.update(COLUMNS="96", NO_COLOR="1")
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(shlex.split(self.arguments[0]))
        text = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        if not text:
            raise self.error(f"topovq {self.arguments[0]} printed nothing")
        return [nodes.literal_block(text, text, language="text", classes=["command"])]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
