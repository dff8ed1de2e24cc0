import io

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

import topovq.tokenizer.data.decode
from topovq.tokenizer.data.decode import decode


def decoded(image: Image.Image, size: int, fit: str = "crop", format: str = "PNG", **options: object) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, format, **options)
    file.seek(0)
    out_SS3 = np.full((size, size, 3), 99, dtype=np.uint8)
    decode(file, size, fit, out_SS3)
    return out_SS3.transpose(2, 0, 1)


def one_color(out_3SS: np.ndarray) -> list[int]:
    assert (out_3SS == out_3SS[:, :1, :1]).all()
    return out_3SS[:, 0, 0].tolist()


def palette_with_hole() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.info["transparency"] = 1
    return image


GRAY_16 = Image.fromarray(np.full((4, 4), 0x8123, dtype=np.uint16))


@pytest.mark.parametrize(
    ("image", "format", "color"),
    [
        (Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", [1, 2, 3]),
        (Image.new("L", (4, 4), 77), "PNG", [77, 77, 77]),
        (Image.new("1", (4, 4), 1), "PNG", [255, 255, 255]),
        (Image.new("RGB", (4, 4), (1, 2, 3)).quantize(4), "PNG", [1, 2, 3]),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 255)), "PNG", [1, 2, 3]),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 0)), "PNG", [255, 255, 255]),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 51)), "PNG", [204, 204, 204]),
        (Image.new("LA", (4, 4), (9, 0)), "PNG", [255, 255, 255]),
        (palette_with_hole(), "PNG", [255, 255, 255]),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF", [255, 0, 0]),
        (Image.new("YCbCr", (4, 4), (128, 128, 128)), "TIFF", [128, 128, 128]),
        (GRAY_16, "PNG", [0x81, 0x81, 0x81]),
        (GRAY_16, "TIFF", [0x81, 0x81, 0x81]),
        (Image.new("I", (4, 4), 0x1FFFF), "TIFF", [255, 255, 255]),
        (Image.new("RGB", (4, 4), (1, 2, 3)), "GIF", [1, 2, 3]),
        (Image.new("RGB", (4, 4), (1, 2, 3)), "BMP", [1, 2, 3]),
        (Image.new("RGB", (4, 4), (1, 2, 3)), "PPM", [1, 2, 3]),
    ],
)
def test_every_mode_becomes_rgb(image, format, color):
    assert one_color(decoded(image, 4, format=format)) == color


def test_lossless_webp():
    assert one_color(decoded(Image.new("RGB", (4, 4), (1, 2, 3)), 4, format="WEBP", lossless=True)) == [1, 2, 3]


def columns(*values: int) -> Image.Image:
    """An image of 4 x 4 pixel blocks side by side, each of one gray."""
    return Image.fromarray(np.kron(np.array([values], dtype=np.uint8), np.ones((4, 4), dtype=np.uint8)))


def test_crop_takes_the_central_square():
    assert one_color(decoded(columns(10, 20, 30), 4)) == [20, 20, 20]
    assert one_color(decoded(columns(10, 20, 30).transpose(Image.Transpose.ROTATE_90), 4)) == [20, 20, 20]


def test_stretch_takes_everything():
    plane_SS = decoded(columns(0, 0, 255, 255), 4, "stretch")[0]
    assert plane_SS[:, 0].tolist() == [0] * 4
    assert plane_SS[:, 3].tolist() == [255] * 4


def test_small_images_are_enlarged():
    assert one_color(decoded(Image.new("L", (2, 3), 5), 16)) == [5, 5, 5]


def test_planes_keep_rows_and_columns_apart():
    pixels_HWC = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert np.array_equal(decoded(Image.fromarray(pixels_HWC), 4), pixels_HWC.transpose(2, 0, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_orientation_is_undone(orientation, format):
    quadrants = np.kron(np.array([[0, 80], [160, 240]], dtype=np.uint8), np.ones((16, 24), dtype=np.uint8))
    image = Image.fromarray(quadrants)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    expected = decoded(ImageOps.exif_transpose(image), 16)  # in Pillow's own way, before anything is resized
    found = decoded(image, 16, format=format, exif=exif)
    assert np.abs(found.astype(int) - expected).max() <= (8 if format == "JPEG" else 0)


def test_a_large_jpeg_is_scaled_down_while_decoding_with_the_same_result():
    ramp = np.linspace(0, 255, 1024).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp, (640, 1024)).copy())
    plain = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR, box=(192, 0, 832, 640)))
    found = decoded(image, 32, format="JPEG", quality=95)
    assert np.abs(found[0].astype(int) - plain).max() <= 2


def test_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(topovq.tokenizer.data.decode, "MAX_PIXELS", 15)
    with pytest.raises(ValueError, match="4x4 pixels are more than the limit of 15"):
        decoded(Image.new("L", (4, 4)), 4)


def test_floats_are_refused():
    with pytest.raises(ValueError, match="floats of unknown range"):
        decoded(Image.new("F", (4, 4), 0.5), 4, format="TIFF")


def test_formats_that_call_other_programs_are_refused():
    with pytest.raises(UnidentifiedImageError):
        decoded(Image.new("RGB", (4, 4)), 4, format="EPS")


def test_a_cut_file_is_an_error():
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG")
    with pytest.raises(OSError, match="truncated"):
        decode(io.BytesIO(file.getvalue()[:-200]), 8, "crop", np.empty((8, 8, 3), dtype=np.uint8))
