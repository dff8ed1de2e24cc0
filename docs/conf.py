"""How the pages are built: `make docs`, where a warning is an error."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

from topovq import __version__  # noqa: E402

project, author, release = "topovq", "the topovq authors", __version__
html_title, html_theme = f"topovq {release}", "furo"
html_static_path, html_css_files, html_show_copyright = ["_static"], ["style.css"], False
extensions = ["myst_parser", "sphinx.ext.autodoc", "results", "picture", "command", "docstrings"]
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 3
highlight_language = "text"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # types in signatures: most are torch's, whose pages are not read here
suppress_warnings = ["config.cache"]
