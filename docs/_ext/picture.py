"""The directive `picture`: a figure of a page; where its file does not exist yet, the text of `missing`, or nothing.

    ```{picture} ../results_prior.png
    :alt: What it shows
    :missing: Nobody has run this yet.
    The caption
    ```

The file may also end in .webp: large pictures do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.directives.patches import Figure


class Picture(Figure):
    option_spec: ClassVar = {**(Figure.option_spec or {}), "missing": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        _, path = env.relfn2path(self.arguments[0])
        missing = self.options.pop("missing", "")
        for suffix in (Path(path).suffix, ".webp"):
            env.note_dependency(str(Path(path).with_suffix(suffix)))
            if Path(path).with_suffix(suffix).is_file():
                self.arguments[0] = str(Path(self.arguments[0]).with_suffix(suffix))
                return super().run()
        return [nodes.paragraph("", missing)] if missing else []


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True}
