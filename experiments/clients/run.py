"""The runs of the study `clients`: quantizers in a modern tokenizer (the networks of models/vqgan.py).

    python -m experiments.clients.run OUT.jsonl --data FOLDER --limit 540    on a GPU: what OUT.jsonl does not have yet
    python -m experiments.clients.run FOLDER/NAME --pack SHARDS              tar shards as NAME-train.npz, NAME-val.npz

A loop of its own, since some quantizers of others need it: random crops that lie on the device, AdamW, squared error
and 0.25 commitment, bf16 autocast, one CUDA graph a step where the quantizer allows it. A line of OUT.jsonl is the
record of a run: its cell, what it ran on, and the measures after a third, two thirds and all of its steps. Needs torch,
numpy and Pillow alone (and vector-quantize-pytorch where a method is of that package).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

if importlib.util.find_spec("rich") is None:  # the tokenizer's door asks for it; its models do not use it
    sys.modules["rich"] = types.ModuleType("rich")

from experiments.clients.images import Crops, load_both, pack
from experiments.clients.methods import ALONE, UNORDERED, Cell, build, cells
from experiments.clients.steps import Steps
from experiments.records import environment, read, write
from topovq.grid import Grid
from topovq.metrics import perplexity, ssim, topographic_error
from topovq.tokenizer.models.vqgan import Decoder, Encoder

TOKENS_A_CODE = 20.0  # at least, in every measure of use
LEAST_CROPS = 18  # of a validation image
AT_ONCE = 256  # crops, in a measure
ORDERED = 16_384  # vectors that the topographic error is taken over
TIMED = 120  # steps of a run alone, where several are trained at once
BROKEN = 4  # the exit code where the device can no longer be used: a new process goes on


# One run


class Run(Steps):
    """A cell being trained: `advance` by some steps, `measure` what it has become."""

    def __init__(self, cell: Cell, train: Tensor, val: Tensor, graph: bool = True) -> None:
        self.cell, device = cell, train.device
        torch.manual_seed(cell.seed)
        size = (3, cell.hidden, 1, cell.stride, cell.light, cell.d)
        self.encoder, self.decoder = (
            made.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            for made in (Encoder(*size), Decoder(*size))
        )
        self.quantizer = build(cell.method, cell.d, cell.K, cell.metric, cell.steps).to(device).train()
        parts = (self.encoder, self.decoder, self.quantizer)
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, cell.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True, capturable=device.type == "cuda"
        )
        super().__init__(None, optimizer, device, graph and self.quantizer.graphable)
        self.see(train, val)
        torch.manual_seed(5_000 + cell.seed)

    def see(self, train: Tensor, val: Tensor) -> None:
        """Start, or with what was learned start again, on these images."""
        cell = self.cell
        order = torch.Generator().manual_seed(1_000 + cell.seed)
        number = (cell.steps + 1) * cell.batch
        epochs = [torch.randperm(len(train), generator=order) for _ in range(math.ceil(number / len(train)))]
        self.crops = Crops.drawn(train, torch.cat(epochs)[:number].view(-1, cell.batch), cell.crop, order)
        tokens = (cell.crop // cell.stride) ** 2
        each = max(LEAST_CROPS, math.ceil(TOKENS_A_CODE * cell.K / (tokens * len(val))))
        which = torch.arange(len(val)).repeat_interleave(each)
        which = which[torch.arange(math.ceil(len(which) / AT_ONCE) * AT_ONCE) % len(which)]
        self.seen = Crops.drawn(val, which.view(-1, AT_ONCE), cell.crop, torch.Generator().manual_seed(7))
        self.t = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.restart()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(reconstruction, what was quantized, tokens, the quantizer's loss)."""
        with self.autocast():
            z = self.encoder(x)
        z = z.float()
        quantized, indices, loss = self.quantizer(z)
        with self.autocast():
            y = self.decoder(quantized)
        return y.float(), z, indices, loss

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def step(self) -> None:
        x = self.crops.batch(self.t)
        y, _, _, loss = self.forward(x)
        (F.mse_loss(y, x) + loss.sum()).backward()
        self.optimizer.step()
        self.t.add_(1)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """PSNR and SSIM of reconstructed crops of the validation images, and how their tokens are spread."""
        self.quantizer.eval()
        codes = self.quantizer.codebook_size
        counts_K = torch.zeros(codes, dtype=torch.int64, device=self.device)
        squares, alike, kept = [], [], []
        for number in range(len(self.seen.which)):
            x = self.seen.batch(torch.tensor([number], device=self.device))
            y, z, indices, _ = self.forward(x)
            x, y = 127.5 * (x + 1), 127.5 * (y.clamp(-1, 1) + 1)
            squares.append((x - y).square().mean(dtype=torch.float64))
            alike.append(ssim(y, x).mean())
            counts_K += torch.bincount(indices.flatten(), minlength=codes)
            kept.append(z.movedim(1, -1).reshape(-1, self.cell.d)[:: max(1, z[0, 0].numel() // 4)])
        tokens = int(counts_K.sum())
        row = {
            "step": self.done,
            "psnr": 10 * math.log10(255**2 / float(torch.stack(squares).mean())),
            "ssim": float(torch.stack(alike).mean()),
            "used": float((counts_K > 0).double().mean()),
            "codes": codes,
            "tokens": tokens,
            "tokens_per_code": tokens / codes,
            "perplexity": float(perplexity(counts_K)),
            "topographic_error": None,
        }
        if self.cell.method not in UNORDERED:
            codes_KD: Any = self.quantizer.codebook
            x_ND, w_KD = torch.cat(kept)[:: max(1, len(kept) * len(kept[0]) // ORDERED)], codes_KD.float()
            if self.cell.metric == "cosine":
                x_ND, w_KD = F.normalize(x_ND, dim=1), F.normalize(w_KD, dim=1)
            row["topographic_error"] = float(topographic_error(x_ND, w_KD, Grid.balanced(codes)))
        self.quantizer.train()
        return row


def run(cells: Sequence[Cell], train: Tensor, val: Tensor, graph: bool = True) -> list[dict[str, Any]]:
    """The records of runs, but for what they ran on. Several are trained at once, after each was timed alone."""
    begin = time.perf_counter()
    runs = [Run(cell, train, val, graph) for cell in cells]
    rows: list[list[dict[str, Any]]] = [[] for _ in runs]
    if len(runs) > 1:
        for training in runs:
            training.advance(TIMED)
    for third in (1, 2, 3):
        stops = [round(third * training.cell.steps / 3) for training in runs]
        if len(runs) > 1:
            together(runs, stops)
        else:
            runs[0].advance(stops[0] - runs[0].done)
        for measured, training in zip(rows, runs):
            measured.append(training.measure())
    seconds = (time.perf_counter() - begin) / len(runs)
    return [
        {
            "study": "clients",
            "cell": asdict(training.cell),
            "rows": measured,
            "ms": training.ms,
            "graph": training.graphed,
            "at_once": len(runs),
            "seconds": seconds,
            "train_images": len(train),
            "val_images": len(val),
        }
        for training, measured in zip(runs, rows)
    ]


def together(runs: Sequence[Run], stops: Sequence[int]) -> None:
    """Advance runs that have their graphs, each on a stream of its own: small kernels leave room for one another."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    while any(training.done < stop for training, stop in zip(runs, stops)):
        for training, stop, stream in zip(runs, stops, streams):
            if training.done < stop and training.graph is not None:
                with torch.cuda.stream(stream):
                    training.graph.replay()
                training.done += 1
    torch.cuda.synchronize()


# Many runs


def run_cells(
    wanted: Iterable[Cell],
    out: Path,
    folder: Path | None,
    *,
    until: float = math.inf,
    at_once: int = 1,
    commit: str | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Add the records of those runs that `out` does not have, `at_once` of a size together on a GPU. One that would not
    end before the time `until` is left out; one that fails leaves a record that says so, and is tried once more without
    a CUDA graph."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device, commit)
    known = read(out)
    tried = {Cell(**record["cell"]).id: "failed" in record and record["graph"] for record in known}
    pace = {record["cell"]["method"]: record["seconds"] / record["cell"]["steps"] for record in known if "ms" in record}
    images: dict[str, tuple[Tensor, Tensor]] = {}
    queue = groups([cell for cell in wanted if tried.get(cell.id, True)], at_once if device.type == "cuda" else 1)
    while queue:
        group = queue.pop(0)
        cell = group[0]
        needed = sum(each.steps * pace.get(each.method, max(pace.values(), default=0.0)) for each in group)
        if time.time() + 1.1 * needed > until:
            say(f"left out, there is no time: {', '.join(each.name for each in group)}")
            continue
        if cell.data not in images:
            images[cell.data] = load_both(folder, cell.data, device)
        graph, broken = device.type == "cuda" and cell.id not in tried, False
        try:
            records = run(group, *images[cell.data], graph)
            pace |= {each.method: record["seconds"] / each.steps for each, record in zip(group, records)}
        except (RuntimeError, ValueError, ImportError) as error:
            traceback.print_exc(limit=-4)
            broken = "CUDA" in str(error) and not isinstance(error, torch.OutOfMemoryError)
            if len(group) > 1 and not broken:
                queue[:0] = [[each] for each in group]
                continue
            failed = {"failed": str(error).splitlines()[0], "graph": graph}
            records = [{"study": "clients", "cell": asdict(each), **failed} for each in group]
        for each, record in zip(group, records):
            write(out, {**record, **facts})
            say(summary(each, record))
        if broken:
            sys.exit(BROKEN)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def groups(wanted: Iterable[Cell], at_once: int) -> list[list[Cell]]:
    """Neighbors that may run together: of one length on the same images, no method twice, all in CUDA graphs."""
    found: list[list[Cell]] = []
    for cell in wanted:
        last = found[-1] if found else []
        alike = last and (last[0].data, last[0].steps, last[0].crop) == (cell.data, cell.steps, cell.crop)
        new = cell.method not in {each.method for each in last}  # one that draws numbers in its graph may do so alone
        if alike and new and len(last) < at_once and not {cell.method, last[0].method} & set(ALONE):
            last.append(cell)
        else:
            found.append([cell])
    return found


def summary(cell: Cell, record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"FAILED {cell.name}: {record['failed']}"
    names = ("psnr", "used", "perplexity", "topographic_error")
    shown = [" ".join(f"{row[name]:.4g}" for name in names if row[name] is not None) for row in record["rows"]]
    return f"{cell.name}: {' | '.join(shown)} | {record['ms']:.2f} ms, {record['seconds']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of the records, one a line; those it has are not run again")
    parser.add_argument("--data", type=Path, help="folder with NAME/*.tar or NAME-train.npz and NAME-val.npz")
    parser.add_argument("--plan", type=Path, help="JSON list of cells (what they leave out is as in Cell); else all")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds: no run starts that would take longer")
    parser.add_argument("--at-once", type=int, default=3, help="runs of a size that are trained together on a GPU")
    parser.add_argument("--commit", help="of the source, where that is not in a git repository")
    parser.add_argument("--pack", type=Path, help="only write the images of these shards to OUT-train.npz, OUT-val.npz")
    parser.add_argument("--most", type=int, help="images of each split that are packed")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # given by a process to the one it starts
    asked = parser.parse_args()
    if asked.pack:
        return pack(asked.pack, asked.out, asked.most)
    if asked.until is None:
        until = time.time() + asked.limit
        command = [sys.executable, "-m", "experiments.clients.run", *sys.argv[1:], "--until", str(until)]
        while subprocess.call(command) == BROKEN:
            print("the device broke off: a new process goes on", flush=True)
        return None
    wanted = cells() if asked.plan is None else [Cell(**cell) for cell in json.loads(asked.plan.read_text())]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run_cells(wanted, asked.out, asked.data, until=asked.until, at_once=asked.at_once, commit=asked.commit)


if __name__ == "__main__":
    main()
