"""`topovq demo --generate`: from a folder of images to new ones, on a CPU: a tokenizer, a prior, and what it draws.

The images are the 1,797 handwritten digits of scikit-learn, which everybody can judge.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from torch import Tensor

from topovq.prior.contact import enlarged, sheet
from topovq.prior.fitting import BIT, fit
from topovq.prior.generate import draw, open_prior
from topovq.prior.nearest import find_nearest
from topovq.prior.settings import PriorConfig
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.tokens import write_png
from topovq.tokenizer.training import TrainConfig, train
from topovq.view.pictures import codebook_map

IMAGES, TOKENIZER, PRIOR = "digits", "tokenizer", "prior"
SIDE, CLASSES, EACH = 16, 10, 8  # pixels of an image, classes, and samples of each
CODES = 128  # so few images do not fill more
GUIDANCE = 2.0
VALIDATED = 10  # one image in so many
NEAREST = 3  # training images that are shown beside a sample
PICTURE = "generate.png"


def demo_generate(out: Path, steps: int = 600) -> Path:
    """Train both models into `out`, a tokenizer for two thirds of `steps` and a prior for all; returns the picture."""
    console = Console(highlight=False)
    for name in (IMAGES, TOKENIZER, PRIOR):
        shutil.rmtree(out / name, ignore_errors=True)
    write_digits(out / IMAGES)
    console.print(f"1. A tokenizer learns to write the images of {out / IMAGES} as 4 x 4 tokens, and to read them.")
    train(tokenizer_config(out, 2 * steps // 3))
    console.print("2. A prior learns which tokens go together: a row of the map, then a column.")
    result = fit(prior_config(out, steps))
    console.print("3. It draws new images, token by token.")
    pair = open_prior(out / PRIOR, device="cpu")
    labels_N = torch.arange(EACH * CLASSES) % CLASSES
    samples = pair.decode(draw(pair, len(labels_N), labels_N=labels_N, guidance=GUIDANCE, seed=0))
    picture = out / PICTURE
    figure = _draw(pair.model, samples, load_digits_of(out / IMAGES / "train"))
    figure.savefig(picture, dpi=90)
    write_png(out / "samples.png", sheet(enlarged(samples), CLASSES))
    length, plain = pair.prior.length, math.ceil(math.log2(CODES))
    bits = f"{length * result.best_loss / BIT:.0f} with the prior, {length * plain} as plain tokens"
    console.print(f"bits of an image: {bits}")
    for told in (
        f"topovq sample {out / PRIOR} --label 3 --guidance {GUIDANCE:g} -o {out / 'threes'}",
        f"topovq explore {out / TOKENIZER} --prior {out / PRIOR}",
    ):
        console.print(f"go on: {told}", soft_wrap=True)
    console.print(f"The picture: {picture.resolve()}", soft_wrap=True)
    return picture


def write_digits(folder: Path) -> None:
    """The digits as PNG files, black on white: FOLDER/train/3/17.png and, of one in VALIDATED, FOLDER/val/..."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (ink, label) in enumerate(zip(digits.images, digits.target)):
        place = folder / ("val" if number % VALIDATED == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray(np.round(255 * (1 - ink / 16)).astype(np.uint8))
        pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(place / f"{number}.png")


def load_digits_of(folder: Path) -> Tensor:
    """The images below a folder, uint8 [N, 3, S, S]."""
    files = sorted(folder.rglob("*.png"))
    return torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])).permute(0, 3, 1, 2)


def tokenizer_config(out: Path, steps: int) -> TrainConfig:
    return TrainConfig(
        data=str(out / IMAGES),
        out=out / TOKENIZER,
        image_size=SIDE,
        model_options={"hidden": 48, "stride": 4},
        codebook_size=CODES,
        code_dim=16,
        steps=steps,
        batch_size=32,
        learning_rate=2e-3,
        validate_every=max(1, steps // 5),
        checkpoint_every=steps,
        seed=0,
        workers=0,
        device="cpu",
    )


def prior_config(out: Path, steps: int) -> PriorConfig:
    return PriorConfig(
        str(out / TOKENIZER),
        out=out / PRIOR,
        labels=True,
        preset="small",
        dim=96,
        layers=3,
        heads=3,
        batch_size=48,
        steps=steps,
        learning_rate=2e-3,
        validate_every=max(1, steps // 10),
        checkpoint_every=steps,
        device="cpu",
    )


def _draw(model: Tokenizer, samples: Tensor, train: Tensor) -> Figure:
    """The map, the samples, and some samples beside the training images that are nearest to them."""
    figure = Figure(figsize=(15, 6.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[0.85, 1.6, 0.61])
    chosen = samples[:CLASSES]
    beside = sheet(find_nearest(chosen, [train], NEAREST).beside(chosen), NEAREST + 1)
    drawn = f"new images, a digit a column (guidance {GUIDANCE:g})"
    for axes, picture, title in (
        (left, codebook_map(model), "the map of the tokenizer: every code decoded"),
        (middle, sheet(samples, CLASSES).permute(1, 2, 0).numpy(), drawn),
        (right, beside.permute(1, 2, 0).numpy(), f"one of each, and the {NEAREST}\nnearest training images"),
    ):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(title)
        axes.axis("off")
    return figure
