"""Panels: what a notebook shows of an object, as HTML in its own colors: a title, facts and small pictures."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

FRAME = "font-family: system-ui, sans-serif; line-height: 1.4; max-width: 60em"
FACTS = "display: grid; grid-template-columns: max-content 1fr; gap: 0 1em; margin: .3em 0"
PICTURES = "display: flex; flex-wrap: wrap; gap: 1em; margin: .5em 0"


def panel(title: str, facts: Mapping[str, str], pictures: Sequence[Sequence[str]] = ()) -> str:
    """The HTML of a panel; `pictures` are rows of HTML, such as `picture` gives."""
    rows = "".join(
        f'<dt style="opacity: .75">{html.escape(name)}</dt><dd style="margin: 0">{html.escape(value)}</dd>'
        for name, value in facts.items()
    )
    shown = "".join(f'<div style="{PICTURES}">{"".join(row)}</div>' for row in pictures)
    return f'<div style="{FRAME}"><strong>{html.escape(title)}</strong><dl style="{FACTS}">{rows}</dl>{shown}</div>'


def picture(pixels: np.ndarray, caption: str, width: int = 176) -> str:
    """uint8 [H, W, 4] as an image that is `width` pixels wide, above its caption."""
    text = html.escape(caption)
    style = "display: block; width: 100%; height: auto; image-rendering: pixelated"
    address = f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"
    return (
        f'<figure style="margin: 0; width: {width}px"><img alt="{text}" style="{style}" src="{address}">'
        f'<figcaption style="font-size: .85em; opacity: .75">{text}</figcaption></figure>'
    )


def png(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 4] as a PNG file: a panel needs no imaging library."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 4)], 1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)  # 8 bits of red, green, blue and alpha
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
