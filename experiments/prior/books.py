"""The tokenizers of the study `prior`: images, a VQ-VAE trained in seconds, and the tokens of all images.

Images lie on the device as uint8 [M, S, S, 3]. CIFAR-10 is read from FOLDER/cifar10-*.webp, sheets of 100 x 100 images
without loss, where there are such (`--pack-cifar10` writes them); else a copy of it is looked for as `topovq` does.
Legend: B images, T = 64 tokens of an image, K codes of D dimensions.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from experiments.clients.images import Crops, load_both
from experiments.clients.methods import build
from experiments.clients.steps import Steps
from experiments.prior.cells import CODEBOOKS, SIDES, Book
from topovq.grid import Grid
from topovq.metrics import psnr
from topovq.tokenizer.models.vqvae import VQVAE

SHEET = 100  # images a side of a sheet
VALIDATION = 4_096  # images of CIFAR-10 that are not trained on, the last ones
CROPS = {"imagenet160": (12, 8), "photos": (2, 1)}  # tokens of how many crops of a training, a validation image
Images = tuple[Tensor, Tensor]  # that train, that validate


# Images


def load(folder: Path | None, data: str, device: torch.device) -> Images:
    if data == "cifar10":
        sheets = sorted(folder.glob("cifar10-*.webp")) if folder is not None else []
        images = torch.cat([_cut(sheet) for sheet in sheets]) if sheets else _cifar10(folder)
        return images[:-VALIDATION].to(device), images[-VALIDATION:].to(device)
    return load_both(folder, data, device)


def _cifar10(folder: Path | None) -> Tensor:
    from topovq.tokenizer.data.cifar10 import load_cifar10

    return load_cifar10(folder)["train_images"].permute(0, 2, 3, 1).contiguous()


def _cut(sheet: Path) -> Tensor:
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("RGB"))
    side = pixels.shape[0] // SHEET
    cut = pixels.reshape(SHEET, side, SHEET, side, 3).transpose(0, 2, 1, 3, 4)
    return torch.from_numpy(np.ascontiguousarray(cut).reshape(-1, side, side, 3))


def pack_cifar10(copy: Path, out: Path) -> None:
    """The 50,000 training images as five sheets without loss, each of 17 MB."""
    images = _cifar10(copy).numpy()
    out.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(images.reshape(-1, SHEET, SHEET, 32, 32, 3)):
        sheet = Image.fromarray(part.transpose(0, 2, 1, 3, 4).reshape(SHEET * 32, SHEET * 32, 3))
        sheet.save(out / f"cifar10-{number}.webp", lossless=True, quality=75, method=4)


def crops_of(images: Tensor, each: int, side: int, seed: int) -> Tensor:
    """uint8 [each * M, 3, side, side]: so many random crops of each image, half of them mirrored."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(len(images)).repeat(each)
    zero = torch.zeros(1, dtype=torch.int64, device=images.device)
    parts = [Crops.drawn(images, part[None], side, generator).batch(zero) for part in which.split(4_096)]
    return torch.cat([((part + 1) * 127.5).round().to(torch.uint8) for part in parts])


def seen_by_priors(data: str, images: Images) -> Images:
    """uint8 [N, 3, S, S] whose tokens train and validate priors: CIFAR-10 also mirrored, else crops."""
    train, val = images
    if data == "cifar10":
        whole = train.permute(0, 3, 1, 2)
        return torch.cat([whole, whole.flip(3)]), val.permute(0, 3, 1, 2).contiguous()
    of_train, of_val = CROPS[data]
    return crops_of(train, of_train, SIDES[data], 1), crops_of(val, of_val, SIDES[data], 2)


# One tokenizer


@dataclass
class Tokens:
    """A trained book: its model, the tokens int64 [N, T] of the images that priors see, and figures."""

    model: VQVAE
    grid: Grid
    codes_KD: Tensor
    train_NT: Tensor
    val_NT: Tensor
    val_images: Tensor  # uint8 [N, 3, S, S]
    figures: dict[str, Any]


def cached(book: Book, images: Images, folder: Path | None) -> Tokens:
    """`make_tokens`, or what it left in `folder` before."""
    path = folder / f"{book.id}.pt" if folder is not None else None
    if path is None or not path.exists():
        made = make_tokens(book, images)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**vars(made), "model": made.model, "val_images": None}, path)
        return made
    kept = torch.load(path, map_location=images[0].device, weights_only=False)
    return Tokens(**{**kept, "val_images": seen_by_priors(book.data, images)[1]})


def make_tokens(book: Book, images: Images, graph: bool = True) -> Tokens:
    """Train the tokenizer, then encode."""
    device, begin = images[0].device, time.perf_counter()
    model, steps = train_book(book, images[0], graph)
    quantizer: Any = model.quantizers[0]
    codes_KD = quantizer.codebook.detach().float()
    grid = quantizer.grid if book.codebook in ("KSOM", "EMA-VQ") else Grid.balanced(len(codes_KD))
    seen, val = seen_by_priors(book.data, images)
    train_NT, val_NT = (encode(model, part) for part in (seen, val))
    used = torch.zeros(len(codes_KD), dtype=torch.bool, device=device)
    used[train_NT.reshape(-1)] = True
    figures = {
        "psnr": psnr(decode(model, val_NT), val),
        "used": float(used.float().mean()),
        "codes": len(codes_KD),
        "tokens_id": hashlib.sha256(val_NT.cpu().numpy().tobytes()).hexdigest()[:12],
        "train_images": len(train_NT),
        "val_images": len(val_NT),
        "tokenizer_ms": steps.ms,
        "tokenizer_seconds": time.perf_counter() - begin,
    }
    return Tokens(model, grid, codes_KD, train_NT, val_NT, val, figures)


def train_book(book: Book, train: Tensor, graph: bool) -> tuple[VQVAE, Steps]:
    device, side = train.device, SIDES[book.data]
    torch.manual_seed(book.seed)
    model = VQVAE(side, hidden=book.hidden, stride=side // 8, codebook_size=4, code_dim=book.code_dim)
    quantizer = build(CODEBOOKS[book.codebook], book.code_dim, book.K, "euclidean", book.steps)
    model.quantizers = nn.ModuleList([quantizer])  # type: ignore[assignment]
    model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    order = torch.Generator().manual_seed(1_000 + book.seed)
    number = book.steps * book.batch
    epochs = [torch.randperm(len(train), generator=order) for _ in range(math.ceil(number / len(train)))]
    crops = Crops.drawn(train, torch.cat(epochs)[:number].view(-1, book.batch), side, order)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad], book.learning_rate, 0.0, device)
    t = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        x = crops.batch(t)
        with torch.autocast(device.type, torch.bfloat16):
            z = model.features(x)[0]
        quantized, _, loss = quantizer(z.float())
        with torch.autocast(device.type, torch.bfloat16):
            y = model.reconstruct([quantized])
        (F.mse_loss(y.float(), x) + loss.sum()).backward()
        optimizer.step()
        t.add_(1)

    steps = Steps(step, optimizer, device, graph and quantizer.graphable)
    steps.advance(book.steps)
    return model.eval(), steps


def adamw(parameters: list[nn.Parameter], rate: float | Tensor, decay: float, device: torch.device) -> Any:
    cuda = device.type == "cuda"
    return torch.optim.AdamW(parameters, rate, (0.9, 0.95), weight_decay=decay, fused=cuda, capturable=cuda)


def encode(model: VQVAE, images: Tensor) -> Tensor:
    """uint8 [N, 3, S, S] -> tokens [N, T]."""
    parts = [model.encode(part) for part in images.split(1_024)]
    return torch.cat([part.flatten(1) for part in parts])  # type: ignore[union-attr]


def decode(model: VQVAE, tokens_NT: Tensor) -> Tensor:
    side = math.isqrt(tokens_NT.shape[1])
    return torch.cat([model.decode(part.unflatten(1, (side, side))) for part in tokens_NT.split(1_024)])
