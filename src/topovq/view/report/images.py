"""Pictures inside a page: as data addresses, and within a limit of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

GAP = 1  # pixels between images on a sheet


def data_uri(pixels: np.ndarray, most_bytes: int | None = None) -> str:
    """uint8 [H, W, 1, 3 or 4] as a data address: PNG, or where that is over `most_bytes` a JPEG that fits."""
    image = _image(pixels)
    data, kind = png_bytes(pixels), "png"
    while most_bytes is not None and len(data) > most_bytes and min(image.size) > 16:
        if kind == "jpeg":
            image = image.resize((image.width * 3 // 4, image.height * 3 // 4), Image.Resampling.BOX)
        elif image.mode == "RGBA":
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=90)
        data, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def png_bytes(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 1, 3 or 4] as the bytes of a PNG file."""
    buffer = io.BytesIO()
    _image(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def to_array(image_CHW: Tensor) -> np.ndarray:
    """uint8 [C, H, W] -> [H, W, C]."""
    return image_CHW.permute(1, 2, 0).cpu().numpy()


def sheet(rows: Sequence[Sequence[Tensor]], gap: int = GAP) -> np.ndarray:
    """Images [C, H, W] in rows, a transparent line of `gap` pixels between them: uint8 [H', W', 4]."""
    arrays = [[to_array(image) for image in row] for row in rows]
    height, width = arrays[0][0].shape[:2]
    page = np.zeros((len(rows) * (height + gap) - gap, len(rows[0]) * (width + gap) - gap, 4), np.uint8)
    for y, row in enumerate(arrays):
        for x, array in enumerate(row):
            top, left = y * (height + gap), x * (width + gap)
            page[top : top + height, left : left + width, :3] = array
            page[top : top + height, left : left + width, 3] = 255
    return page


def colored(values_K: np.ndarray, name: str) -> np.ndarray:
    """Numbers [K] by matplotlib's color map `name`, from their smallest to their largest: uint8 [K, 3, 1, 1]."""
    from matplotlib import colormaps

    low, high = float(values_K.min()), float(values_K.max())
    share_K = (values_K - low) / (high - low) if high > low else np.zeros(len(values_K))
    return (colormaps[name](share_K)[:, :3, None, None] * 255).round().astype(np.uint8)
