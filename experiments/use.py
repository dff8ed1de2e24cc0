"""How many codes of trained models are in use, over the validation images and over all images.

    python -m experiments.use RUN... --out docs/results/use.csv

Over few tokens a code, a share of the codes is not seen even where all are in use: with T tokens a code on average, and
the codes' shares spread as exponential variables are, 1 / (1 + T) of them (`unseen_if_exponential`). So the share that
was seen says little where there are few tokens a code; the same model over more tokens shows it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from topovq.distributed import pick_device
from topovq.metrics import perplexity, usage
from topovq.tokenizer.models import load_pretrained
from topovq.tokenizer.training import read_record
from topovq.tokenizer.training.datasets import open_data
from topovq.tokenizer.training.evaluate import count_tokens
from topovq.tokenizer.training.record import RECORD_FILE, environment

BATCH = 512


def counts_of(model: Any, images: Iterator[Tensor], total: int, what: str, device: torch.device) -> Tensor:
    """How often each code is chosen, int64 [levels, K]."""
    size = model.config["codebook_size"]
    batches = track(images, f"{what} images", total=-(-total // BATCH), transient=True)
    counts = [count_tokens(model.encode(batch.to(device)), size) for batch in batches]
    return torch.stack(counts).sum(0)


def rows_of(folder: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    config = read_record(folder / RECORD_FILE)[0]
    model = load_pretrained(folder).to(device).eval()
    data_path = config["data_path"] and Path(config["data_path"])
    with open_data(config["data"], data_path, config["image_size"], None) as source:
        resident = source.resident()
        if resident is None:
            raise ValueError(f"the training images of {folder} do not fit into memory, or have no end")
        number = source.describe()["validation_images"]
        seen = counts_of(model, source.validation(BATCH), number, "validation", device)
        trained = counts_of(model, iter(resident.split(BATCH)), len(resident), "training", device)
    for over, counts_LK in (("validation", seen), ("validation and training", seen + trained)):
        for level, counts_K in enumerate(counts_LK):
            tokens = int(counts_K.sum())
            per_code = tokens / len(counts_K)
            yield {
                "run": config["id"],
                "quantizer": config["quantizer"],
                "codebook_size": len(counts_K),
                "steps": config["steps"],
                "seed": config["seed"],
                "level": level,
                "over": over,
                "tokens": tokens,
                "tokens_per_code": round(per_code, 2),
                "used": float(usage(counts_K)),
                "unseen_if_exponential": 1 / (1 + per_code),
                "perplexity": float(perplexity(counts_K)),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    facts = environment(device, 1)
    with open(arguments.out, "w", newline="") as file:
        writer = None
        for folder in arguments.runs:
            for row in rows_of(folder, device):
                print(*row.values(), sep="  ", flush=True)
                writer = writer or csv.DictWriter(file, [*row, *facts], lineterminator="\n")
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow({**row, **facts})


if __name__ == "__main__":
    main()
