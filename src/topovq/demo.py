"""`topovq demo`: a Kohonen-VAE and its EMA-VQ twin, trained alike, and a page that shows what the map is good for."""

from __future__ import annotations

import shutil
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from topovq.tokenizer.training import TrainConfig, train
from topovq.tokenizer.training.record import RECORD_FILE
from topovq.view.pictures import COLORS, codebook_map, film, pixel_error, shifted
from topovq.view.report import CURVES, DEMO_FILE, DEMO_LINK, REPORT_FILE, Study, study, write_page

TWINS = {"KSOM": "kohonen", "EMA-VQ": "ema"}
OFFSETS = range(-3, 4)
FEWEST = 100  # steps from which on the figures say something about the models
SHOWN = 6  # images in the figure
TITLE = "A codebook with a map"
INTRODUCTION = """Two VQ-VAEs, the same in everything but the rule by which their codes learn. In the Kohonen-VAE (KSOM)
a code that wins pulls its neighbors on a map along. In EMA-VQ it does not. Moving every token by one place on the map
changes the pixels of held-out photographs by {KSOM:.0f} gray levels with KSOM and by {EMA-VQ:.0f} with EMA-VQ."""


def demo(out: Path, steps: int = 600) -> Path:
    """Train both models into `out` (what an earlier demo left there is replaced); returns the page's path."""
    console = Console(highlight=False)
    console.print(f"Two models on the same photographs, {steps} steps each; only the codebook's learning rule differs.")
    twins = [_train(name, kind, out / kind, steps) for name, kind in TWINS.items()]
    errors = {twin.name: _shift_error(twin) for twin in twins}
    page = out / DEMO_FILE
    for twin in twins:
        write_page([twin], twin.folder / REPORT_FILE, twin.name, links=[(DEMO_LINK, page)])
    reports = [(f"The report of {twin.name}", twin.folder / REPORT_FILE) for twin in twins]
    write_page(twins, page, TITLE, INTRODUCTION.format(**errors), reports)
    _draw(twins).savefig(out / "demo.png", dpi=90)
    last = {twin.name: twin.validations[-1] for twin in twins}
    for label, told in {
        "validation loss": {name: f"{line['loss']:.4f}" for name, line in last.items()},
        "usage of the codes": {name: f"{line['usage']:.0%}" for name, line in last.items()},
        "error after a shift of one": {name: f"{error:.0f} gray levels" for name, error in errors.items()},
    }.items():
        console.print(f"{label + ':':29}" + ", ".join(f"{name} {value}" for name, value in told.items()))
    if steps < FEWEST:
        console.print(f"{steps} steps show that everything works. They are too few to compare the models.")
    console.print(f"The page: {page.resolve()}", soft_wrap=True)
    return page


def demo_config(kind: str, folder: Path, steps: int) -> TrainConfig:
    """Small enough for two cores and a minute, large enough a codebook for the twins to differ.

    The quantizers are as a user gets them: `KohonenVQ(dim, codebook_size, steps=steps)` and its `neighborhood="none"`.
    """
    return TrainConfig(
        data="photos",
        out=folder,
        model_options={"hidden": 64},
        codebook_size=512,
        code_dim=32,
        quantizer=kind,
        steps=steps,
        batch_size=64,
        validate_every=max(1, steps // 12),
        checkpoint_every=steps,
        log_every=max(1, min(20, steps // 10)),
        seed=0,
        device="cpu",
    )


def _train(name: str, kind: str, folder: Path, steps: int) -> Study:
    if (folder / RECORD_FILE).exists():
        shutil.rmtree(folder)
    return study(train(demo_config(kind, folder, steps)).folder, name)


def _shift_error(twin: Study) -> float:
    """Gray levels by which images change when all their tokens move by one place along both axes."""
    model, images = twin.model, twin.images_BCHW
    return pixel_error(shifted(model, images, 1), shifted(model, images, 0))


def _draw(twins: list[Study]) -> Figure:
    """Curves, codebook maps, and reconstructions with shifted tokens."""
    figure = Figure(figsize=(15, 14.2), layout="constrained")
    top, middle, bottom = figure.subfigures(3, 1, squeeze=False, height_ratios=[1, 1.35, 2.6]).flat
    validated = {label: key for label, key in CURVES.items() if key != "train_loss"}
    for axes, (label, key) in zip(top.subplots(1, len(validated)), validated.items()):
        for twin in twins:
            steps, values = zip(*twin.curve(key))
            axes.plot(steps, values, color=COLORS[twin.name], label=twin.name)
        axes.set(xlabel="step", title=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    for axes, twin in zip(middle.subplots(1, 2), twins):
        axes.imshow(codebook_map(twin.model), interpolation="nearest")
        axes.set_title(f"{twin.name}: every code decoded, at its place on the map")
        axes.axis("off")
    for panel, twin in zip(bottom.subfigures(1, 2), twins):
        images = twin.images_BCHW[:: len(twin.images_BCHW) // SHOWN][:SHOWN]
        rows: list[tuple[str, Tensor]] = [("image", images)]
        for offset in OFFSETS:
            label = "tokens as they are" if offset == 0 else f"shifted by {offset:+d}"
            rows.append((label, shifted(twin.model, images, offset)))
        for axes, (label, row) in zip(panel.subplots(len(rows), 1), rows):
            axes.imshow(film(row), interpolation="nearest")
            axes.set_ylabel(label, rotation=0, ha="right", va="center")
            axes.set(xticks=[], yticks=[])
            axes.set_frame_on(False)
        panel.suptitle(f"{twin.name}: the same images, their tokens moved on the map")
    return figure
