"""How the page is laid out: the first view, wide, phone, two runs side by side; and axe-core on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from accessibility import violations
from browsing import SCREENSHOTS, code_place, decoded, panel, pick_code, score, serve, token_place
from PIL import Image
from playwright.sync_api import FloatRect, Locator, Page, expect
from small_runs import make_run

from topovq.view.explorer.gallery import most_colorful

pytestmark = pytest.mark.xdist_group("explorer")


def place(thing: Locator) -> FloatRect:
    box = thing.bounding_box()
    assert box
    return box


def bottom(box: FloatRect) -> float:
    return box["y"] + box["height"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of one run on a folder of images, each with more color than the one before."""
    images = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3))
    for number, picture in enumerate(noise):
        gray = picture[..., :1].repeat(3, -1)
        mixed = gray + (picture - gray) * number // 60
        Image.fromarray(mixed.astype(np.uint8)).save(images / f"{number:02}.png")
    run = make_run(tmp_path_factory.mktemp("runs") / "alone", data=str(images), image_size=32, workers=0)
    with serve(run) as (address, _):
        yield address


def test_the_image_to_begin_with_is_the_most_colorful() -> None:
    gray = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(3, -1, -1)
    flat = torch.full((3, 16, 16), 90, dtype=torch.uint8)
    red = flat.clone()
    red[0, :8] = 250
    assert most_colorful(torch.stack([flat, gray, red, flat])) == 2
    assert most_colorful(torch.stack([flat, gray, flat])) == 1
    assert most_colorful(torch.stack([flat, gray, flat])[:, :1]) == 1


def test_the_first_view_has_a_photograph_and_the_shift_under_the_hand(
    open_page: Callable[..., Page], server: tuple[str, int], alone: str
) -> None:
    page = open_page(1400, 900, address=server[0], says="photograph 0")  # the run's own images are crops
    assert page.locator("#set").input_value() == "samples"
    expect(page.locator("#pad")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(score(page)).to_have_text("tokens moved by (0, 1) (rows, columns)")
    for thing in (page.locator("#pad"), decoded(page)):
        assert bottom(place(thing)) < place(page.locator("#readouts"))["y"]
    page = open_page(1400, 900, address=alone, says="validation image")
    sets = page.request.get(f"{alone}api/run").json()["images"]
    assert (sets[0]["name"], sets[0]["count"], sets[0]["first"]) == ("validation", 3, 2)
    expect(page.locator("#status")).to_have_text("validation image 2")
    expect(page.get_by_role("option", name="validation image 2")).to_have_attribute("aria-selected", "true")


@pytest.mark.parametrize("size", [(1400, 900), (1920, 1080)])
def test_one_run_uses_the_width(open_page: Callable[..., Page], alone: str, size: tuple[int, int]) -> None:
    page = open_page(*size, address=alone, says="validation image")
    picture, chart = place(panel(page).locator(".pictures").first), place(panel(page).locator(".map"))
    assert chart["x"] >= picture["x"] + picture["width"]  # beside each other
    assert chart["x"] + chart["width"] > 0.93 * size[0]
    below = place(page.locator("#readouts"))["y"]
    for thing in ("#controls", "[data-run='0'] .mosaic", "[data-run='0'] .map", "[data-run='0'] .end"):
        assert bottom(place(page.locator(thing))) <= below, thing
    page.screenshot(path=SCREENSHOTS / f"one-{size[0]}.png")


def test_two_runs_are_aligned_and_nothing_jumps(open_page: Callable[..., Page]) -> None:
    page = open_page(1400, 900)
    parts = [".head", ".decoded", ".original", ".mosaic", ".tools", ".map", ".legend", ".path"]

    def layout() -> list[tuple[float, ...]]:
        boxes = [[place(panel(page, run).locator(part).first) for part in parts] for run in (0, 1)]
        for ours, theirs in zip(*boxes):
            assert ours["y"] == theirs["y"]
            assert ours["width"] == theirs["width"]
        return [(box["x"], box["y"], box["width"]) for run in boxes for box in run]

    page.evaluate("scrollTo(0, 0)")
    before = layout()
    page.mouse.move(*token_place(page, 2, 2, 4))
    expect(panel(page, 1).locator(".token")).to_contain_text("(2, 2): code")  # the same token in both
    page.locator("#dx").fill("3")
    expect(score(page, 1)).to_contain_text("tokens moved")
    pick_code(page, 3)
    page.get_by_label("Paint").check()
    page.mouse.click(*token_place(page, 1, 1, 4))
    expect(score(page, 1)).to_contain_text("after your edits")
    panel(page).locator(".view").select_option("hits")
    page.locator("#thumbnails button").nth(4).click()
    expect(page.locator("#status")).to_have_text("validation image 4")
    page.mouse.move(*code_place(page, 20))
    page.evaluate("scrollTo(0, 0)")
    assert layout() == before
    page.get_by_label("Swap").check()
    swapping = layout()  # room for the second image
    page.get_by_role("button", name="Choose the second image").click()
    page.locator("#thumbnails button").nth(5).click()
    expect(page.locator("#status")).to_contain_text("is the second image")
    assert layout() == swapping


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_picture_and_pad_on_one_screen(open_page: Callable[..., Page], alone: str, scheme: str) -> None:
    for address, runs in ((alone, [0]), (None, [0, 1])):
        page = open_page(390, 844, scheme, address=address, has_touch=True, is_mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        below = place(page.locator("#readouts"))["y"]
        assert bottom(place(page.locator("#pad"))) < below
        for run in runs:
            picture = place(decoded(page, run))
            assert bottom(picture) < below
            assert picture["width"] > (110 if len(runs) == 2 else 220)
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", color))) / 3
        assert (brightness > 200) == (scheme == "light")
        page.screenshot(path=SCREENSHOTS / f"phone-{scheme}-{len(runs)}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_axe_finds_nothing_wrong(open_page: Callable[..., Page], size: tuple[int, int], scheme: str) -> None:
    page = open_page(*size, scheme)
    for code, button in ((18, "Path starts here"), (5, "Path ends here")):
        pick_code(page, code)
        panel(page).get_by_role("button", name=button).click()
    panel(page).locator(".view").select_option("hits")
    page.get_by_label("Swap").check()
    page.get_by_role("button", name="Choose the second image").click()
    page.locator("#thumbnails button").nth(5).click()
    expect(page.locator("#status")).to_contain_text("is the second image")
    page.locator("#dx").fill("1")
    page.mouse.move(*token_place(page, 1, 1, 4))
    assert violations(page) == []
    page.get_by_role("button", name="Help").click()
    assert violations(page) == []
