"""The model card of a run, README.md in its folder: what its record knows of the data, the figures and the training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topovq.pretrained import CARD
from topovq.storage import write_atomic
from topovq.tokenizer.models import Tokenizer

# A card without this line is somebody's own and stays.
MARK = "<!-- Written by topovq at the end of a training. Remove this line, and the next training leaves your edits. -->"
# By the name of the data set: what it is, and what is known of its license.
DATA = {
    "photos": (
        "Crops of the photographs inside scikit-image and scikit-learn",
        "Those of scikit-learn are CC BY 2.0; scikit-image's documentation names the license of each of its own.",
    ),
    "cifar10": ("CIFAR-10", "Its authors name no license and ask to cite Krizhevsky (2009)."),
    "imagenet": ("ImageNet", "Its terms of access allow non-commercial research and education."),
    "faces": ("CelebA-HQ and AFHQ", "Both are CC BY-NC 4.0: not for commercial use."),
}
TEXT = """---
library_name: topovq
tags:
- image-tokenizer
- self-organizing-map
- vector-quantization
---
{mark}

# {name}

{kind} that turns images of {size} x {size} pixels into tokens and back. {tokens}

```python
from topovq.tokenizer.models import {cls}

model = {cls}.from_pretrained("{name}")  # this folder, or where you uploaded it
tokens = model.encode(images)  # uint8 [B, {channels}, {size}, {size}]
images = model.decode(tokens)
```

## Data

{data}

## Figures

{figures}

## Training

{training}

## License

{license}
"""


def write_card(folder: Path, model: Tokenizer, record: Sequence[dict[str, Any]]) -> None:
    """Write the card of the run in `folder`, unless there is one of somebody's own."""
    path = folder / CARD
    if not path.exists() or MARK in path.read_text():
        write_atomic(path, model_card(folder.resolve().name, model, record).encode())


def model_card(name: str, model: Tokenizer, record: Sequence[dict[str, Any]]) -> str:
    """The card's text; `record` is that of a run that validated at least once."""
    config = record[0]
    known, terms = DATA.get(config.get("source_name", ""), ("", ""))
    return TEXT.format(
        mark=MARK,
        name=name,
        kind={"vqvae": "A VQ-VAE", "vqvae2": "A VQ-VAE-2"}.get(model.kind, type(model).__name__),
        cls=type(model).__name__,
        size=model.image_size,
        channels=model.channels,
        tokens=_tokens(model),
        data=_data(config, known),
        figures=_figures(record),
        training=_training(config, record),
        license=(
            "Whoever publishes the model chooses its license, in a line `license: ...` at the top of this file. "
            + (f"About the images: {terms}" if terms else "The record names no license of the images.")
        ),
    )


def _tokens(model: Tokenizer) -> str:
    levels = []
    for quantizer, shape in zip(model.quantizers, model.token_shapes):
        where = f", on a map of {' x '.join(map(str, quantizer.grid.shape))}" if quantizer.maps else ""
        levels.append(f"{' x '.join(map(str, shape))} tokens of {quantizer.codebook_size:,} codes{where}")
    return f"An image becomes {', and '.join(levels)}."


def _data(config: dict[str, Any], known: str) -> str:
    """What the source said of itself; one of somebody's own may say little."""
    # The last part of a path alone: a card is published, and where somebody keeps images is not.
    place = Path(config.get("source_path") or "").name
    what = known or f"Images of `{place or config.get('source_name', 'a source without a name')}`"
    counts = {"train_images": "to train on", "validation_images": "for validation"}
    said = [f"{config[f'source_{key}']:,} {use}" for key, use in counts.items() if config.get(f"source_{key}")]
    return f"{what}{': ' * bool(said)}{', '.join(said)}."


def _figures(record: Sequence[dict[str, Any]]) -> str:
    last = [line for line in record if line["event"] == "validation"][-1]
    rows = {
        "loss": ("validation loss", ".5f"),
        "psnr": ("PSNR in dB", ".2f"),
        "perplexity": ("perplexity of the codes", ",.1f"),
        "usage": ("codes in use", ".1%"),
    }
    known = {key: last[key] for key in rows if last.get(key) is not None}
    table = "\n".join(f"| {rows[key][0]} | {value:{rows[key][1]}} |" for key, value in known.items())
    return f"On the validation images, after {last['step']:,} steps:\n\n| figure | value |\n| --- | --- |\n{table}"


def _training(config: dict[str, Any], record: Sequence[dict[str, Any]]) -> str:
    facts = {
        "quantizer": f"{config['quantizer']}, {config['codebook_size']:,} codes of {config['code_dim']} dimensions",
        "steps": f"{config['steps']:,} of {config['batch_size']:,} images, seed {config['seed']}",
        "parameters": f"{config['parameters']:,}",
        "precision": config["precision"],
        "hardware": config["hardware"] + (f", {config['world_size']} processes" if config["world_size"] > 1 else ""),
        "time": f"{record[-1]['seconds']:,.0f} s" if "seconds" in record[-1] else None,
        "versions": ", ".join(
            f"{name} {config[key]}" for name in ("topovq", "torch") if (key := f"version_{name}") in config
        )
        or None,
        "commit": config.get("commit"),
        "run": config["id"],
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact is not None)
