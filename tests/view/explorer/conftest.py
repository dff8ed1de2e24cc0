"""Two small runs (a VQ-VAE-2 on hexagons and its EMA twin), a folder of images, a server process, a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from browsing import serve
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from small_runs import make_run

TWINS = {"model": "vqvae2", "image_size": 32, "codebook_size": 24, "steps": 60, "validate_every": 30}
TWINS["model_options"] = {"hidden": 32, "residual_hidden": 8}
# Started from data, so that images differ in their tokens after so few steps.
HEXAGONS = {"grid": [4, 6], "topology": "hexagonal", "neighborhood": "hard", "kmeans_init": True}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        make_run(root / "kohonen", **TWINS, quantizer_options=HEXAGONS, snapshots=6),
        make_run(root / "ema", **TWINS, quantizer="ema", quantizer_options={"kmeans_init": True}),
    ]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two images, one broken, one text, and a link to an image outside of it."""
    root = tmp_path_factory.mktemp("pictures")
    for number, color in enumerate([(200, 30, 30), (30, 30, 200)]):
        Image.fromarray(np.full((40, 60, 3), color, np.uint8)).save(root / f"{number}.png")
    (root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (root / "notes.txt").write_text("secret")
    outside = tmp_path_factory.mktemp("elsewhere") / "outside.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(outside)
    (root / "link.png").symlink_to(outside)
    return root


@pytest.fixture(scope="session")
def server(runs: list[Path], folder: Path) -> Iterator[tuple[str, int]]:
    """The address and process number of `topovq explore`."""
    with serve(*runs, "--images", folder) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium here: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=flags)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser, server: tuple[str, int]) -> Iterator[Callable[..., Page]]:
    """Opens the page and waits for its image; afterwards no error was logged and no request left the machine."""
    pages: list[Page] = []
    asked: list[str] = []
    errors: list[str] = []

    def open_it(
        width: int = 1280,
        height: int = 900,
        scheme: Any = "light",
        address: str | None = None,
        says: str = "image",
        **options: Any,
    ) -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address or f"{server[0]}#image=validation/0")
        expect(page.locator("#status")).to_contain_text(says)
        pages.append(page)
        return page

    yield open_it
    for page in pages:
        page.close()
    assert errors == []
    hosts = {urlsplit(url).hostname for url in asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {"127.0.0.1"}


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()
