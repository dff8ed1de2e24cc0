"""`topovq demo`: a Kohonen-VAE and its EMA-VQ twin, trained alike, and a page that shows what the map is good for."""

from __future__ import annotations

import base64
import html
import io
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from topovq.storage import write_atomic
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import TrainConfig, load_run, open_data, read_record, train
from topovq.tokenizer.training.record import RECORD_FILE
from topovq.view.pictures import COLORS, codebook_map, film, pixel_error, shifted
from topovq.view.report import REPORT_FILE, write_report

TWINS = {"KSOM": "kohonen", "EMA-VQ": "ema"}
OFFSETS = range(-3, 4)
SHOWN = 6  # images in the figure


@dataclass(frozen=True)
class Twin:
    """One of the two models with what the page says of it."""

    name: str
    model: Tokenizer
    validations: list[dict[str, Any]]
    shift_errors: dict[int, float]

    @property
    def last(self) -> dict[str, Any]:
        return self.validations[-1]


def demo(out: Path, steps: int = 600) -> Path:
    """Train both models into `out` (what an earlier demo left there is replaced); returns the page's path."""
    console = Console(highlight=False)
    console.print(f"Two models on the same photographs, {steps} steps each; only the codebook's learning rule differs.")
    with open_data("photos") as source:
        images = torch.cat(list(source.validation(256)))
        twins = [_train(name, kind, out / kind, steps, images) for name, kind in TWINS.items()]
    page = out / "index.html"
    figure = _draw(twins, images[:: len(images) // SHOWN][:SHOWN])
    write_atomic(out / "demo.png", figure)
    write_atomic(page, _page(twins, figure).encode())
    for line in _numbers(twins):
        console.print(line)
    console.print(f"The page: {page.resolve()}", soft_wrap=True)
    return page


def _train(name: str, kind: str, folder: Path, steps: int, images: Tensor) -> Twin:
    if (folder / RECORD_FILE).exists():
        shutil.rmtree(folder)
    result = train(demo_config(kind, folder, steps))
    write_report([folder], folder / REPORT_FILE)
    model = load_run(result.folder)
    validations = [line for line in read_record(folder / RECORD_FILE) if line["event"] == "validation"]
    plain = model.decode(model.encode(images))
    errors = {offset: pixel_error(shifted(model, images, (offset, offset)), plain) for offset in OFFSETS}
    return Twin(name, model, validations, errors)


def demo_config(kind: str, folder: Path, steps: int) -> TrainConfig:
    """Small enough for two cores and a minute, large enough a codebook for the twins to differ."""
    options: dict[str, Any] = {}
    if kind == "kohonen":
        width = {"kind": "exponential", "start": 10.0, "end": 0.5, "steps": max(1, steps * 2 // 3)}
        options = {"neighborhood": "gaussian", "schedule": width}
    return TrainConfig(
        data="photos",
        out=folder,
        model_options={"hidden": 64},
        codebook_size=1024,
        code_dim=32,
        quantizer=kind,
        quantizer_options=options,
        steps=steps,
        batch_size=64,
        validate_every=max(1, steps // 12),
        checkpoint_every=steps,
        log_every=max(1, min(20, steps // 10)),
        seed=0,
        device="cpu",
    )


def _numbers(twins: list[Twin]) -> list[str]:
    """The three numbers that matter, each for both models."""

    def both(values: Iterable[str]) -> str:
        return ", ".join(f"{twin.name} {value}" for twin, value in zip(twins, values))

    return [
        "validation loss:             " + both(f"{t.last['loss']:.4f}" for t in twins),
        "codes in use:                " + both(f"{t.last['usage']:.0%}" for t in twins),
        "error after a shift of one:  " + both(f"{t.shift_errors[1]:.0f} gray levels" for t in twins),
    ]


def _draw(twins: list[Twin], images: Tensor) -> bytes:
    """The figure as PNG bytes: curves, codebook maps, and reconstructions with shifted tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 16), layout="constrained")
    panels: Any = figure.subfigures(3, 1, height_ratios=[1, 1.9, 2.6])
    top, middle, bottom = panels
    for axes, (label, key) in zip(
        top.subplots(1, 3), {"validation loss": "loss", "perplexity": "perplexity", "codes in use": "usage"}.items()
    ):
        for twin in twins:
            steps = [line["step"] for line in twin.validations]
            axes.plot(steps, [line[key] for line in twin.validations], color=COLORS[twin.name], label=twin.name)
        axes.set(xlabel="step", title=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    for axes, twin in zip(middle.subplots(1, 2), twins):
        axes.imshow(codebook_map(twin.model), interpolation="nearest")
        axes.set_title(f"{twin.name}: every code decoded, at its place on the map")
        axes.axis("off")
    for panel, twin in zip(bottom.subfigures(1, 2), twins):
        rows: list[tuple[str, Tensor]] = [("image", images)]
        for offset in OFFSETS:
            label = "tokens as they are" if offset == 0 else f"shifted by {offset:+d}"
            rows.append((label, shifted(twin.model, images, (offset, offset))))
        for axes, (label, row) in zip(panel.subplots(len(rows), 1), rows):
            axes.imshow(film(row), interpolation="nearest")
            axes.set_ylabel(label, rotation=0, ha="right", va="center")
            axes.set(xticks=[], yticks=[])
            axes.set_frame_on(False)
        panel.suptitle(f"{twin.name}: the same images, their tokens moved on the map")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90, format="png")
    return buffer.getvalue()


def _page(twins: list[Twin], figure: bytes) -> str:
    """One HTML file with the figure inside."""
    numbers = "\n".join(map(html.escape, _numbers(twins)))
    data = base64.b64encode(figure).decode()
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>A codebook with a map</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ width: 100%; height: auto; }}
pre {{ background: #f4f4f2; padding: 1rem; overflow-x: auto; }}
</style>
<h1>A codebook with a map</h1>
<p>Two VQ-VAEs, the same in everything but the rule by which their codes learn. In the Kohonen-VAE (KSOM) a code that
wins pulls its neighbors on a map along; in EMA-VQ it does not.</p>
<pre>{numbers}</pre>
<p>Below: how both learned; each code decoded, laid out on the map; and held-out photographs whose tokens were all moved
by some places on the map before decoding. Where neighbors on the map mean similar things, an image changes gently;
where they do not, it turns to noise.</p>
<img alt="Learning curves, codebook maps and reconstructions from shifted tokens" src="data:image/png;base64,{data}">
</html>
"""
