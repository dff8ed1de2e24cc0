"""What tests in a browser share: a server, where things are on the explorer's page, and what they show."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Locator, Page
from torch import Tensor

from topovq.tokenizer.atlas import to_planes
from topovq.tokenizer.models import Tokenizer

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"

DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type }));
  window.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
}"""


@contextlib.contextmanager
def serve(*arguments: str | Path) -> Iterator[tuple[str, int]]:
    """`topovq explore` with these arguments at a free port: its address and process number."""
    command = [sys.executable, "-m", "topovq", "explore", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert address, line + process.stdout.read()
    try:
        yield address.group(), process.pid
    finally:
        process.terminate()
        process.wait(20)


def panel(page: Page, run: int = 0) -> Locator:
    return page.locator(f"[data-run='{run}']")


def readout(page: Page, run: int = 0) -> Locator:
    return page.locator(f"[data-of='{run}']")


def decoded(page: Page, run: int = 0) -> Locator:
    return panel(page, run).locator(".pictures:not(.other) .decoded")


def score(page: Page, run: int = 0) -> Locator:
    return panel(page, run).locator(".score")


def pixels(image: Locator) -> np.ndarray:
    """What an <img> shows when the page is done, uint8 [H, W, 3]."""
    image.page.wait_for_function("() => !document.querySelector('[aria-busy]')")
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    return _of_address(image.get_attribute("src") or "")


def canvas_pixels(canvas: Locator) -> np.ndarray:
    return _of_address(canvas.evaluate("canvas => canvas.toDataURL()"))


def _of_address(address: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1]))))


def original_tokens(page: Page, model: Tokenizer, run: int = 0) -> list[Tensor]:
    """The tokens of the image that the page shows, one plane [1, h, w] a map."""
    shown = pixels(panel(page, run).locator(".original").first).copy()
    return to_planes(model.encode(torch.from_numpy(shown).permute(2, 0, 1)[None]))


def code_place(page: Page, code: int, run: int = 0) -> tuple[float, float]:
    """Where a code of the 4 x 6 map is on the page; odd rows of hexagons lie half a cell to the right."""
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
    return box["x"] + x, box["y"] + y


def pick_code(page: Page, code: int, run: int = 0) -> None:
    page.mouse.click(*code_place(page, code, run))


def token_place(page: Page, row: int, column: int, side: int, run: int = 0) -> tuple[float, float]:
    mosaic = panel(page, run).locator(".mosaic")
    mosaic.scroll_into_view_if_needed()
    box = mosaic.bounding_box()
    assert box
    return box["x"] + (column + 0.5) * box["width"] / side, box["y"] + (row + 0.5) * box["height"] / side


def drop(page: Page, name: str, kind: str, data: bytes) -> None:
    page.evaluate(DROP, [name, kind, base64.b64encode(data).decode()])
