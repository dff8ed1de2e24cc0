"""Images to token files and back, with the model of a run: `topovq encode` and `topovq decode` as functions."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from topovq.distributed import join_world, pick_device
from topovq.storage import model_id, no_empty_folder, refuse_to_overwrite, remove_abandoned, write_atomic
from topovq.tokenizer.data import find_images
from topovq.tokenizer.data.loader import Records, reason_not_decoded
from topovq.tokenizer.data.workers import begin, default_workers, signals_held_back
from topovq.tokenizer.models import Tokenizer, as_levels, codes_of, load_pretrained
from topovq.tokenizer.token_coded import Coder
from topovq.tokenizer.tokenfile import (
    TokenWriter,
    check_suffix,
    model_of,
    open_writer,
    read_tokens,
    shard_path,
    token_files,
)
from topovq.tokenizer.training.progress import shown
from topovq.tokenizer.training.runs import model_folder

WRITERS = 16  # threads that write images


@dataclass(frozen=True)
class Encoded:
    """What `encode` did: the file this process wrote, how many images are in it, and which could not be read."""

    path: Path
    images: int
    skipped: dict[str, str]


def encode(
    run: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    batch_size: int = 256,
    device: str = "auto",
    workers: int | None = None,
    force: bool = False,
    progress: bool = False,
    coder: Coder | None = None,
) -> Encoded:
    """Write the tokens of `images` to `out` (.parquet or .npz).

    The images are a folder, at any depth; tar shards; Parquet files with a column of bytes; or one image.

    With a `coder` (`topovq.prior.coding`) they are coded by a prior's probabilities, and `out` ends in .tvq.

    The file says which model wrote it. One that is there already is refused, unless `force` is set.

    Images are decoded in worker processes and a few batches are in memory at a time. Under torchrun every process takes
    its share and writes a shard of its own beside `out`. An unreadable image is skipped and named in the result.
    `progress` shows a bar (of the first process).
    """
    out = Path(out)
    check_suffix(out, coder)
    check_numbers(batch_size, workers)
    folder = model_folder(run)
    model = load_pretrained(folder)
    records = find_images(images)
    with no_empty_folder(out.parent), join_world(device) as world:
        path = shard_path(out, world.rank, world.size)
        refuse_to_overwrite(path, force)
        mine = range(len(records) * world.rank // world.size, len(records) * (world.rank + 1) // world.size)
        encoder = Encoder(model.to(world.device), world.device, model_id(folder), batch_size, workers, coder)
        with encoder.file(path) as writer:
            done = encoder.write(writer, path, records, mine, progress and world.leads)
            if mine and not done.images:
                raise none_readable(len(mine), images, done.skipped)
        return done


@dataclass(frozen=True)
class Encoder:
    """A model at its device, which writes the tokens of some images to one file."""

    model: Tokenizer
    device: torch.device
    id: str
    batch_size: int
    workers: int | None
    coder: Coder | None = None

    def file(self, path: Path) -> contextlib.AbstractContextManager[TokenWriter]:
        """A token file of the model, which is there when the block ends well."""
        return open_writer(path, self.model.token_shapes, codes_of(self.model.quantizers), self.id, self.coder)

    def write(self, writer: TokenWriter, path: Path, records: Records, numbers: range, progress: bool) -> Encoded:
        """Write the tokens of the images `numbers`, in that order, and say which cannot be read."""
        done, skipped = 0, {}
        batches = _batches(records, numbers, self.model.image_size, self.batch_size, self.workers)
        total = -(-len(numbers) // self.batch_size)
        for names, batch_BCHW, bad in shown(batches, "encoding", total, progress):
            skipped.update(bad)
            if names:
                writer.write(names, as_levels(self.model.encode(batch_BCHW.to(self.device))))
            done += len(names)
        return Encoded(path, done, skipped)


def check_numbers(batch_size: int, workers: int | None = None) -> None:
    """Refuse batches of no image and fewer processes than none."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if workers is not None and workers < 0:
        raise ValueError(f"workers={workers} must be at least 0, with which images are decoded without other processes")


def none_readable(number: int, images: str | Path, skipped: Mapping[str, str]) -> ValueError:
    name, reason = next(iter(skipped.items()))
    return ValueError(f"no image of {images} can be read ({number:,} tried); the first is {name}: {reason}")


def decode(
    run: str | Path,
    tokens: str | Path,
    out: str | Path,
    *,
    batch_size: int = 256,
    device: str = "auto",
    force: bool = False,
    progress: bool = False,
    coder: Coder | None = None,
) -> int:
    """Write the images that `tokens` (what `encode` wrote) stand for into the folder `out` as PNG files; how many.

    Everything is checked before the first image is written. Tokens of another model and images that are there already
    are refused, unless `force` is set. `coder` is the prior that coded them, where one did.
    """
    check_numbers(batch_size)
    out, folder = Path(out), model_folder(run)
    place = pick_device(device)
    decoder = Decoder(load_pretrained(folder).to(place), place, batch_size, coder)
    files, seen, ours = token_files(Path(tokens)), Places(out), model_id(folder)
    for path in files:
        if not force:
            check_model(path, folder, ours)
        decoder.check(path, seen, force)
    return sum(decoder.write(path, out, progress) for path in files)


@dataclass(frozen=True)
class Decoder:
    """A model at its device, which writes the images of a token file."""

    model: Tokenizer
    device: torch.device
    batch_size: int
    coder: Coder | None = None

    def check(self, path: Path, seen: Places, force: bool) -> None:
        """Refuse a file whose tokens are not those of the model, or whose images would overwrite others."""
        for names, levels in read_tokens(path, self.batch_size, self.coder):
            _check_levels(levels, codes_of(self.model.quantizers), self.model.token_shapes, path)
            for name in names:
                refuse_to_overwrite(seen.place(name, path), force)

    def write(self, path: Path, out: Path, progress: bool) -> int:
        """Write the images below `out`; how many there are."""
        done = 0
        for names, levels in shown(
            read_tokens(path, self.batch_size, self.coder), f"decoding {path.name}", None, progress
        ):
            there = [level.to(self.device) for level in levels]
            pixels = self.model.decode(there[0] if len(there) == 1 else tuple(there))
            write_pngs(out, names, pixels.cpu())
            done += len(names)
        return done


def check_model(path: Path, folder: Path, ours: str) -> None:
    """Refuse tokens that another model than `ours`, that of `folder`, wrote; files of before 0.3 do not say."""
    wrote = model_of(path)
    if wrote is not None and wrote != ours:
        raise ValueError(
            f"{path} was written by another model ({wrote[:12]}) than the one in {folder} ({ours[:12]}): its tokens "
            "mean nothing to this one; give the run that encoded it, or --force (force=True)"
        )


def image_name(name: str) -> PurePosixPath:
    """The PNG's place below the output folder: the image's own name, with .png after it unless it ends so."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"the image name {name!r} would lie outside of the output folder")
    return path if path.suffix == ".png" else path.with_name(f"{path.name}.png")


class Places:
    """Where images go below a folder: two never to one place."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.seen: set[bytes] = set()  # digests of places, which take less memory
        self.folders: set[Path] = set()

    def place(self, name: str, tokens: Path) -> Path:
        try:
            path = self.out / image_name(name)
        except ValueError as error:
            raise ValueError(f"{tokens}: {error}") from None
        digest = hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
        if digest in self.seen:
            raise ValueError(f"{tokens} has two images for {path}: the second, {name!r}, would overwrite the first")
        self.seen.add(digest)
        if path.parent not in self.folders:
            self.folders.add(path.parent)
            remove_abandoned(path.parent)
        return path


class _Batches(Dataset[tuple[list[str], Tensor, dict[str, str]]]):
    """Item i: the names and pixels uint8 [B, 3, S, S] of the readable images of batch i, and the others' errors."""

    def __init__(self, records: Records, numbers: range, size: int, batch_size: int) -> None:
        self.records, self.numbers, self.size, self.batch_size = records, numbers, size, batch_size

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch_size)

    def __getitem__(self, i: int) -> tuple[list[str], Tensor, dict[str, str]]:
        numbers = self.numbers[i * self.batch_size : (i + 1) * self.batch_size]
        pixels_BSS3 = np.empty((len(numbers), self.size, self.size, 3), dtype=np.uint8)
        names: list[str] = []
        bad: dict[str, str] = {}
        for number in numbers:
            name = self.records.names_N[number].decode(errors="backslashreplace")  # columns of text hold UTF-8 alone
            reason = reason_not_decoded(self.records, number, self.size, "crop", pixels_BSS3[len(names)])
            if reason is None:
                names.append(name)
            else:
                bad[name] = reason
        return names, torch.from_numpy(pixels_BSS3[: len(names)]).permute(0, 3, 1, 2), bad


def _batches(
    records: Records, numbers: range, size: int, batch_size: int, workers: int | None
) -> Iterator[tuple[list[str], Tensor, dict[str, str]]]:
    dataset = _Batches(records, numbers, size, batch_size)
    workers = min(default_workers() if workers is None else workers, len(dataset))
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=begin)
    with signals_held_back():
        return iter(loader)


def _check_levels(
    levels: tuple[Tensor, ...], codebook_size: int, shapes: Sequence[tuple[int, ...]], path: Path
) -> None:
    found, expected = (
        " and ".join("x".join(map(str, shape)) for shape in each)
        for each in ([tuple(level.shape[1:]) for level in levels], shapes)
    )
    if found != expected:
        raise ValueError(f"{path} holds tokens of {found} an image, but those of the model are {expected}")
    for level in levels:
        if level.numel() and (int(level.min()) < 0 or int(level.max()) >= codebook_size):
            raise ValueError(
                f"{path} holds tokens from {int(level.min())} to {int(level.max())}; the model's codes are "
                f"0 to {codebook_size - 1}"
            )


def write_pngs(out: Path, names: Sequence[str], images_NCHW: Tensor) -> None:
    """Write images below `out`. Several threads do: most of the time one waits for the disk."""
    if len(names) != len(images_NCHW):
        raise ValueError(f"there are {len(images_NCHW)} images for {len(names)} names")
    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in pool.map(write_png, [out / image_name(name) for name in names], images_NCHW):
            pass


def write_png(path: Path, image_CHW: Tensor) -> None:
    """Write an image uint8 [C, H, W], whole or not at all."""
    buffer = io.BytesIO()
    array = image_CHW.permute(1, 2, 0).numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(buffer, format="PNG")
    write_atomic(path, buffer.getvalue())
