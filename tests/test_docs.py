"""The README and the pages: every Python block runs, every link leads somewhere, every table has its file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)\s]*)\)")
TABLE = re.compile(r"^```\{results\} (\S+)(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LONGEST = 200  # lines of a page


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def test_there_is_something_to_run():
    assert blocks(ROOT / "README.md"), "the README shows no Python"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_python_blocks_run(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    environment = {**os.environ, "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def anchors(page: Path) -> set[str]:
    """The headings as MyST and GitHub name them in links."""
    headings = HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(prose):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)} links to {target}, but there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_have_their_files(page):
    for file, options in TABLE.findall(page.read_text()):
        there = (DOCS / file.lstrip("/")).exists() or "\n:missing:" in options
        assert there, f"{name_of(page)} draws {file}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short(page):
    assert len(page.read_text().splitlines()) <= LONGEST


def test_every_page_is_in_the_contents():
    listed = {f"{line}.md" for line in (DOCS / "index.md").read_text().splitlines()}
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES[1:]} - {"index.md"}
    assert pages <= listed


def test_ci_runs_what_the_readme_says():
    assert "make test" in (ROOT / "README.md").read_text()
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test", "make docs"]
