"""What tokens stand: the PSNR that errors in them cost, and the bits a pixel that they take.

    python -m experiments.prior.tokens errors KSOM=runs/demo/kohonen EMA-VQ=runs/demo/ema --out token-errors.csv
    python -m experiments.prior.tokens sizes RUN PRIOR --out compression.csv

errors: a share of the tokens becomes a neighbor on the map, or any other code. A row is one run, one kind of error and
one share: the PSNR of the validation images as they are decoded from damaged tokens, and what it loses against the
tokens as they were. All models have the same errors.

sizes: tokens in several forms, and JPEG and WebP files of the same PSNR.
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
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from experiments.tables import FACTS, Line, lines_as_csv
from topovq.grid import Grid
from topovq.metrics import code_counts, neighbors, psnr, to_psnr
from topovq.storage import write_atomic
from topovq.tokenizer.models import Tokenizer, as_levels

if TYPE_CHECKING:  # the extras of topovq are needed for runs alone (the second half), not by the study
    from topovq.prior.coding import PriorCoder

IMAGES = 2_048  # at most
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of the tokens, that are wrong
KINDS = ("neighbor", "random")
QUALITIES = (0, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90)
LEVEL = 19  # of zstd
FORMS = ("raw", "zstd", "frequencies", "prior", "jpeg", "webp")
ERROR_COLUMNS = ("data", "codebook", "K", "errors", "share", "images", "tokens", "psnr", "psnr_lost", *FACTS)
SIZE_COLUMNS = ("data", "K", "form", "bits_per_pixel", "psnr", "images", *FACTS)


# Errors


def with_errors(tokens: Tensor, grid: Grid, share: float, kind: str, generator: torch.Generator) -> Tensor:
    """Tokens of any shape, each with the probability `share` replaced by a place next to it or by any other code."""
    flat_N = tokens.reshape(-1).cpu()
    wrong_N = torch.rand(len(flat_N), generator=generator) < share
    drawn_N = torch.rand(len(flat_N), generator=generator)
    if kind == "neighbor":
        near_Nn = neighbors(grid)[flat_N]
        there_Nn = near_Nn >= 0
        chosen_N = (drawn_N * there_Nn.sum(1)).long() + 1  # which of those that are there
        other_N = near_Nn.gather(1, (there_Nn.cumsum(1) < chosen_N[:, None]).sum(1, keepdim=True))[:, 0]
    else:
        other_N = (flat_N + 1 + (drawn_N * (grid.size - 1)).long()) % grid.size
    return torch.where(wrong_N, other_N, flat_N).view_as(tokens).to(tokens.device)


def error_rows(model: Tokenizer, images_BCHW: Tensor, grid: Grid, shares: Iterable[float] = SHARES) -> Iterator[dict]:
    """The rows of a model with one level."""
    batches = images_BCHW.split(500)
    tokens = torch.cat([as_levels(model.encode(batch))[0] for batch in batches])
    whole = decoded_psnr(model, tokens, images_BCHW)
    yield {"errors": "none", "share": 0.0, "tokens": tokens.numel(), "psnr": whole, "psnr_lost": 0.0}
    for kind in KINDS:
        for share in shares:
            damaged = with_errors(tokens, grid, share, kind, torch.Generator().manual_seed(0))
            found = decoded_psnr(model, damaged, images_BCHW)
            row = {"errors": kind, "share": share, "tokens": tokens.numel(), "psnr": found}
            yield row | {"psnr_lost": whole - found}


def decoded_psnr(model: Tokenizer, tokens: Tensor, images_BCHW: Tensor) -> float:
    return psnr(torch.cat([model.decode(part) for part in tokens.split(500)]), images_BCHW)


# Sizes


def sizes(images_NCHW: Tensor, tokens: Tensor, codes: int, decibels: float) -> dict[str, Any]:
    """Bits a pixel of images whose tokens decode at so many dB. What a prior makes of them is its bits a token times
    `tokens_per_pixel`."""
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
        "zstd": _zstd(packed, pixels),
        "frequencies": float(entropy) / pixels,
        **_at_psnr(images_NCHW, "jpeg", decibels),
        **_at_psnr(images_NCHW, "webp", decibels),
    }


def _zstd(packed: bytes, pixels: int) -> float | None:
    """Bits a pixel; None where pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        return None
    return 8 * len(pyarrow.Codec("zstd", LEVEL).compress(packed)) / pixels


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
    from topovq.tokenizer.token_coded import encode_symbols

    symbols = np.array_split(coder.symbols(levels), range(coder.at_once, len(levels[0]), coder.at_once))
    return sum(32 * len(encode_symbols(coder, part)) for part in symbols)


# Tables of runs


def open_run(folder: Path) -> tuple[Tokenizer, Tensor, Line]:
    """A run's model, its validation images, and what a row says of them."""
    from topovq.tokenizer.training import open_data
    from topovq.tokenizer.training.record import RECORD_FILE, read_record
    from topovq.tokenizer.training.runs import data_of, load_run

    model, config = load_run(folder), read_record(folder / RECORD_FILE)[0]
    data, path, workers = data_of(config)
    with open_data(data, path, model.image_size, workers) as source:
        images = torch.cat(list(source.validation(500)))[:IMAGES]
    facts = {"data": data, "K": model.quantizers[0].codebook_size, "images": len(images)}
    return model, images, facts | {name: config[name] for name in FACTS}


def errors_of_run(name: str, folder: Path) -> Iterator[Line]:
    """A row for each kind of error and share, of the run's validation images."""
    model, images, facts = open_run(folder)
    if len(model.quantizers) != 1:
        raise ValueError(f"{folder} has {len(model.quantizers)} levels of tokens; expected one")
    for row in error_rows(model, images, model.quantizers[0].grid):
        yield facts | {"codebook": name} | row


def sizes_of_run(run: Path, prior: Path) -> list[Line]:
    """A row for each form, of the run's validation images."""
    from topovq.prior.coding import open_coder

    model, images, facts = open_run(run)
    tokens = model.encode(images)
    levels = as_levels(tokens)
    decibels = psnr(model.decode(tokens), images)
    flat = torch.cat([level.flatten(1) for level in levels], 1)
    found = sizes(images, flat, facts["K"], decibels)
    pixels = images.shape[0] * images.shape[2] * images.shape[3]
    found["prior"] = coded_bits(open_coder(prior, run, "cpu"), levels) / pixels
    return [
        {**facts, "form": form, "bits_per_pixel": found[form], "psnr": found.get(f"{form}_psnr", decibels)}
        for form in FORMS
    ]


def as_csv(columns: Sequence[str], rows: Iterable[Line]) -> str:
    shown = [{name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()} for row in rows]
    return lines_as_csv(shown, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(dest="table", required=True)
    one = tables.add_parser("errors")
    one.add_argument("runs", nargs="+", metavar="NAME=RUN", help="folders of runs, each with its name in the table")
    one.add_argument("--out", type=Path, required=True, help="the CSV")
    one = tables.add_parser("sizes")
    one.add_argument("run", type=Path, help="folder of the tokenizer's run")
    one.add_argument("prior", type=Path, help="folder of a prior of it")
    one.add_argument("--out", type=Path, required=True, help="the CSV")
    asked = parser.parse_args()
    if asked.table == "errors":
        named = (each.partition("=") for each in asked.runs)
        rows = [row for name, _, run in named for row in errors_of_run(name, Path(run))]
        text = as_csv(ERROR_COLUMNS, rows)
    else:
        text = as_csv(SIZE_COLUMNS, sizes_of_run(asked.run, asked.prior))
    write_atomic(asked.out, text.encode())


if __name__ == "__main__":
    main()
