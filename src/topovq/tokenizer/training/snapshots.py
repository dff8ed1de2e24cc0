"""Snapshots: how a run's maps looked on the way. `snapshots/step-00000120.npz` and so on, small files.

Each holds, for map m of the model, `codes_m` float16 [K, D] and `tiles_m` uint8 [K, C, s, s] (every code decoded), and
`strip` uint8 [C, 2 H, n W]: a few validation images above what the model makes of them. `maps` is JSON: the name and
the grid of each map.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from topovq.storage import remove_leftovers, write_atomic
from topovq.tokenizer.atlas import charts, tiles
from topovq.tokenizer.models import Tokenizer

LARGEST_TILE = 16  # pixels a side that a code is kept with
LARGEST_IMAGE = 96  # and an image of the strip
STRIP = 4  # images of the strip

Snapshot = dict[str, np.ndarray]


class Snapshots:
    """Keeps `number` snapshots of a training of `steps` steps, close together at first, where most happens."""

    def __init__(self, run: Path, number: int, steps: int) -> None:
        self.folder = run / "snapshots"
        self.due = {round(steps * (i / number) ** 2) for i in range(number + 1)} if number else set()

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: the run goes on from there."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)
        for path in snapshots(self.folder.parent):
            if step_of_snapshot(path) > step:
                path.unlink()

    def keep(self, step: int, model: Tokenizer, images_BCHW: Tensor) -> None:
        self.folder.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **take(model, images_BCHW))  # type: ignore[arg-type]
        write_atomic(self.folder / f"step-{step:08d}.npz", buffer.getvalue())


def snapshots(run: Path) -> list[Path]:
    """The run's snapshots, oldest first."""
    return sorted((run / "snapshots").glob("step-*.npz"), key=step_of_snapshot)


def step_of_snapshot(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def read_snapshot(path: Path) -> Snapshot:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def take(model: Tokenizer, images_BCHW: Tensor) -> Snapshot:
    """A snapshot of `model`; the strip shows the first of these images, uint8."""
    maps, found = charts(model), {}
    for number, chart in enumerate(maps):
        found[f"codes_{number}"] = chart.codes_KD.half().cpu().numpy()
        found[f"tiles_{number}"] = _at_most(tiles(model, maps, number), LARGEST_TILE).numpy()
    rows = [_at_most(images, LARGEST_IMAGE) for images in originals_and_decoded(model, images_BCHW[:STRIP])]
    named = json.dumps([{"name": chart.name, "grid": chart.grid.to_dict()} for chart in maps])
    return found | {"strip": in_rows(rows).numpy(), "maps": np.array(named)}


def originals_and_decoded(model: Tokenizer, images_BCHW: Tensor) -> list[Tensor]:
    return [images_BCHW.cpu(), model.decode(model.encode(images_BCHW)).cpu()]


def in_rows(rows: list[Tensor]) -> Tensor:
    """Images [B, C, H, W] a row -> one picture [C, H rows, W B]."""
    return torch.cat([torch.cat(list(images), -1) for images in rows], -2)


def _at_most(images_BCHW: Tensor, side: int) -> Tensor:
    """Images uint8 scaled down to `side` pixels where they are larger."""
    if images_BCHW.shape[-1] <= side:
        return images_BCHW
    return interpolate(images_BCHW.float(), side, mode="area").round().to(torch.uint8)
