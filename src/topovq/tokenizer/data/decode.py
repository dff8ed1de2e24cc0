"""One image file to one square of RGB pixels, with Pillow."""

from functools import cache
from typing import BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image

Fit = Literal["crop", "stretch"]
"""`crop`: the shorter side to the size, then the central square. `stretch`: both sides to the size."""

EXTENSIONS = frozenset(
    ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pnm", "jp2", "avif")
)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats by content. Of the others that Pillow knows some call programs (EPS), which a renamed file must not do."""

MAX_PIXELS = 89_478_485
"""A larger image is taken for a decompression bomb; Pillow warns from this size on (a quarter gigabyte of RGB)."""

_GAP = 2.0  # as Pillow's thumbnail(): a cheap reduction stops at twice the size, a proper filter does the rest
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(file: str | BinaryIO, size: int, fit: Fit, out_SS3: np.ndarray) -> None:
    """Decode an image of any mode and orientation into `out_SS3`, uint8 [size, size, 3].

    Raises what Pillow raises on damaged bytes, and ValueError on an image that is too large or of floats.
    """
    with Image.open(file, formats=_formats()) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width}x{height} pixels are more than the limit of {MAX_PIXELS:,}")
        image.draft(None, (int(_GAP * size), int(_GAP * size)))  # JPEG: let the decoder itself scale down
        to_square(image, size, fit, out_SS3)


def to_square(image: Image.Image, size: int, fit: Fit, out_SS3: np.ndarray) -> None:
    """An open image of any mode and orientation into `out_SS3`, as `decode` does."""
    image.load()
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    small = _resize(_plain(image), size, fit)
    # The square is symmetric, so turning it after the resize equals turning the photograph before, and is cheaper.
    if orientation in _UPRIGHT:
        small = small.transpose(_UPRIGHT[orientation])
    out_SS3[...] = np.frombuffer(small.tobytes(), dtype=np.uint8).reshape(size, size, -1)  # gray fills all three


@cache
def _formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _plain(image: Image.Image) -> Image.Image:
    """Mode L or RGB, 8 bits a channel; what is transparent turns white."""
    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):  # 16-bit gray; Pillow's own conversion would clip at 255
        return Image.fromarray(np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("pixels are floats of unknown range; 8 or 16 bits a channel are understood")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _resize(image: Image.Image, size: int, fit: Fit) -> Image.Image:
    width, height = image.size
    if width == height == size:
        return image
    side = min(width, height)
    crop = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    box = crop if fit == "crop" else (0.0, 0.0, float(width), float(height))
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=_GAP)
