"""Small image files for the tests of this folder: picture k is of one color, which tells k."""

import io
import tarfile
from pathlib import Path

import torch
from PIL import Image


def picture(k: int, size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new("RGB", size, (k, 255 - k, 7))


def png(k: int) -> bytes:
    buffer = io.BytesIO()
    picture(k).save(buffer, "PNG")
    return buffer.getvalue()


def numbers(batch: torch.Tensor) -> list[int]:
    """The k of each picture of a batch, after a check that nothing else is in it."""
    k = batch[:, 0, 0, 0]
    colors_B3 = torch.stack([k, 255 - k, torch.full_like(k, 7)], dim=1)
    assert torch.equal(batch, colors_B3[:, :, None, None].expand_as(batch))
    return k.tolist()


def fill_folder(root: Path, pictures: range) -> Path:
    """Pictures k as `k.png` with three digits."""
    root.mkdir(parents=True, exist_ok=True)
    for k in pictures:
        (root / f"{k:03}.png").write_bytes(png(k))
    return root


def write_tar(path: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format, **options) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_shard(path: Path, pictures: range) -> Path:
    return write_tar(path, {f"{k:03}.png": png(k) for k in pictures})
