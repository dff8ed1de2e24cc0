"""How many bits a pixel images take: as tokens in several forms, and as JPEG and WebP files of the same PSNR.

    python -m experiments.compression RUN PRIOR --out docs/results/compression-photos.csv

    raw          each token by as many bits as the number of codes asks for
    zstd         tokens as numbers of 16 or 32 bits, level 19
    frequencies  the entropy of the tokens' own frequencies: the least that a code for single tokens can reach
    prior        what `topovq encode --compress` writes, without the names of the images

JPEG and WebP get all images on one sheet, since a small image's file is mostly its header. Their size at a PSNR lies on
the line between the two qualities around it.
"""

from __future__ import annotations

import argparse
import io
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from experiments.token_errors import as_csv
from topovq.metrics import code_counts, psnr, to_psnr
from topovq.prior.coding import PriorCoder, open_coder
from topovq.storage import write_atomic
from topovq.tokenizer.models import as_levels
from topovq.tokenizer.token_coded import encode_symbols
from topovq.tokenizer.training import open_data
from topovq.tokenizer.training.record import RECORD_FILE, read_record
from topovq.tokenizer.training.runs import data_of, load_run

QUALITIES = (0, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90)
LEVEL = 19  # of zstd
IMAGES = 2_048  # at most
FORMS = ("raw", "zstd", "frequencies", "prior", "jpeg", "webp")
COLUMNS = ("data", "K", "form", "bits_per_pixel", "psnr", "images", "hardware", "commit")


def sizes(images_NCHW: Tensor, tokens: Tensor, codes: int, decibels: float) -> dict[str, Any]:
    """Bits a pixel of images whose tokens decode at so many dB. What a prior makes of them is its bits a token times
    `tokens_per_pixel`."""
    import pyarrow

    pixels = images_NCHW.shape[0] * images_NCHW.shape[2] * images_NCHW.shape[3]
    flat = tokens.reshape(-1).cpu()
    kind = np.uint16 if codes <= 2**16 else np.uint32
    counts_K = code_counts(flat, codes).double()
    entropy = -(counts_K[flat] / len(flat)).log2().sum()
    packed = flat.numpy().astype(kind).tobytes()
    return {
        "psnr": decibels,
        "images": len(images_NCHW),
        "tokens_per_pixel": len(flat) / pixels,
        "raw": len(flat) * math.ceil(math.log2(codes)) / pixels,
        "zstd": 8 * len(pyarrow.Codec("zstd", LEVEL).compress(packed)) / pixels,
        "frequencies": float(entropy) / pixels,
        **_at_psnr(images_NCHW, "jpeg", decibels),
        **_at_psnr(images_NCHW, "webp", decibels),
    }


def _at_psnr(images_NCHW: Tensor, form: str, decibels: float) -> dict[str, float | None]:
    """Bits a pixel of a sheet of the images at this PSNR, and the PSNR itself. Where the worst quality is still better,
    both are that quality's: at the PSNR asked for it would take fewer bits. None where no quality is that good."""
    sheet = _sheet(images_NCHW)
    found = [_coded(sheet, form, quality) for quality in QUALITIES]
    reached: tuple[float, float] | tuple[None, None] = (None, None)
    if decibels < found[0][0]:
        reached = found[0]
    for (worse, small), (better, large) in pairwise(found):
        if worse <= decibels <= better:
            reached = decibels, small + (large - small) * (decibels - worse) / max(better - worse, 1e-9)
    return {form: reached[1], f"{form}_psnr": reached[0]}


def _coded(sheet: np.ndarray, form: str, quality: int) -> tuple[float, float]:
    """(PSNR, bits a pixel) of a sheet as a file."""
    file = io.BytesIO()
    Image.fromarray(sheet).save(
        file, form, quality=quality, **({"optimize": True} if form == "jpeg" else {"method": 4})
    )
    size = file.tell()
    file.seek(0)
    with Image.open(file) as image:
        error = np.square(np.asarray(image.convert("RGB")).astype(np.float64) - sheet).mean()
    return to_psnr(float(error)), 8 * size / (sheet.shape[0] * sheet.shape[1])


def _sheet(images_NCHW: Tensor) -> np.ndarray:
    """As many of the images as fill a square."""
    number = math.isqrt(len(images_NCHW))
    array = images_NCHW[: number * number].unflatten(0, (number, number))
    return torch.einsum("rcdhw->rhcwd", array).flatten(2, 3).flatten(0, 1).cpu().numpy()


def coded_bits(coder: PriorCoder, levels: tuple[Tensor, ...]) -> int:
    """Bits of the streams in a coded file."""
    symbols = np.array_split(coder.symbols(levels), range(coder.at_once, len(levels[0]), coder.at_once))
    return sum(32 * len(encode_symbols(coder, part)) for part in symbols)


def rows_of_run(run: Path, prior: Path) -> list[dict[str, Any]]:
    """A row for each form, of the run's validation images."""
    model, config = load_run(run), read_record(run / RECORD_FILE)[0]
    data, path, workers = data_of(config)
    with open_data(data, path, model.image_size, workers) as source:
        images = torch.cat(list(source.validation(500)))[:IMAGES]
    tokens = model.encode(images)
    levels, codes = as_levels(tokens), model.quantizers[0].codebook_size
    decibels = psnr(model.decode(tokens), images)
    flat = torch.cat([level.flatten(1) for level in levels], 1)
    found = sizes(images, flat, codes, decibels)
    pixels = images.shape[0] * images.shape[2] * images.shape[3]
    found["prior"] = coded_bits(open_coder(prior, run, "cpu"), levels) / pixels
    facts = {"data": data, "K": codes, "images": len(images)}
    facts |= {"hardware": config["hardware"], "commit": config["commit"]}
    return [
        {**facts, "form": form, "bits_per_pixel": found[form], "psnr": found.get(f"{form}_psnr", decibels)}
        for form in FORMS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the tokenizer's run")
    parser.add_argument("prior", type=Path, help="folder of a prior of it")
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    asked = parser.parse_args()
    write_atomic(asked.out, as_csv(COLUMNS, rows_of_run(asked.run, asked.prior)).encode())


if __name__ == "__main__":
    main()
