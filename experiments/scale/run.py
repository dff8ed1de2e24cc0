"""What is run and measured of large codebooks beside the study's table, whose runs `python -m experiments scale` makes.

python -m experiments.scale.run shifted --out docs/results/shifted.csv     minutes on a CPU
python -m experiments.scale.run use RUN... --out docs/results/use.csv      of models that were trained
python -m experiments.scale.run schedules                                  trains 60 short runs: for a GPU
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from experiments.peers import MissingPackage, their
from experiments.records import RECORDS, Records
from experiments.runs import missing, run_all
from experiments.scale.tried import tried
from experiments.tables import Line, lines_as_csv
from topovq import KohonenVQ
from topovq.distributed import pick_device
from topovq.metrics import perplexity, usage
from topovq.storage import write_atomic
from topovq.tokenizer.data import open_data
from topovq.tokenizer.models import load_pretrained
from topovq.tokenizer.training import read_record
from topovq.tokenizer.training.evaluate import count_tokens
from topovq.tokenizer.training.record import RECORD_FILE, environment

# shifted: who keeps its codes? Gaussian vectors N(5, 1) far from where the codes start, under several settings and
# layers. After 100, 1,000 and 3,000 updates: how many codes are chosen for 20,000 fresh vectors, how many have drained
# (their mean is nearer to 0 than to 5), and the mean squared error.

D, K, SHIFT, BATCH = 32, 512, 5.0, 1024  # dimensions, codes, mean, vectors of a batch
CHECKS = (100, 1000, 3000)
SETTINGS: dict[str, dict[str, object]] = {
    "EMA-VQ (none)": {"neighborhood": "none"},
    "hard, tau 0.1": {"neighborhood": "hard"},
    "hard, tau 0.01": {"neighborhood": "hard", "tau": 0.01},
    "gaussian, tau 0.1": {"neighborhood": "gaussian"},
    "exponential, tau 0.1": {"neighborhood": "exponential"},
    "exponential, tau 0.01": {"neighborhood": "exponential", "tau": 0.01},
    "narrowing": {"neighborhood": "narrowing"},
    "narrowing, steps=3000": {"neighborhood": "narrowing", "steps": 3000},
    "default": {},
}


def shifted_layers() -> dict[str, Callable[[], nn.Module]]:
    def ours(options: dict[str, object]) -> Callable[[], nn.Module]:
        return lambda: KohonenVQ(D, K, **options)  # type: ignore[arg-type]

    made = {name: ours(options) for name, options in SETTINGS.items()}
    try:
        theirs = their("VectorQuantize")
    except MissingPackage as error:
        print(f"vector-quantize-pytorch is left out: {error}")
    else:
        made["vector-quantize-pytorch, defaults"] = lambda: theirs(dim=D, codebook_size=K)
    return made


def run_shifted(make: Callable[[], nn.Module], seed: int) -> list[dict[str, object]]:
    torch.manual_seed(seed)
    layer: Any = make()
    rows: list[dict[str, object]] = []
    for step in range(1, max(CHECKS) + 1):
        layer.train()(torch.randn(1, BATCH, D) + SHIFT)
        if step in CHECKS:
            x = torch.randn(1, 20_000, D) + SHIFT
            codes = layer.codebook
            index = torch.cdist(x[0], codes).argmin(1)
            rows.append({
                "updates": step,
                "used": index.unique().numel(),
                "drained": int((codes.mean(1) < SHIFT / 2).sum()),
                "error": f"{(x[0] - codes[index]).square().mean().item():.4f}",
            })  # fmt: skip
    return rows


def shifted(seeds: int) -> Iterator[Line]:
    torch.set_num_threads(1)
    facts = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    facts["date"] = datetime.date.today().isoformat()
    jobs = [(name, make, seed) for name, make in shifted_layers().items() for seed in range(seeds)]
    for name, make, seed in track(jobs, "settings x seeds"):
        yield from ({"layer": name, "seed": seed, **row, **facts} for row in run_shifted(make, seed))


# use: how many codes of trained models are in use, over the validation images and over all images. Over few tokens a
# code, a share of the codes is not seen even where all are in use: with T tokens a code on average, and the codes'
# shares spread as exponential variables are, 1 / (1 + T) of them (`unseen_if_exponential`). The same model over more
# tokens shows it.

IMAGES = 512  # of a batch


def counts_of(model: Any, images: Iterator[Tensor], total: int, what: str, device: torch.device) -> Tensor:
    """How often each code is chosen, int64 [levels, K]."""
    size = model.config["codebook_size"]
    batches = track(images, f"{what} images", total=-(-total // IMAGES), transient=True)
    counts = [count_tokens(model.encode(batch.to(device)), size) for batch in batches]
    return torch.stack(counts).sum(0)


def rows_of(folder: Path, device: torch.device) -> Iterator[Line]:
    config = read_record(folder / RECORD_FILE)[0]
    model = load_pretrained(folder).to(device).eval()
    data_path = config["data_path"] and Path(config["data_path"])
    with open_data(config["data"], data_path, config["image_size"], None) as source:
        resident = source.resident()
        if resident is None:
            raise ValueError(f"the training images of {folder} do not fit into memory, or have no end")
        number = source.describe()["validation_images"]
        seen = counts_of(model, source.validation(IMAGES), number, "validation", device)
        trained = counts_of(model, iter(resident.split(IMAGES)), len(resident), "training", device)
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


def use(runs: Iterable[Path], device: torch.device) -> Iterator[Line]:
    facts = environment(device, 1)
    return ({**row, **facts} for folder in runs for row in rows_of(folder, device))


def write(rows: Iterable[Line], out: Path | None) -> None:
    """Print each row as it comes, and write them to the CSV file."""
    made = []
    for row in rows:
        print(*row.values(), sep="  ", flush=True)
        made.append(row)
    if out is not None:
        write_atomic(out, lines_as_csv(made).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = parser.add_subparsers(dest="study", required=True)
    one = studies.add_parser("shifted")
    one.add_argument("--out", type=Path, help="write the rows to this CSV file")
    one.add_argument("--seeds", type=int, default=2)
    one = studies.add_parser("use")
    one.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    one.add_argument("--out", type=Path, required=True, help="the CSV file")
    one.add_argument("--device", default="auto")
    one = studies.add_parser("schedules")
    one.add_argument("--runs", type=Path, default=Path("runs") / "schedules", help="folder of the runs")
    asked = parser.parse_args()
    if asked.study == "schedules":
        run_all(missing([config for *_, runs in tried() for config in runs], Records([RECORDS])), asked.runs)
    elif asked.study == "shifted":
        write(shifted(asked.seeds), asked.out)
    else:
        write(use(asked.runs, pick_device(asked.device)), asked.out)


if __name__ == "__main__":
    main()
