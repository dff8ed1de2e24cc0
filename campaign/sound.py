"""The sound files that the campaign damages: small, of every format, made by topovq itself.

images/             four kinds of image file
run/                a finished run, and `unfinished/`, the same one as a kill after step 4 of 6 leaves it
*-before/           the same two without manifests, as 0.2 wrote them
shards/, cache/     a tar file, and the index of it that is kept
prior/              a finished prior of the run, and `unfinished-prior/`, the same one after step 4 of 6
tokens.parquet, tokens.npz, tokens.tvq, map.safetensors, quantizer/
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from topovq import KohonenVQ, SelfOrganizingMap
from topovq.cli import main
from topovq.prior.fitting import fit
from topovq.prior.settings import PriorConfig
from topovq.tokenizer.training import RunResult, TrainConfig, train

STEPS, SIZE = 6, 16
KINDS = ("png", "jpg", "webp", "bmp")


def training(out: str, **changes: Any) -> TrainConfig:
    """The configuration of the runs that are attacked; paths are relative to the case's folder."""
    fields: dict[str, Any] = {
        "data": "images",
        "out": Path(out),
        "workers": 0,
        "device": "cpu",
        "compile": False,
        "image_size": SIZE,
        "model_options": {"hidden": 16, "residual_hidden": 8},
        "codebook_size": 12,
        "code_dim": 8,
        "steps": STEPS,
        "batch_size": 4,
        "validate_every": 2,
        "checkpoint_every": 2,
        "keep_checkpoints": 3,
    }
    return TrainConfig(**{**fields, **changes})


def trained(out: str, **changes: Any) -> RunResult:
    return train(training(out, **changes), quiet=True)


def prior(out: str, **changes: Any) -> RunResult:
    sizes = {"dim": 16, "layers": 1, "heads": 2, "steps": STEPS, "batch_size": 4, "validate_every": 2}
    fixed = {"out": Path(out), "device": "cpu", "compile": False, "keep_checkpoints": 3}
    return fit(PriorConfig("run", **{**sizes, **fixed, **changes}), quiet=True)


def vectors() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(60, 3)).astype(np.float32)


def picture(number: int) -> Image.Image:
    """Squares of color: smooth enough to survive a compression, and no two alike."""
    colors = np.random.default_rng(number).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((24, 24), Image.Resampling.NEAREST)


def make(folder: Path) -> None:
    """Fill the folder, which is made the current one: the index of tar files goes by their whole paths."""
    os.chdir(folder)
    os.environ["TOPOVQ_CACHE"] = str(folder / "cache")
    Path("images").mkdir()
    for number, kind in enumerate((*KINDS, *KINDS)):
        picture(number).save(f"images/{number}.{kind}")
    Path("shards").mkdir()
    with tarfile.open("shards/val.tar", "w") as tar:
        for path in sorted(Path("images").iterdir()):
            tar.addfile(_member(path.name, path.stat().st_size), io.BytesIO(path.read_bytes()))
    trained("run")
    _unfinish(Path(shutil.copytree("run", "unfinished")))
    prior("prior")
    _unfinish(Path(shutil.copytree("prior", "unfinished-prior")))
    for name in ("run", "unfinished"):
        before = Path(shutil.copytree(name, f"{name}-before"))
        for manifest in before.rglob("manifest.json"):
            manifest.unlink()
    for kind in ("parquet", "npz"):
        main(["encode", "run", "images", "-o", f"tokens.{kind}", "--workers", "0", "--device", "cpu"])
    coded = ["--compress", "prior"]
    main(["encode", "run", "images", "-o", "tokens.tvq", *coded, "--workers", "0", "--device", "cpu"])
    main(["encode", "run", "shards", "-o", "cache/tokens.npz", "--workers", "0", "--device", "cpu"])  # makes the index
    SelfOrganizingMap((3, 4), random_state=0).fit(vectors()).save("map.safetensors")
    torch.manual_seed(0)
    KohonenVQ(3, 16).save_pretrained("quantizer")


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _unfinish(run: Path) -> None:
    """Take from a finished run what was written after step 4."""
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    for name in ("config.json", "model.safetensors", "manifest.json"):
        (run / name).unlink(missing_ok=True)
    lines = (run / "record.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) < STEPS]
    (run / "record.jsonl").write_bytes(b"".join(kept))
