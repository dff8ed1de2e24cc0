"""Heads for a map of 128 x 128 codes on a CPU: what ran for `heads-cpu.csv`.

    python heads.py tokens FOLDER OUT            FOLDER has cifar10-*.webp (experiments/prior/run.py --pack-cifar10)
    python heads.py HEAD SEED STEPS OUT [HEAD SEED STEPS OUT ...]

The tokenizer is no network: patches of 4x4 pixels are quantized by KohonenVQ. HEAD is a name of HEADS below, or map,
map shuffled, flat, flat tied, flat features. It runs with the source of the commit that has it.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from experiments.prior.books import _cut
from topovq import Grid, KohonenVQ
from topovq.prior import FlatHead, MapHead, Prior
from topovq.prior.layers import Mix

K, DIM, LAYERS, BATCH, RATE = 16_384, 128, 2, 32, 1e-3
SIDE = math.isqrt(K)
HEADS = {
    "row/column": {},
    "row/column shuffled": {},
    "bits": {"split": (16, 1024)},
    "blocks 16x16": {"block": 16},
    "blocks 8x8": {"block": 8},
    "pyramid": {"pyramid": True},
    "table": {"features": "table", "width": 32},
    "codes linear": {"features": "linear", "width": 48},
    "codes 32 no norm": {"features": "mlp"},
    "codes 32 no norm, first digit too": {"features": "mlp", "first": True},
    "codes 32": {"features": "norm"},
    "codes 16": {"features": "norm", "width": 16},
    "codes 16, pyramid": {"features": "norm", "width": 16, "pyramid": True},
    "codes 32, pyramid": {"features": "norm", "pyramid": True},
    "blocks 16x16, codes 32 no norm": {"features": "mlp", "block": 16},
    "blocks 8x8, codes 32": {"features": "norm", "block": 8},
}


class Idea(MapHead):
    """Two digits: a row and a column, the bits of `split`, or a block of the map and a place in it."""

    def __init__(self, codes_KC, *, split=None, block=None, features=None, width=32, first=False, pyramid=False):
        n = torch.arange(K)
        row, column = n // SIDE, n % SIDE
        self_of = n
        if block:
            split = ((SIDE // block) ** 2, block**2)
            self_of = (
                (row // block * (SIDE // block) + column // block) * block**2 + row % block * block + column % block
            )
        super().__init__(DIM, K, splits=[split or (SIDE, SIDE)])
        self.register_buffer("number_K", self_of)
        self.register_buffer("codes", (codes_KC / codes_KC.square().mean().sqrt())[self_of.argsort()])
        self.kind, self.width, self.first, self.pyramid = features, width, first, pyramid
        self.scale = width**-0.5 if features == "norm" else 1.0
        middle = [nn.Linear(codes_KC.shape[1], 64), nn.GELU(), nn.Linear(64, width)]
        if features in ("mlp", "norm"):
            self.of = nn.Sequential(*middle, *([nn.RMSNorm(width)] if features == "norm" else []))
        if features == "table":  # learned, one vector for 4 x 4 places, interpolated
            self.of = nn.Parameter(torch.randn(1, width, SIDE // 4, SIDE // 4))
        if features:
            self.query = nn.ModuleList(nn.Linear(DIM, width) for _ in self.factors)
        if first:
            self.shift = nn.Linear(width, 2 * DIM)
        if pyramid:
            self.coarse = nn.ModuleList(nn.Embedding(self.factors[0] // s, 2 * DIM) for s in (4, 16))
            self.outs = nn.ModuleList(nn.ModuleList(nn.Linear(DIM, n // s) for s in (4, 16)) for n in self.factors)

    def digits(self, tokens):
        return super().digits(self.number_K[tokens])

    def of_places(self):
        if self.kind == "table":
            return F.interpolate(self.of, size=(SIDE, SIDE), mode="bilinear")[0].flatten(1).T
        return self.codes if self.kind == "linear" else self.of(self.codes)

    def factor_logits(self, hidden, before):
        factor = before.shape[-1]
        places = self.of_places().view(*self.factors, self.width) if self.kind and (factor or self.first) else None
        if factor:
            digit = before[..., 0]
            both = self.embed[0](digit)
            if self.pyramid:
                both = both + self.coarse[0](digit // 4) + self.coarse[1](digit // 16)
            if self.first:
                both = both + self.shift(places.mean(1))[digit]
            scale, shift = both.chunk(2, -1)
            hidden = (1 + scale) * hidden + shift
        hidden = self.mix[factor](hidden)
        logits = self.out[factor](hidden)
        if self.pyramid:
            for s, out in zip((4, 16), self.outs[factor]):
                logits = logits + out(hidden).repeat_interleave(s, -1)
        if self.kind and factor:
            fit = torch.einsum("...m,...cm->...c", self.query[1](hidden), places[before[..., 0]])
            logits = logits + self.scale * fit
        elif self.first:
            logits = logits + self.scale * self.query[0](hidden) @ places.mean(1).T
        return logits.float()


class FlatFeatures(FlatHead):
    def __init__(self, codes_KC, width=32):
        super().__init__(DIM, K, code_dim=width)
        self.mix = Mix(DIM, DIM)
        self.of = nn.Sequential(nn.Linear(codes_KC.shape[1], 64), nn.GELU(), nn.Linear(64, width))
        self.register_buffer("codes", codes_KC / codes_KC.square().mean().sqrt())

    def factor_logits(self, hidden, before):
        return F.linear(self.out(self.mix(hidden)), self.of(self.codes), self.bias_K).float()


def make(name, grid, codes_KC):
    if name in ("flat", "flat features"):
        return FlatHead(DIM, grid) if name == "flat" else FlatFeatures(codes_KC)
    if name in ("flat tied", "map", "map shuffled"):
        code_dim = codes_KC.shape[1]
        tied = FlatHead(DIM, grid, code_dim=code_dim) if name == "flat tied" else MapHead(DIM, grid, code_dim=code_dim)
        tied.set_codes(codes_KC)
        return tied
    return Idea(codes_KC, **HEADS[name])


def train(name, seed, steps, out):
    kept = torch.load(out / "tokens.pt")
    seen, val, codes_KC = kept["train"].long(), kept["val"].long()[:1_024], kept["codes"]
    grid = Grid((SIDE, SIDE))
    if name.endswith("shuffled"):
        new_K = torch.randperm(K, generator=torch.Generator().manual_seed(0))
        seen, val, codes_KC = new_K[seen], new_K[val], torch.empty_like(codes_KC).index_copy_(0, new_K, codes_KC)
    torch.manual_seed(2_000 + seed)
    prior = Prior([[8, 8]], [grid.to_dict()], code_dim=codes_KC.shape[1], dim=DIM, layers=LAYERS, heads=2)
    prior.set_codes([codes_KC])
    torch.manual_seed(2_500 + seed)
    head = make(name, grid, codes_KC)
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(getattr(head, "of", None), nn.Sequential) and len(head.of) == 3:  # without a norm
        for layer in (head.of[0], head.of[2]):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    prior.outputs[0] = head
    optimizer = torch.optim.AdamW(prior.parameters(), RATE, (0.9, 0.95), weight_decay=0.05)
    order = torch.Generator().manual_seed(3_000 + seed)
    epochs = [torch.randperm(len(seen), generator=order) for _ in range(-(-steps * BATCH // len(seen)))]
    bits, times = [], []
    for t, chosen in enumerate(torch.cat(epochs)[: steps * BATCH].view(-1, BATCH)):
        begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = RATE * min((t + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * t / steps))
        optimizer.zero_grad(set_to_none=True)
        prior(seen[chosen]).backward()
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
        if (t + 1) % max(1, steps // 5) == 0:
            with torch.no_grad():
                nats = -sum(float(prior.log_probs(part).double().sum()) for part in val.split(64))
            bits.append(nats / math.log(2) / val.numel())
    number = sum(p.numel() for p in head.parameters())
    record = {"head": name, "seed": seed, "steps": steps, "head_parameters": number, "bits": bits}
    with open(out / "heads.jsonl", "a") as file:
        file.write(json.dumps(record | {"ms": 1e3 * sorted(times)[len(times) // 2]}) + "\n")
    print(name, seed, steps, number, [round(b, 3) for b in bits], flush=True)


def tokens(folder, out, steps=1_000, batch=4_096):
    images = torch.cat([_cut(sheet) for sheet in sorted(folder.glob("cifar10-*.webp"))])
    patches = images.view(-1, 8, 4, 8, 4, 3).permute(0, 1, 3, 2, 4, 5).flatten(3)  # [N, 8, 8, 48]
    torch.manual_seed(0)
    quantizer, generator = KohonenVQ(48, K, steps=steps).train(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(steps):
            at = (torch.randint(n, (batch,), generator=generator) for n in (len(patches) - 4_096, 8, 8))
            quantizer(patches[tuple(at)].float() / 127.5 - 1)
        quantizer.eval()
        parts = (images_.flatten(0, 2).float() / 127.5 - 1 for images_ in patches.split(128))
        every = torch.cat([quantizer(part)[1].view(-1, 64).int() for part in parts])
    torch.save(
        {"train": every[:40_000], "val": every[-4_096:], "codes": quantizer.codebook.detach()}, out / "tokens.pt"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "tokens":
        tokens(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        for name, seed, steps, out in zip(*[iter(sys.argv[1:])] * 4):
            train(name, int(seed), int(steps), Path(out))
