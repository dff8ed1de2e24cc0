"""VQ-VAE, VQ-VAE-2 and VQGAN: from images to tokens and back."""

from __future__ import annotations

from pathlib import Path

from topovq.storage import CONFIG, read_json
from topovq.tokenizer.models.model import (
    Output,
    Tokenizer,
    Tokens,
    as_levels,
    can_be_graphed,
)
from topovq.tokenizer.models.registry import (
    QUANTIZERS,
    as_meant,
    build_quantizer,
    check_name,
    check_options,
    codes_of,
    spelled_out,
)
from topovq.tokenizer.models.vqgan import VQGAN
from topovq.tokenizer.models.vqvae import VQVAE
from topovq.tokenizer.models.vqvae2 import VQVAE2

MODELS: dict[str, type[Tokenizer]] = {cls.kind: cls for cls in (VQVAE, VQVAE2, VQGAN)}

__all__ = [
    "MODELS",
    "QUANTIZERS",
    "VQGAN",
    "VQVAE",
    "VQVAE2",
    "Output",
    "Tokenizer",
    "Tokens",
    "as_levels",
    "as_meant",
    "build_quantizer",
    "can_be_graphed",
    "check_name",
    "check_options",
    "codes_of",
    "load_pretrained",
    "outline",
    "spelled_out",
]


def load_pretrained(folder: str | Path) -> Tokenizer:
    """The model saved in a local folder, of whichever class its config.json names, in eval mode on the CPU."""
    return _class_of(Path(folder)).from_pretrained(folder)


def outline(folder: str | Path) -> Tokenizer:
    """The model in a folder without its weights: what it is, for no more than a look at the files."""
    return _class_of(Path(folder)).from_pretrained(folder, outline=True)


def _class_of(folder: Path) -> type[Tokenizer]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no model: there is no {CONFIG} in it")
    kind = read_json(path).get("model")
    if kind == "prior":
        raise ValueError(f"{folder} is a prior, not a tokenizer: `topovq sample` and `topovq complete` use it")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"{path} names the model {kind!r}; valid: {', '.join(MODELS)}")
    return MODELS[kind]
