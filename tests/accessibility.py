"""axe-core on a page that is open in a browser."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now, each with the elements it is about."""
    page.evaluate(_axe())
    found = page.evaluate("() => axe.run()")
    assert len(found["passes"]) > 10, "axe-core looked at next to nothing"
    return [f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']]}" for each in found["violations"]]


@cache
def _axe() -> str:
    spec = find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("no axe-core here: pip install axe-playwright-python")
    return (Path(spec.origin).parent / "axe.min.js").read_text()
