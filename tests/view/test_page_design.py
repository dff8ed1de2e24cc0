"""The demo's page and a run's report in a real browser: for every screen and eye, and each leads to the other.

Screenshots are left in build/screenshots.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from topovq.cli import Explore
from topovq.demo import demo
from topovq.view.report.page import EXPLORER, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
SCREENS = {"wide": (1280, 900), "phone": (390, 844)}
PAGES = {"demo": "index.html", "report": "kohonen/report.html"}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo of two steps, in a folder whose name is a hard one for links."""
    return demo(tmp_path_factory.mktemp("pages") / "my demo #1", steps=2).parent


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def opened(browser: Browser, page: Path, screen: str = "wide") -> Page:
    """The page, which asked for no other file."""
    width, height = SCREENS[screen]
    tab = browser.new_page(viewport={"width": width, "height": height})
    loaded: list[str] = []
    tab.on("request", lambda request: loaded.append(request.url))
    tab.goto(page.as_uri())
    assert [url for url in loaded if not url.startswith("data:")] == [page.as_uri()]
    return tab


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_use_the_page(browser: Browser, folder: Path, name: str) -> None:
    """On both screens, by day and by night: axe-core finds nothing, and only tables scroll sideways."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab = opened(browser, folder / PAGES[name])
    tab.locator("summary").click()
    for screen, (width, height) in SCREENS.items():
        tab.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            paper = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (sum(paper) < 200) == (scheme == "dark")
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), screen
            found = axe.Axe().run(tab)
            assert found.violations_count == 0, f"{screen}, {scheme}: {found.generate_report()}"
            tab.screenshot(path=SCREENSHOTS / f"{name}_{screen}_{scheme}.png")
    tab.close()


@pytest.mark.parametrize("name", PAGES)
def test_landmarks_scrollers_and_what_is_folded(browser: Browser, folder: Path, name: str) -> None:
    tab = opened(browser, folder / PAGES[name], "phone")
    expect(tab.get_by_role("main")).to_have_count(1)
    expect(tab.get_by_role("navigation")).to_have_count(1)
    configuration = tab.get_by_role("region", name="Configuration")
    expect(configuration).to_be_hidden()
    tab.get_by_text("Configuration, versions, hardware").click()
    expect(configuration).to_be_visible()
    figures = tab.get_by_role("region", name="Figures")
    figures.focus()
    expect(figures).to_be_focused()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("document.activeElement.scrollLeft > 0")
    tab.close()


def test_each_page_leads_to_the_others(browser: Browser, folder: Path) -> None:
    tab = opened(browser, folder / "index.html")
    for name in ("KSOM", "EMA-VQ"):
        tab.get_by_role("link", name=f"The report of {name}").click()
        expect(tab.get_by_role("heading", level=1)).to_have_text(name)
        tab.get_by_role("link", name="The demo").click()
        expect(tab.get_by_role("heading", level=1)).to_have_text("A codebook with a map")
    tab.close()


def test_the_explorer_is_one_command_and_one_link_away(browser: Browser, folder: Path) -> None:
    tab = opened(browser, folder / "index.html")
    ours, theirs = (folder.resolve() / kind for kind in ("kohonen", "ema"))
    expect(tab.locator("nav code")).to_have_text(f"topovq explore '{ours}' '{theirs}'")
    expect(tab.get_by_role("link", name="the explorer")).to_have_attribute("href", EXPLORER)
    assert urlsplit(EXPLORER).port == Explore(runs=()).port
    tab.close()


def test_a_report_finds_the_pages_beside_it(browser: Browser, folder: Path, tmp_path: Path) -> None:
    tab = opened(browser, write_report([folder / "kohonen", folder / "ema"], tmp_path / "both.html"))
    assert tab.locator("nav a").all_inner_texts() == [
        "The demo: both runs side by side",
        "The report of kohonen",
        "The report of ema",
        "the explorer",
    ]
    tab.get_by_role("link", name="The report of ema").click()
    expect(tab.get_by_role("heading", level=1)).to_have_text("EMA-VQ")
    tab.close()
