"""What hands do on the page: the readout, wheel and fingers, undo, links, downloads, help, legends, markers."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import canvas_pixels, code_place, decoded, panel, pick_code, pixels, readout, score, token_place
from PIL import Image
from playwright.sync_api import Page, expect

from topovq.cli import main
from topovq.tokenizer.tokenfile import read_tokens
from topovq.tokenizer.training import load_run

pytestmark = pytest.mark.xdist_group("explorer")


def scrolled(page: Page) -> float:
    return page.evaluate("scrollY")


def in_view(page: Page, box: Any) -> bool:
    size = page.viewport_size
    assert size
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"] and box["x"] + box["width"] <= size["width"]


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_the_readout_is_always_in_view_with_the_code_enlarged(
    open_page: Callable[..., Page], size: tuple[int, int]
) -> None:
    page = open_page(*size)
    for where in (0, 99_999):
        page.evaluate(f"scrollTo(0, {where})")
        assert in_view(page, readout(page).bounding_box())
    page.mouse.move(*code_place(page, 8))
    told = readout(page)
    expect(told).to_contain_text("code 8 at (1, 2)")
    assert in_view(page, told.bounding_box())
    enlarged = told.locator("canvas")
    box = enlarged.bounding_box()
    assert box
    assert box["width"] >= 55
    expect(enlarged).to_have_attribute("data-code", "8")
    sheet = page.request.get(f"{page.url.split('#')[0]}api/map?run=0").json()["sheet"]
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet["image"].split(",")[1]))))
    row, column = divmod(8, sheet["columns"])
    tile = whole[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
    assert np.array_equal(canvas_pixels(enlarged)[..., :3], tile.repeat(10, 0).repeat(10, 1))


def test_the_wheel_scrolls_the_page_and_zooms_with_ctrl(open_page: Callable[..., Page]) -> None:
    page = open_page(1000, 500)
    canvas = panel(page).locator(".map")
    whole = canvas_pixels(canvas)
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(500, 250)
    page.mouse.wheel(0, 200)
    page.wait_for_function("() => scrollY > 100")
    page.mouse.move(*code_place(page, 9))
    page.mouse.wheel(0, -100)
    page.wait_for_timeout(200)
    page.mouse.move(1, 1)
    assert np.array_equal(canvas_pixels(canvas), whole)
    page.mouse.move(*code_place(page, 9))
    before = scrolled(page)
    page.keyboard.down("Control")
    for _ in range(4):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    expect(canvas).to_have_class("map zoomed")
    assert scrolled(page) == before
    panel(page).get_by_role("button", name="Whole map").click()
    page.mouse.move(1, 1)
    expect(canvas).to_have_class("map")
    assert np.array_equal(canvas_pixels(canvas), whole)


def test_two_fingers_zoom_the_map_and_one_scrolls_the_page(open_page: Callable[..., Page]) -> None:
    page = open_page(390, 844, has_touch=True, is_mobile=True)
    x, y = code_place(page, 9)
    fingers = page.context.new_cdp_session(page)

    def touch(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(places)]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    canvas = panel(page).locator(".map")
    top = scrolled(page)
    touch("touchStart", (x - 20, y), (x + 20, y))
    for far in (30, 50, 70):
        touch("touchMove", (x - far, y), (x + far, y))
    touch("touchEnd")
    expect(canvas).to_have_class("map zoomed")
    assert scrolled(page) == top
    assert page.evaluate("visualViewport.scale") == 1  # the map was zoomed, not the page
    assert "pick=" not in page.url
    panel(page).get_by_role("button", name="Whole map").tap()
    expect(canvas).to_have_class("map")
    x, y = code_place(page, 9)
    top = scrolled(page)
    touch("touchStart", (x, y))
    for far in (10, 40, 80, 120):
        touch("touchMove", (x, y + far))
    touch("touchEnd")
    page.wait_for_function("top => scrollY < top - 50", arg=top)
    page.touchscreen.tap(*code_place(page, 9))
    expect(page.locator("#status")).to_contain_text("code 9 is picked")


def test_undo_and_redo_are_a_stack(page: Page, runs: list[Path]) -> None:
    undo, redo, over = (page.get_by_role("button", name=name) for name in ("Undo", "Redo", "Start over"))
    for button in (undo, redo, over):
        expect(button).to_be_disabled()
    plain = [pixels(decoded(page, run)) for run in (0, 1)]
    page.locator("#pad").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(score(page)).to_have_text("tokens moved by (0, 2) (rows, columns)")
    page.keyboard.press("Control+z")
    expect(score(page)).to_have_text("tokens moved by (0, 1) (rows, columns)")
    expect(page.locator("#dx")).to_have_value("1")
    expect(redo).to_be_enabled()
    page.get_by_label("Paint").check()
    pick_code(page, 13)
    # One stroke over four tokens, made to what the shift shows: one step.
    page.mouse.move(*token_place(page, 2, 0, 4))
    page.mouse.down()
    for column in range(1, 4):
        page.mouse.move(*token_place(page, 2, column, 4), steps=3)
    page.mouse.up()
    expect(score(page)).to_have_text("decoded after your edits")
    expect(redo).to_be_disabled()  # what was undone is gone
    expect(page.locator("#dx")).to_have_value("0")
    edited = [pixels(decoded(page, run)) for run in (0, 1)]
    undo.click()
    for run in (0, 1):
        expect(score(page, run)).to_have_text("tokens moved by (0, 1) (rows, columns)")
    page.keyboard.press("Control+Shift+z")
    for run in (0, 1):
        expect(score(page, run)).to_have_text("decoded after your edits")
        assert np.array_equal(pixels(decoded(page, run)), edited[run])
        assert not np.array_equal(edited[run], plain[run])
    page.locator("#thumbnails button").nth(3).click()
    expect(page.locator("#status")).to_have_text("validation image 3")
    page.keyboard.press("Control+z")  # the image before, with its edits
    for run in (0, 1):
        expect(score(page, run)).to_have_text("decoded after your edits")
        assert np.array_equal(pixels(decoded(page, run)), edited[run])
    over.click()
    for run in (0, 1):
        expect(score(page, run)).to_contain_text("SSIM")
        assert np.array_equal(pixels(decoded(page, run)), plain[run])
    expect(over).to_be_disabled()
    for _ in range(4):
        page.keyboard.press("Control+z")
    expect(undo).to_be_disabled()


def test_a_link_brings_back_what_one_saw(page: Page, open_page: Callable[..., Page]) -> None:
    page.locator("#thumbnails button").nth(2).click()
    expect(page.locator("#status")).to_have_text("validation image 2")
    page.get_by_label("Swap").check()
    page.get_by_role("button", name="Choose the second image").click()
    page.locator("#thumbnails button").nth(5).click()
    expect(page.locator("#status")).to_have_text("validation image 5 is the second image")
    page.locator("#dx").fill("1")
    expect(score(page)).to_have_text("tokens moved by (0, 1) (rows, columns)")
    page.mouse.move(*token_place(page, 0, 0, 4))
    page.mouse.down()
    page.mouse.move(*token_place(page, 1, 3, 4), steps=3)
    page.mouse.up()
    expect(score(page)).to_have_text("decoded after your edits")
    page.locator("#dy").fill("-2")
    panel(page).locator(".view").select_option("hits")
    for run in (0, 1):
        expect(score(page, run)).to_have_text("tokens moved by (-2, 0) (rows, columns)")
    page.wait_for_url(re.compile("image=validation/2.*shift=0,-2_0,-2.*view=hits.*edits="))
    assert len(page.url) < 300
    again = open_page(address=page.url, says="validation image 2")
    for run in (0, 1):
        expect(score(again, run)).to_have_text("tokens moved by (-2, 0) (rows, columns)")
        assert np.array_equal(pixels(decoded(again, run)), pixels(decoded(page, run)))
        other = ".other .decoded"
        assert np.array_equal(pixels(panel(again, run).locator(other)), pixels(panel(page, run).locator(other)))
    expect(panel(again).locator(".view")).to_have_value("hits")
    expect(again.get_by_label("Swap")).to_be_checked()
    expect(again.get_by_role("button", name="Undo")).to_be_disabled()

    # Another link in the same tab, and links that do not fit.
    base = page.url.split("#")[0]
    again.goto(f"{base}#image=samples/1")
    expect(again.locator("#status")).to_have_text("photograph 1")
    for link, words in {
        "image=opened/0": "images that were opened by hand are not in a link",
        "image=validation/0&edits=f.0.0.9.9.9.9.1.1": "Some edits of the link do not fit",
        "image=validation/0&edits=f.0.0.1.1.1.1.99.1_m.1": "Some edits of the link do not fit",
        "image=validation/0&edits=__proto__": "Some edits of the link do not fit",
    }.items():
        again.goto(f"{base}#{link}")
        expect(again.locator("#status")).to_contain_text(words)
        expect(score(again)).to_contain_text("SSIM")


def test_picture_and_tokens_are_saved(page: Page, runs: list[Path], tmp_path: Path) -> None:
    page.locator("#dx").fill("2")
    expect(score(page, 1)).to_contain_text("tokens moved")
    with page.expect_download() as saved:
        panel(page, 1).get_by_role("button", name="Save picture").click()
    assert saved.value.suggested_filename == "ema-validation-image-0.png"
    saved.value.save_as(tmp_path / "shown.png")
    shown = pixels(decoded(page, 1))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "shown.png")), shown)
    with page.expect_download() as saved:
        panel(page, 1).get_by_role("button", name="Save tokens").click()
    assert saved.value.suggested_filename == "ema-validation-image-0.npz"
    saved.value.save_as(tmp_path / "tokens.npz")
    [(names, levels)] = read_tokens(tmp_path / "tokens.npz", 8)
    assert names == ["validation image 0"]
    model = load_run(runs[1])
    assert np.array_equal(model.decode(levels)[0].permute(1, 2, 0).numpy(), shown)
    main(["decode", str(runs[1]), str(tmp_path / "tokens.npz"), "-o", str(tmp_path / "out"), "--device", "cpu"])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / "validation image 0.png")), shown)


def test_help_legends_and_markers(page: Page) -> None:
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Help")).to_contain_text("Ctrl and the wheel")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    legend = panel(page).locator(".legend")
    views = {
        "codes": "Every code decoded",
        "distances": "apart",
        "hits": "times (log scale)",
        "colors": "A color is a place",
    }
    for view, words in views.items():
        panel(page).locator(".view").select_option(view)
        expect(legend).to_contain_text(words)
        expect(panel(page, 1).locator(".view")).to_have_value(view)  # both runs show the same
        width = legend.locator(".scale").evaluate("e => e.getBoundingClientRect().width")
        assert (width > 20) == (view != "codes")
    most = max(page.request.get(f"{page.url.split('#')[0]}api/map").json()["hits"])
    panel(page).locator(".view").select_option("hits")
    expect(legend).to_contain_text(f"{most:,} times")

    # A marker is black, white and a color: one of them stands out from any tile.
    canvas = panel(page).locator(".map")
    for view in views:
        panel(page).locator(".view").select_option(view)
        page.mouse.move(1, 1)
        plain = canvas_pixels(canvas).astype(int)
        page.mouse.move(*code_place(page, 14))
        expect(readout(page)).to_contain_text("code 14 at")
        marked = canvas_pixels(canvas).astype(int)
        changed = (marked != plain).any(-1)
        assert (marked[changed][:, :3].max(1) < 40).sum() > 100
        assert (marked[changed][:, :3].min(1) > 215).sum() > 100
