"""What errors in tokens do to images: a share of the tokens becomes a neighbor on the map, or any other code.

    python -m experiments.token_errors KSOM=runs/demo/kohonen EMA-VQ=runs/demo/ema --out docs/results/token-errors.csv

A row is one run, one kind of error and one share: the PSNR of the validation images as they are decoded from damaged
tokens, and what it loses against the tokens as they were. Both models have the same errors.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.metrics import neighbors, psnr
from topovq.storage import write_atomic
from topovq.tokenizer.models import Tokenizer, as_levels
from topovq.tokenizer.training import open_data
from topovq.tokenizer.training.record import RECORD_FILE, read_record
from topovq.tokenizer.training.runs import data_of, load_run

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
KINDS = ("neighbor", "random")
IMAGES = 2_000  # at most
COLUMNS = ("data", "codebook", "K", "errors", "share", "images", "tokens", "psnr", "psnr_lost", "hardware", "commit")


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


def measure(model: Tokenizer, images_BCHW: Tensor, grid: Grid, shares: Iterable[float] = SHARES) -> Iterator[dict]:
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


def rows_of_run(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    model, config = load_run(folder), read_record(folder / RECORD_FILE)[0]
    data, path, workers = data_of(config)
    if len(model.quantizers) != 1:
        raise ValueError(f"{folder} has {len(model.quantizers)} levels of tokens; expected one")
    with open_data(data, path, model.image_size, workers) as source:
        images = torch.cat([batch for batch in source.validation(500)])[:IMAGES]
    quantizer = model.quantizers[0]
    facts = {"data": data, "codebook": name, "K": quantizer.codebook_size, "images": len(images)}
    facts |= {"hardware": config["hardware"], "commit": config["commit"]}
    for row in measure(model, images, quantizer.grid):
        yield facts | row


def as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="folders of runs, each with its name in the table")
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    asked = parser.parse_args()
    rows = [
        row for name, _, run in (each.partition("=") for each in asked.runs) for row in rows_of_run(name, Path(run))
    ]
    write_atomic(asked.out, as_csv(COLUMNS, rows).encode())


if __name__ == "__main__":
    main()
