"""A plain PyTorch training loop with the quantizer of each library: what a step takes, and the quantizer's share of it.

    python -m benchmarks.loop --out benchmarks/results/loop.csv     on CUDA
    python -m benchmarks.loop --device cpu --quick                  tiny models, traced but not compiled: does it run?

Two models on smooth random images, bf16 autocast and AdamW: the VQ-VAE of the paper's CIFAR-10 runs, and a modern
tokenizer with many short codes. The quantizer's share is what a step takes beyond the same step whose quantizer passes
its input through. `run` is eager, or compiled: torch.compile of the whole model. The times are the host's: medians of
stretches of steps in a row. A run that is stopped, or ends by --limit, goes on where it stopped when started again.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import os
import platform
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if importlib.util.find_spec("rich") is None:  # the tokenizer's door asks for it; its networks do not use it
    sys.modules["rich"] = types.ModuleType("rich")

from benchmarks.compiling import compiled, graph_breaks, told
from benchmarks.layers import commit
from benchmarks.layers_timing import wall_ms
from benchmarks.loop_quantizers import IDENTITY, QUANTIZERS
from benchmarks.rows import Rows, as_text
from topovq.tokenizer.models import blocks, vqgan

KEY = ("case", "quantizer", "run")
SIZES = ("batch", "image", "tokens", "codebook_size", "code_dim")
VERSIONS = {"version_torch": "torch", "version_triton": "triton", "version_vqp": "vector-quantize-pytorch"}
COLUMNS = (
    *(*KEY, *SIZES, "ms", "quantizer_ms", "share_percent", "peak_mib", "note"),
    *("hardware", *VERSIONS, "commit", "date"),
)
SAME = ("hardware", *VERSIONS, "commit")
RUNS = ("eager", "compiled")
LAST_COMPILATION = 30.0  # seconds before the limit: one that starts later would not end before it


@dataclass(frozen=True)
class Case:
    """A model, and the images that it is trained on."""

    name: str
    image: int  # pixels a side
    stride: int  # pixels a token
    batch: int
    codebook_size: int
    code_dim: int
    hidden: int

    def networks(self) -> tuple[nn.Module, nn.Module]:
        """(images [B, 3, S, S] -> features [B, D, h, w], and back)."""
        if self.name == "tokenizer":
            size = (3, self.hidden, 1, self.stride, True, self.code_dim)
            return vqgan.Encoder(*size), vqgan.Decoder(*size)
        inside = (self.hidden, 2, self.hidden // 4, "plain")
        encoder = nn.Sequential(
            blocks.Encoder(3, *inside, self.stride), nn.Conv2d(self.hidden, self.code_dim, kernel_size=1)
        )
        return encoder, blocks.Decoder(self.code_dim, 3, *inside, self.stride)

    @property
    def tokens(self) -> int:
        return self.batch * (self.image // self.stride) ** 2


CASES = [
    Case("vqvae", image=32, stride=4, batch=256, codebook_size=512, code_dim=64, hidden=128),
    Case("tokenizer", image=64, stride=8, batch=64, codebook_size=16_384, code_dim=8, hidden=64),
]


def quick(case: Case) -> Case:
    return replace(case, image=16, batch=4, codebook_size=512, hidden=8, code_dim=8)


class Autoencoder(nn.Module):
    """The loss of images: their squared error, and the quantizer's own."""

    def __init__(self, case: Case, quantizer: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = case.networks()
        self.quantizer = quantizer

    def forward(self, images: Tensor) -> Tensor:
        quantized, loss = self.quantizer(self.encoder(images))
        return F.mse_loss(self.decoder(quantized).float(), images) + loss


def smooth_images(case: Case, device: torch.device, number: int = 4) -> list[Tensor]:
    """Batches of random images in [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(number * case.batch, 3, 8, 8, generator=generator) * 2 - 1
    images = F.interpolate(coarse, size=(case.image, case.image), mode="bilinear").to(device)
    return list(images.contiguous(memory_format=torch.channels_last).split(case.batch))


def training_step(
    model: nn.Module, called: Callable[[Tensor], Tensor], batches: list[Tensor], device: torch.device
) -> Callable[[], None]:
    """One turn of the loop; `called` is the model, or what the compiler made of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=device.type == "cuda")
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        images = batches[turn % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = called(images)
        loss.backward()
        optimizer.step()

    return step


def measure(case: Case, name: str, run: str, device: torch.device, quick: bool) -> tuple[float, float | None, str]:
    """(milliseconds of a step, peak MiB of the whole training on a GPU, a note)."""
    cuda = device.type == "cuda"
    seconds, warm, backend = (0.02, 2, "aot_eager") if quick else (0.7, 10, "inductor")
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = Autoencoder(case, QUANTIZERS[name](case.code_dim, case.codebook_size))
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batches = smooth_images(case, device)
    step, note = training_step(model, model, batches, device), ""
    step()  # codes that start from the first batch have started, and are not compiled twice
    if run == "compiled":
        step = training_step(model, compiled(model, run, name.startswith("topovq"), backend), batches, device)
    try:
        ms = wall_ms(step, device, seconds, warm)
        note = graph_breaks() if run == "compiled" else ""
    finally:
        torch._dynamo.reset()
    return ms, torch.cuda.max_memory_allocated() / 2**20 if cuda else None, note


def in_turn(cases: list[Case], names: list[str], runs: list[str], quick: bool) -> list[tuple[Case, str, str]]:
    """All rows: the eager ones first, then what takes long to compile, with the likeliest questions first."""
    slow = cases[:1] if quick else cases
    return [
        *((case, name, "eager") for case in cases for name in names if "eager" in runs),
        *((case, name, "compiled") for name in names for case in slow if "compiled" in runs),
    ]


def train_all(rows: Rows, arguments: argparse.Namespace, ends: float) -> None:
    device = torch.device(arguments.device)
    cases = [quick(case) if arguments.quick else case for case in CASES if case.name in arguments.cases]
    # The others' share needs the step without a quantizer
    names = [IDENTITY, *(name for name in arguments.quantizers if name != IDENTITY)]
    left = []
    for case, name, run in in_turn(cases, names, arguments.runs, arguments.quick):
        if rows.found(case.name, name, run):
            continue
        if time.perf_counter() + (LAST_COMPILATION if run == "compiled" else 0) > ends:
            left.append(f"{case.name}, {name}, {run}")
            continue
        ms, mib, note = None, None, ""
        try:
            ms, mib, note = measure(case, name, run, device, arguments.quick)
        except Exception as error:  # a library that is not there, or that does not run, is an answer
            note = told(error)
        alone = rows.found(case.name, IDENTITY, run)
        base = float(alone["ms"]) if alone and alone["ms"] else None
        own = None if ms is None or base is None or name == IDENTITY else ms - base
        share = None if own is None or ms is None else 100 * own / ms
        rows.put(
            case=case.name, quantizer=name, run=run, batch=case.batch, image=case.image, tokens=case.tokens,
            codebook_size=case.codebook_size, code_dim=case.code_dim, ms=as_text(ms, 4),
            quantizer_ms=as_text(own, 4), share_percent=as_text(share, 2), peak_mib=as_text(mib, 1), note=note,
        )  # fmt: skip
        told_ms = "" if ms is None else f"{ms:9.3f} ms" + ("" if share is None else f"{share:6.1f}% quantizer")
        print(f"{case.name:<11}{name:<26}{run:<10}{told_ms}  {note}".rstrip(), flush=True)
    if left:
        print(f"left out by --limit {arguments.limit:.0f}: {len(left)} rows, from {left[0]} on; start again")


def facts(device: str, code: str) -> dict[str, str]:
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    named = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    versions = {name: version(package) for name, package in VERSIONS.items()}
    return {"hardware": named, **versions, "commit": code, "date": datetime.date.today().isoformat()}


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the CSV file: what it has of this commit is not measured again")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the file")
    parser.add_argument("--quick", action="store_true", help="tiny models that are not timed well: does it run?")
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], default=["vqvae", "tokenizer"])
    parser.add_argument("--quantizers", nargs="*", choices=list(QUANTIZERS), default=list(QUANTIZERS))
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--limit", type=float, default=160.0, help="seconds after which nothing new is started")
    parser.add_argument("--commit", default=os.environ.get("COMMIT") or commit(), help="what the rows say was measured")
    arguments = parser.parse_args(argv)
    common = facts(arguments.device, arguments.commit)
    rows = Rows(arguments.out, KEY, COLUMNS, SAME, common, arguments.fresh)
    train_all(rows, arguments, began + arguments.limit)
    print(f"{rows.added} rows" + (f" in {arguments.out}" if arguments.out else ""), file=sys.stderr)


if __name__ == "__main__":
    main()
