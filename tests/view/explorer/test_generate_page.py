"""The page Generate in a real browser: new images, and an image whose tokens are painted out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accessibility import violations
from browsing import SCREENSHOTS, canvas_pixels, serve
from playwright.sync_api import Page, expect

from topovq.prior import Prior
from topovq.storage import model_id
from topovq.tokenizer.training.runs import load_run
from topovq.view.explorer import explore

pytestmark = pytest.mark.xdist_group("explorer")


def test_paint_out_complete_and_draw(open_page: Callable[..., Page], runs: list[Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    known = {"classes": 2, "class_names": ["cat", "dog"], "tokenizer": model_id(runs[0])}
    Prior.of(load_run(runs[0]), dim=16, layers=1, heads=2, **known).save_pretrained(tmp_path / "prior")
    with serve(runs[0], "--prior", tmp_path / "prior") as (address, _):
        page = open_page(1280, 900, address=address, says="photograph")
        page.get_by_role("link", name="Generate").click()
        expect(page.locator("#status")).to_have_text("photograph 0")
        canvas, complete = page.locator("#painting"), page.get_by_role("button", name="Complete the image")
        expect(complete).to_be_disabled()
        whole, box = canvas_pixels(canvas), canvas.bounding_box()
        assert box is not None
        cell = box["width"] / 8
        page.mouse.move(box["x"] + 0.5 * cell, box["y"] + 7.5 * cell)
        page.mouse.down()
        page.mouse.move(box["x"] + 2.5 * cell, box["y"] + 7.5 * cell, steps=9)
        page.mouse.up()
        expect(page.locator("#painted")).to_contain_text("3 of 64 tokens are painted out")
        changed = (canvas_pixels(canvas) != whole).any(2)
        assert changed[449:, 1:191].mean() > 0.99
        assert not changed[:447].any()
        canvas.focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        expect(page.locator("#painted")).to_contain_text("4 of 64")
        page.get_by_role("spinbutton", name="Images").fill("5")
        complete.click()
        expect(page.locator("#drawn li")).to_have_count(5)
        expect(page.locator("#status")).to_contain_text("5 completions")
        expect(page.get_by_label("Guidance")).to_be_hidden()  # there is no class to follow
        page.get_by_label("Class").select_option("dog")
        page.get_by_label("Guidance").fill("2")
        page.get_by_role("button", name="Draw new images").click()
        expect(page.locator("#status")).to_contain_text("5 new images")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "generate.png")
        assert violations(page) == []
        page.get_by_role("button", name="new image 2").click()
        expect(page.locator("#status")).to_have_text("new image 2")
        assert not np.array_equal(canvas_pixels(canvas), whole)
        expect(complete).to_be_disabled()  # nothing is painted out of it
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_film_has_no_use_for_a_prior(runs: list[Path]) -> None:
    with pytest.raises(ValueError, match="leave out --prior or --follow"):
        explore(runs[:1], 0, follow=True, prior=runs[0])
