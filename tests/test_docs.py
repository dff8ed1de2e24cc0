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


# Each script in a process and a folder of its own; all of them have the import of torch and topovq from the one before.
RUNNER = """
import os, runpy, sys
import torch, topovq
for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(os.path.dirname(script))
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    with open(os.path.join(os.path.dirname(script), "code"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How the blocks of each page ended: exit code and what was said."""
    shown = [page for page in PAGES if blocks(page)]
    folders = [tmp_path_factory.mktemp("page") for _ in shown]
    for page, folder in zip(shown, folders):
        (folder / "page.py").write_text("\n".join(blocks(page)))
    environment = {**os.environ, "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUNNER, *(folder / "page.py" for folder in folders)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return {
        page: tuple((folder / name).read_text() for name in ("code", "said")) for page, folder in zip(shown, folders)
    }


@pytest.mark.xdist_group("blocks of the pages")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_python_blocks_run(page, ended):
    code, said = ended[page]
    assert code == "0", said[-3000:]


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
