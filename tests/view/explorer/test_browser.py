"""The page in a real browser: what it shows when one looks, points, drops, shifts, paints and compares.

Screenshots are left in build/screenshots.
"""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from browsing import (
    SCREENSHOTS,
    canvas_pixels,
    code_place,
    decoded,
    drop,
    original_tokens,
    panel,
    pick_code,
    pixels,
    readout,
    score,
    token_place,
)
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from topovq.tokenizer.atlas import charts
from topovq.tokenizer.training import load_run

pytestmark = pytest.mark.xdist_group("explorer")


def test_the_page_shows_the_run_its_map_and_an_image(page: Page) -> None:
    expect(panel(page).locator("h2")).to_have_text("kohonen")
    expect(panel(page).locator(".facts")).to_contain_text("vqvae2, kohonen, 4 x 6 hexagonal, validation loss")
    expect(score(page)).to_have_text(re.compile(r"decoded, [\d.]+ dB, SSIM"))
    seen = {}
    for view in ("codes", "distances", "hits", "colors"):
        panel(page).locator(".view").select_option(view)
        seen[view] = canvas_pixels(panel(page).locator(".map"))
        assert len(np.unique(seen[view].reshape(-1, 4), axis=0)) > 5
        assert seen[view][0, 0, 3] == 0  # beside the tip of the first hexagon there is nothing
    assert len({view.tobytes() for view in seen.values()}) == 4
    page.screenshot(path=SCREENSHOTS / "desktop-light.png", full_page=True)


def test_pointing_lights_up_tokens_and_codes(page: Page, runs: list[Path]) -> None:
    top = original_tokens(page, load_run(runs[0]))[0][0]
    code = int(top[1, 2])
    page.mouse.move(*token_place(page, 1, 2, 4))
    expect(panel(page).locator(".token")).to_have_text(f"(1, 2): code {code}")
    told = readout(page)
    expect(told).to_contain_text(f"code {code} at ({code // 6}, {code % 6}): used")
    expect(told).to_contain_text(f"{int((top == code).sum())} here; distance to neighbors")
    other = (code + 7) % 24
    plain = canvas_pixels(panel(page).locator(".map"))
    page.mouse.move(*code_place(page, other))
    expect(told).to_contain_text(f"code {other} at ({other // 6}, {other % 6})")
    assert not np.array_equal(canvas_pixels(panel(page).locator(".map")), plain)
    page.mouse.move(*code_place(page, code))
    expect(panel(page).locator(".mosaic")).to_have_attribute("data-lit", str(int((top == code).sum())))


def test_an_image_can_be_dropped_in(page: Page, folder: Path) -> None:
    drop(page, "red.png", "image/png", (folder / "0.png").read_bytes())
    expect(page.locator("#status")).to_have_text("red.png")
    for run in (0, 1):
        assert pixels(panel(page, run).locator(".original").first)[5, 5].tolist() == [200, 30, 30]
    expect(page.get_by_role("option", name="red.png")).to_have_attribute("aria-selected", "true")
    before = decoded(page).get_attribute("src")
    drop(page, "notes.txt", "text/plain", b"hello")
    expect(page.locator("#status")).to_contain_text("no image of a known type")
    expect(page.locator("#status")).to_have_class("error")
    assert decoded(page).get_attribute("src") == before
    page.locator("#file").set_input_files(str(folder / "1.png"))
    expect(page.locator("#status")).to_have_text("1.png")
    assert pixels(panel(page).locator(".original").first)[5, 5].tolist() == [30, 30, 200]
    assert page.locator("#set option").last.text_content() == "opened (2)"
    page.get_by_role("option", name="red.png").click()
    expect(page.locator("#status")).to_have_text("red.png")
    assert pixels(panel(page).locator(".original").first)[5, 5].tolist() == [200, 30, 30]


def test_a_large_photograph_is_shrunk_and_not_refused(page: Page) -> None:
    """30 million pixels are more than the server takes."""
    halves = np.zeros((5000, 6000, 3), np.uint8)
    halves[:2500], halves[2500:] = (250, 200, 20), (20, 60, 200)
    file = io.BytesIO()
    Image.fromarray(halves).save(file, "JPEG")
    with page.expect_request("**/api/encode") as sent:
        drop(page, "large.jpg", "image/jpeg", file.getvalue())
    expect(page.locator("#status")).to_have_text("large.jpg")
    with Image.open(io.BytesIO(base64.b64decode(sent.value.post_data_json["data"]))) as small:
        assert small.size == (1229, 1024)
    shown = pixels(panel(page).locator(".original").first)
    assert np.abs(shown[3, 16].astype(int) - (250, 200, 20)).max() < 12
    assert np.abs(shown[-3, 16].astype(int) - (20, 60, 200)).max() < 12


def test_shifting_both_runs_and_one_level_alone(page: Page, runs: list[Path]) -> None:
    plain = [pixels(decoded(page, run)) for run in (0, 1)]
    page.locator("#pad").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    for run in (0, 1):
        expect(score(page, run)).to_have_text("tokens moved by (1, 2) (rows, columns)")
        model = load_run(runs[run])
        moved = [c.grid.shift(p, (1, 2)) for c, p in zip(charts(model), original_tokens(page, model, run))]
        assert np.array_equal(pixels(decoded(page, run)), model.decode(tuple(moved))[0].permute(1, 2, 0).numpy())
        assert not np.array_equal(pixels(decoded(page, run)), plain[run])
    page.screenshot(path=SCREENSHOTS / "compare-shifted.png", full_page=True)
    page.locator("#reset").click()
    for run in (0, 1):
        expect(score(page, run)).to_contain_text("SSIM")
        assert np.array_equal(pixels(decoded(page, run)), plain[run])
    page.locator("#target").select_option("1")
    page.locator("#dx").fill("-3")
    expect(score(page)).to_have_text("tokens moved by (0, 0) and (0, -3) (rows, columns)")
    assert page.locator("#target option").all_text_contents() == ["all maps", "top alone", "bottom alone"]


def test_dragging_on_the_pad_shifts(page: Page) -> None:
    box = page.locator("#pad").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] * 0.05, steps=5)
    page.mouse.up()
    expect(score(page)).to_have_text("tokens moved by (-6, 6) (rows, columns)")
    expect(page.locator("#dx")).to_have_value("6")


def looks(page: Page, run: int) -> np.ndarray:
    """Every code of a run's top map, decoded to 8 x 8 pixels, as the means of 2 x 2 of them: [K, 4, 4, 3]."""
    sheet = page.request.get(f"{page.url.split('#')[0]}api/map?run={run}").json()["sheet"]
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet["image"].split(",")[1])))).astype(float)
    columns = sheet["columns"]
    tiles = whole.reshape(-1, 8, columns, 8, 3).swapaxes(1, 2).reshape(-1, 8, 8, 3)[:24]
    return tiles.reshape(24, 4, 2, 4, 2, 3).mean((2, 4))


def test_painting_a_code_in_both_runs(page: Page, runs: list[Path]) -> None:
    page.get_by_label("Paint").check()
    page.mouse.click(*token_place(page, 0, 0, 4))
    expect(page.locator("#status")).to_contain_text("Pick a code on the map first")
    models = [load_run(run) for run in runs]
    planes = [original_tokens(page, model, run) for run, model in enumerate(models)]
    code = (int(planes[0][0][0, 0, 0]) + 13) % 24
    pick_code(page, code)
    expect(page.locator("#status")).to_contain_text(f"code {code} is picked; in ema code ")
    theirs = int(re.findall(r"\d+", page.locator("#status").inner_text())[1])
    ours, others = (looks(page, run) for run in (0, 1))
    assert theirs == np.square(others - ours[code]).sum((1, 2, 3)).argmin()
    page.mouse.click(*token_place(page, 0, 0, 4))
    for run, (model, painted) in enumerate(zip(models, (code, theirs))):
        expect(score(page, run)).to_have_text("decoded after your edits")
        planes[run][0][0, 0, 0] = painted
        expected = model.decode(tuple(planes[run]))[0].permute(1, 2, 0).numpy()
        assert np.array_equal(pixels(decoded(page, run)), expected)
    expect(panel(page).locator(".token")).to_have_text(f"(0, 0): code {code}")
    page.screenshot(path=SCREENSHOTS / "painted.png", full_page=True)


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
    expect(score(page)).to_have_text("decoded after your edits")
    model = load_run(runs[0])
    both = torch.from_numpy(np.stack([second, first])).permute(0, 3, 1, 2)
    ours, theirs = model.decode(model.encode(both)).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(pixels(decoded(page)), ours)  # all tokens were exchanged
    page.wait_for_function("before => document.querySelector('.other .decoded').src !== before", arg=before)
    assert np.array_equal(pixels(panel(page).locator(".other .decoded")), theirs)


def test_a_path_is_drawn_on_the_map_and_shown_whole(page: Page) -> None:
    canvas = panel(page).locator(".map")
    for code, button in ((18, "Path starts here"), (5, "Path ends here")):
        pick_code(page, code)
        panel(page).get_by_role("button", name=button).click()
    page.mouse.move(1, 1)
    strip = panel(page).locator(".strip")
    expect(strip.locator("p")).to_have_text("from code 18 to code 5: 6 codes on the way")
    drawn = canvas_pixels(canvas)
    stops = strip.locator("li")
    expect(stops).to_have_count(6)
    codes = [int(text.split()[1]) for text in stops.all_text_contents()]
    assert (codes[0], codes[-1]) == (18, 5)
    scale = drawn.shape[1] / 6.5
    for code in codes:  # the line goes through the middle of each, white or black or colored
        row, column = divmod(code, 6)
        x, y = (column + 0.5 + 0.5 * (row % 2)) * scale, (row * 3**0.5 / 2 + 1 / 3**0.5) * scale
        near = drawn[int(y) - 4 : int(y) + 5, int(x) - 4 : int(x) + 5, :3].reshape(-1, 3)
        assert (near.min(1) > 250).any() or code in (18, 5), code
    box = panel(page).bounding_box()
    for each in stops.all():
        stop = each.bounding_box()
        assert box
        assert stop
        assert stop["x"] >= box["x"]
        assert stop["x"] + stop["width"] <= box["x"] + box["width"]
        assert each.evaluate("e => getComputedStyle(e).backgroundImage").startswith('url("data:image/png')
    panel(page).get_by_role("button", name="Clear the path").click()
    expect(strip).to_be_hidden()


def test_everything_by_keyboard(page: Page) -> None:
    canvas = panel(page).locator(".map")
    canvas.focus()
    page.keyboard.press("ArrowRight")  # the first key lands on the first code
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(readout(page)).to_contain_text("code 2 at (0, 2)")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("code 2 is picked")
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
    expect(panel(page).locator(".token")).to_have_text("(1, 0): code 2")
    unreachable = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input, canvas[role], #pad')]"
        ".filter((e) => e.tabIndex < 0).map((e) => e.outerHTML)"
    )
    assert unreachable == []
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input, canvas[role], img')]"
        ".filter((e) => !(e.ariaLabel || e.textContent.trim() || e.alt || "
        " e.closest('label') || e.querySelector('img[alt]') || e.closest('[hidden]')))"
        ".map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_the_bottom_level_has_its_own_map_and_mosaic(page: Page) -> None:
    panel(page).locator(".map-choice").select_option("1")
    expect(panel(page).locator(".mosaic")).to_have_attribute("data-size", "8 x 8")
    page.mouse.move(*token_place(page, 7, 7, 8))
    expect(panel(page).locator(".token")).to_contain_text("(7, 7): code")


def test_the_report_is_read_without_a_script_or_a_network(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    from topovq.view.report import write_report

    report = write_report(runs, tmp_path / "report.html")
    context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 390, "height": 844})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    expect(page.locator("h1")).to_have_text("kohonen and ema")
    expect(page.locator("svg[role=img]")).to_have_count(4)
    assert page.locator("img").count() >= 20
    page.screenshot(path=SCREENSHOTS / "report-phone.png", full_page=True)
    page.set_viewport_size({"width": 1100, "height": 900})
    page.screenshot(path=SCREENSHOTS / "report.png", full_page=True)
    assert len(page.pdf()) > 10_000
    context.close()
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
