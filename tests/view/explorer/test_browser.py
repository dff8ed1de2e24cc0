"""The page in a real browser: what it shows when one looks, points, drops, shifts, paints and compares.

Screenshots are left in build/screenshots.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from topovq.tokenizer.atlas import charts, to_planes
from topovq.tokenizer.training import load_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser, server: tuple[str, int]) -> Iterator[Callable[..., Page]]:
    """Opens the page and waits for its image; afterwards no error was logged and no request left the machine."""
    pages: list[Page] = []
    asked: list[str] = []
    errors: list[str] = []

    def open_it(width: int = 1280, height: int = 900, scheme: Any = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server[0])
        expect(page.locator("#status")).to_have_text("validation image 0")
        pages.append(page)
        return page

    yield open_it
    for page in pages:
        page.close()
    assert errors == []
    assert {urlsplit(url).hostname for url in asked if not url.startswith("data:")} == {"127.0.0.1"}


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


def panel(page: Page, run: int = 0) -> Locator:
    return page.locator(f"[data-run='{run}']")


def decoded(page: Page, run: int = 0) -> Locator:
    return panel(page, run).locator(".pictures:not(.other) .decoded")


def pixels(image: Locator) -> np.ndarray:
    """What an <img> shows, uint8 [H, W, 3]."""
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    address = image.get_attribute("src") or ""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1]))))


def canvas_pixels(canvas: Locator) -> np.ndarray:
    address = canvas.evaluate("canvas => canvas.toDataURL()")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1]))))


def point_at_code(page: Page, code: int, run: int = 0) -> None:
    """Move the mouse to a code of the 4 x 6 map; odd rows of hexagons lie half a cell to the right."""
    hexagonal = run == 0
    row, column = divmod(code, 6)
    canvas = panel(page, run).locator(".map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    cell = box["width"] / (6.5 if hexagonal else 6)
    height = cell * 2 / 3**0.5 if hexagonal else cell
    x = (column + 0.5 + (0.5 * (row % 2) if hexagonal else 0)) * cell
    y = row * cell * (3**0.5 / 2 if hexagonal else 1) + height / 2
    page.mouse.move(box["x"] + x, box["y"] + y)


def token_place(page: Page, row: int, column: int, side: int, run: int = 0) -> tuple[float, float]:
    mosaic = panel(page, run).locator(".mosaic")
    mosaic.scroll_into_view_if_needed()
    box = mosaic.bounding_box()
    assert box
    return box["x"] + (column + 0.5) * box["width"] / side, box["y"] + (row + 0.5) * box["height"] / side


def test_the_page_shows_the_run_its_map_and_an_image(page: Page) -> None:
    expect(panel(page).locator("h2")).to_have_text("kohonen")
    expect(panel(page).locator(".facts")).to_contain_text("vqvae2, kohonen, 4 x 6 hexagonal, validation loss")
    expect(panel(page).locator(".score").first).to_have_text(re.compile(r"decoded, [\d.]+ dB, SSIM"))
    seen = {}
    for view in ("codes", "distances", "hits", "colors"):
        panel(page).locator(".view").select_option(view)
        seen[view] = canvas_pixels(panel(page).locator(".map"))
        assert len(np.unique(seen[view].reshape(-1, 4), axis=0)) > 5
        assert seen[view][0, 0, 3] == 0  # beside the tip of the first hexagon there is nothing
    assert len({view.tobytes() for view in seen.values()}) == 4
    page.screenshot(path=SCREENSHOTS / "desktop-light.png", full_page=True)


def test_pointing_lights_up_tokens_and_codes(page: Page, runs: list[Path]) -> None:
    model = load_run(runs[0])
    image = torch.from_numpy(pixels(panel(page).locator(".original").first).copy()).permute(2, 0, 1)[None]
    top = to_planes(model.encode(image))[0][0]
    code = int(top[1, 2])
    page.mouse.move(*token_place(page, 1, 2, 4))
    expect(panel(page).locator(".token")).to_have_text(f"token at row 1, column 2: code {code}")
    readout = panel(page).locator(".readout")
    expect(readout).to_contain_text(f"Code {code} at ({code // 6}, {code % 6}): used")
    expect(readout).to_contain_text(f"{int((top == code).sum())} here; distance to neighbors")
    other = (code + 7) % 24
    plain = canvas_pixels(panel(page).locator(".map"))
    point_at_code(page, other)
    expect(readout).to_contain_text(f"Code {other} at ({other // 6}, {other % 6})")
    assert not np.array_equal(canvas_pixels(panel(page).locator(".map")), plain)
    point_at_code(page, code)
    expect(panel(page).locator(".mosaic")).to_have_attribute("data-lit", str(int((top == code).sum())))


DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type }));
  window.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
}"""


def test_an_image_can_be_dropped_in(page: Page, folder: Path) -> None:
    data = base64.b64encode((folder / "0.png").read_bytes()).decode()
    page.evaluate(DROP, ["red.png", "image/png", data])
    expect(page.locator("#status")).to_have_text("red.png")
    for run in (0, 1):
        assert pixels(panel(page, run).locator(".original").first)[5, 5].tolist() == [200, 30, 30]
    before = decoded(page).get_attribute("src")
    page.evaluate(DROP, ["notes.txt", "text/plain", base64.b64encode(b"hello").decode()])
    expect(page.locator("#status")).to_contain_text("no image of a known type")
    expect(page.locator("#status")).to_have_class("error")
    assert decoded(page).get_attribute("src") == before
    page.locator("#file").set_input_files(str(folder / "1.png"))
    expect(page.locator("#status")).to_have_text("1.png")
    assert pixels(panel(page).locator(".original").first)[5, 5].tolist() == [30, 30, 200]


def test_shifting_both_runs_and_one_level_alone(page: Page, runs: list[Path]) -> None:
    plain = [pixels(decoded(page, run)) for run in (0, 1)]
    page.locator("#pad").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    for run in (0, 1):
        expect(panel(page, run).locator(".score").first).to_have_text("tokens moved by (2, 1), (2, 1)")
        model = load_run(runs[run])
        image = torch.from_numpy(pixels(panel(page, run).locator(".original").first).copy()).permute(2, 0, 1)[None]
        moved = [c.grid.shift(p, (1, 2)) for c, p in zip(charts(model), to_planes(model.encode(image)))]
        assert np.array_equal(pixels(decoded(page, run)), model.decode(tuple(moved))[0].permute(1, 2, 0).numpy())
        assert not np.array_equal(pixels(decoded(page, run)), plain[run])
    page.screenshot(path=SCREENSHOTS / "compare-shifted.png", full_page=True)
    page.locator("#reset").click()
    for run in (0, 1):
        expect(panel(page, run).locator(".score").first).to_contain_text("SSIM")
        assert np.array_equal(pixels(decoded(page, run)), plain[run])
    page.locator("#target").select_option("1")
    page.locator("#dx").fill("-3")
    expect(panel(page).locator(".score").first).to_have_text("tokens moved by (0, 0), (-3, 0)")
    assert page.locator("#target option").all_text_contents() == ["all maps", "top alone", "bottom alone"]


def test_dragging_on_the_pad_shifts(page: Page) -> None:
    box = page.locator("#pad").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] * 0.05, steps=5)
    page.mouse.up()
    expect(panel(page).locator(".score").first).to_have_text("tokens moved by (6, -6), (6, -6)")
    expect(page.locator("#dx")).to_have_value("6")


def test_painting_a_code_and_undoing_it(page: Page, runs: list[Path]) -> None:
    before = pixels(decoded(page))
    page.get_by_label("Paint").check()
    page.mouse.move(*token_place(page, 0, 0, 4))
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#status")).to_contain_text("Pick a code on the map first")
    model = load_run(runs[0])
    image = torch.from_numpy(pixels(panel(page).locator(".original").first).copy()).permute(2, 0, 1)[None]
    planes = to_planes(model.encode(image))
    code = (int(planes[0][0, 0, 0]) + 13) % 24
    point_at_code(page, code)
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#status")).to_have_text(f"code {code} is picked")
    page.mouse.move(*token_place(page, 0, 0, 4))
    page.mouse.down()
    page.mouse.up()
    expect(panel(page).locator(".score").first).to_have_text("decoded after your edits")
    planes[0][0, 0, 0] = code
    assert np.array_equal(pixels(decoded(page)), model.decode(tuple(planes))[0].permute(1, 2, 0).numpy())
    expect(panel(page).locator(".token")).to_have_text(f"token at row 0, column 0: code {code}")
    page.screenshot(path=SCREENSHOTS / "painted.png", full_page=True)
    page.get_by_role("button", name="Undo edits").click()
    expect(panel(page).locator(".score").first).to_contain_text("SSIM")
    assert np.array_equal(pixels(decoded(page)), before)


def test_a_region_is_exchanged_with_a_second_image(page: Page, runs: list[Path]) -> None:
    page.get_by_label("Swap").check()
    page.get_by_role("button", name="Choose the second image").click()
    page.locator("#thumbnails button").nth(5).click()
    expect(page.locator("#status")).to_have_text("validation image 5 is the second image")
    first = pixels(panel(page).locator(".original").first)
    second = pixels(panel(page).locator(".other .original"))
    before = panel(page).locator(".other .decoded").get_attribute("src")
    page.mouse.move(*token_place(page, 0, 0, 4))
    page.mouse.down()
    page.mouse.move(*token_place(page, 3, 3, 4), steps=4)
    page.mouse.up()
    expect(page.locator("#status")).to_have_text("exchanged 4 x 4 tokens with the second image")
    expect(panel(page).locator(".score").first).to_have_text("decoded after your edits")
    model = load_run(runs[0])
    both = torch.from_numpy(np.stack([second, first])).permute(0, 3, 1, 2)
    ours, theirs = model.decode(model.encode(both)).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(pixels(decoded(page)), ours)  # all tokens were exchanged
    page.wait_for_function("before => document.querySelector('.other .decoded').src !== before", arg=before)
    assert np.array_equal(pixels(panel(page).locator(".other .decoded")), theirs)


def test_a_path_between_two_codes(page: Page) -> None:
    for code, button in ((0, "Path starts here"), (5, "Path ends here")):
        point_at_code(page, code)
        page.mouse.down()
        page.mouse.up()
        panel(page).get_by_role("button", name=button).click()
    strip = panel(page).locator(".strip")
    expect(strip.locator("figcaption")).to_have_text("from code 0 to code 5: 6 codes on the way")
    assert strip.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 6 * 24 + 5


def test_everything_by_keyboard(page: Page) -> None:
    canvas = panel(page).locator(".map")
    canvas.focus()
    page.keyboard.press("ArrowRight")  # the first key lands on the first code
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(panel(page).locator(".readout")).to_contain_text("Code 2 at (0, 2)")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("code 2 is picked")
    whole = canvas_pixels(canvas)
    page.keyboard.press("+")
    assert not np.array_equal(canvas_pixels(canvas), whole)
    page.keyboard.press("0")
    page.get_by_label("Paint").focus()
    page.keyboard.press("Space")
    mosaic = panel(page).locator(".mosaic")
    mosaic.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(panel(page).locator(".token")).to_have_text("token at row 1, column 0: code 2")
    unreachable = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input, canvas, #pad')].filter((e) => e.tabIndex < 0)"
        ".map((e) => e.outerHTML)"
    )
    assert unreachable == []
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input, canvas, img')].filter((e) => !(e.ariaLabel || "
        "e.textContent.trim() || e.alt || e.closest('label') || e.querySelector('img[alt]') || e.closest('[hidden]')))"
        ".map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_the_bottom_level_has_its_own_map_and_mosaic(page: Page) -> None:
    panel(page).locator(".map-choice").select_option("1")
    expect(panel(page).locator(".mosaic")).to_have_attribute("data-size", "8 x 8")
    page.mouse.move(*token_place(page, 7, 7, 8))
    expect(panel(page).locator(".token")).to_contain_text("token at row 7, column 7: code")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page(390, 844, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    pad, image = page.locator("#pad").bounding_box(), decoded(page).bounding_box()
    assert pad
    assert image
    assert image["y"] + image["height"] - pad["y"] < 844  # one sees the image while one shifts
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", color))) / 3
    assert (brightness > 200) == (scheme == "light")
    page.screenshot(path=SCREENSHOTS / f"phone-{scheme}.png", full_page=True)


def test_the_report_is_read_without_a_script_or_a_network(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    from topovq.view.report import write_report

    report = write_report(runs, tmp_path / "report.html")
    context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 390, "height": 844})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    expect(page.locator("h1")).to_have_text("kohonen and ema")
    expect(page.locator("svg[role=img]")).to_have_count(3)
    assert page.locator("img").count() >= 20
    page.screenshot(path=SCREENSHOTS / "report-phone.png", full_page=True)
    page.set_viewport_size({"width": 1100, "height": 900})
    page.screenshot(path=SCREENSHOTS / "report.png", full_page=True)
    assert len(page.pdf()) > 10_000
    context.close()
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
