"""`topovq explore RUN --follow` in a real browser: it begins without a picture and goes on with the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from accessibility import violations
from browsing import SCREENSHOTS, canvas_pixels, serve
from PIL import Image
from playwright.sync_api import Page, expect

from topovq.cli import main

pytestmark = pytest.mark.xdist_group("explorer")


def test_the_film_begins_and_goes_on_with_the_training(
    open_page: Callable[..., Page], runs: list[Path], tmp_path: Path
) -> None:
    """The run grows as a training would have it grow: snapshots and lines of the record appear."""
    growing = tmp_path / "growing"
    (growing / "snapshots").mkdir(parents=True)
    kept = sorted((runs[0] / "snapshots").iterdir())
    assert [int(path.stem[5:]) for path in kept] == [0, 2, 7, 15, 27, 42, 60]
    record = (runs[0] / "record.jsonl").read_text().splitlines(keepends=True)

    def grow(pictures: int, lines: int) -> None:
        (growing / "record.jsonl").write_text("".join(record[:lines]))
        for path in kept[:pictures]:
            shutil.copy(path, growing / "snapshots")

    with serve(growing, "--follow") as (address, _):
        page = open_page(1400, 900, address=address, says="growing has no picture yet")
        expect(page.locator("#slider")).to_be_disabled()
        canvas = page.locator("#canvas")
        grow(3, 1)
        expect(canvas).to_have_attribute("data-step", "7")
        expect(page.locator("#status")).to_have_text("growing: 3 pictures, in training, new steps appear here")
        expect(page.locator("#step")).to_have_text("step 7 of 60")
        early = canvas_pixels(canvas)
        page.locator("#map").select_option("bottom")
        page.locator("#view").select_option("distances")
        expect(page.locator(".legend")).to_contain_text("apart")
        page.locator("#map").select_option("top")
        page.locator("#view").select_option("codes")
        grow(5, 2)
        expect(canvas).to_have_attribute("data-step", "27")  # the newest is shown as it comes
        page.locator("#slider").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(canvas).to_have_attribute("data-step", "7")
        assert np.array_equal(canvas_pixels(canvas), early)
        grow(len(kept), len(record))
        expect(page.locator("#status")).to_have_text("growing: 7 pictures, the training is finished")
        expect(canvas).to_have_attribute("data-step", "7")  # one is looking at something
        expect(page.locator("#losses")).to_be_visible()
        page.get_by_role("button", name="Play").click()
        expect(canvas).to_have_attribute("data-step", "60")
        expect(page.get_by_role("button", name="Play")).to_be_visible()
        assert not np.array_equal(canvas_pixels(canvas), early)
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save the animation").click()
        assert saved.value.suggested_filename == "growing.webp"
        saved.value.save_as(tmp_path / "film.webp")
        with Image.open(tmp_path / "film.webp") as film:
            assert film.n_frames == 7
        page.screenshot(path=SCREENSHOTS / "film.png")
        for size in ((1400, 900), (390, 844)):
            for scheme in ("light", "dark"):
                page = open_page(*size, scheme, address=address, says="finished", reduced_motion="reduce")
                expect(page.locator("#canvas")).to_have_attribute("data-step", "60")
                assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
                assert violations(page) == []


def test_the_explorer_of_a_run_with_snapshots_links_to_its_film(page: Page) -> None:
    page.get_by_role("link", name="Film").click()
    expect(page.locator("#status")).to_have_text("kohonen: 7 pictures, the training is finished")


def test_following_two_runs_is_refused(capsys: pytest.CaptureFixture[str], runs: list[Path]) -> None:
    with pytest.raises(SystemExit):
        main(["explore", *map(str, runs), "--follow"])
    assert "--follow shows the film of one run; 2 were given" in capsys.readouterr().err
