"""Every Python block of the README and of the pages in docs/ runs, in order, one namespace per file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def test_there_is_something_to_run():
    assert blocks(ROOT / "README.md"), "the README shows no Python"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    environment = {**os.environ, "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_ci_runs_what_the_readme_says():
    assert "make test" in (ROOT / "README.md").read_text()
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test"]
