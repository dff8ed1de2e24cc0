"""The film of a training: the map of each snapshot, in order. `topovq film RUN -o film.webp`.

Frames are the snapshots that `topovq train --snapshots N` keeps; of a run without any, its checkpoints.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from topovq.grid import Grid
from topovq.storage import write_atomic
from topovq.tokenizer.atlas import draw, enlarge
from topovq.tokenizer.models import load_pretrained
from topovq.tokenizer.training.checkpoint import checkpoints, step_of
from topovq.tokenizer.training.record import RECORD_FILE, read_record
from topovq.tokenizer.training.snapshots import STRIP, Snapshot, read_snapshot, snapshots, step_of_snapshot, take
from topovq.view.report.study import validation_images

FORMATS = (".webp", ".gif")
SECONDS = 8  # that the film takes
LAST_FRAME_MS = 2_000  # more that its last frame stays
MOST_FRAMES = 60
WIDTH = 480  # pixels
BAR = 28  # pixels below the pictures, for the step
INK, PAPER, ACCENT = "#e9ecee", "#14171a", "#6fd6b0"


@dataclass(frozen=True)
class FilmMap:
    """One map in one frame: codes_KD float16, tiles_KCss uint8, each code decoded."""

    name: str
    grid: Grid
    codes_KD: np.ndarray
    tiles_KCss: np.ndarray


@dataclass(frozen=True)
class Frame:
    """The maps at one step; strip_HWC uint8: images above what the model made of them."""

    maps: list[FilmMap]
    strip_HWC: np.ndarray


class Film:
    """The frames of the run in a folder, which may be in training."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        if not self.run.is_dir():
            raise FileNotFoundError(f"there is no run at {run}; `topovq train --out {run}` would make one")
        self._seen: dict[int, Snapshot] = {}  # of checkpoints, which go: what was seen of them stays

    def steps(self) -> list[int]:
        """The steps of which there is a frame now."""
        kept = [step_of_snapshot(path) for path in snapshots(self.run)]
        return kept or sorted({*map(step_of, checkpoints(self.run)), *self._seen})

    def frame(self, step: int) -> Frame:
        """The maps at one of `steps`; LookupError at others."""
        snapshot = self._snapshot(step)
        named = json.loads(str(snapshot["maps"]))
        maps = [
            FilmMap(each["name"], Grid.from_dict(each["grid"]), snapshot[f"codes_{m}"], snapshot[f"tiles_{m}"])
            for m, each in enumerate(named)
        ]
        return Frame(maps, snapshot["strip"].transpose(1, 2, 0))

    def _snapshot(self, step: int) -> Snapshot:
        kept = {step_of_snapshot(path): path for path in snapshots(self.run)}
        if step in kept:
            return read_snapshot(kept[step])
        if step not in self._seen:
            found = {step_of(path): path for path in checkpoints(self.run)}
            if kept or step not in found:
                raise LookupError(f"there is no frame of step {step}")
            model, config = load_pretrained(found[step]), self.record[0] if self.record else None
            if len(self._seen) >= MOST_FRAMES:
                del self._seen[min(self._seen)]
            self._seen[step] = take(model, validation_images(model, config, STRIP)[0])
        return self._seen[step]

    @property
    def record(self) -> list[dict[str, Any]]:
        path = self.run / RECORD_FILE
        return read_record(path) if path.exists() else []


def write_film(run: str | Path, out: str | Path, *, which: int = 0) -> Path:
    """Write the film of a run's map `which` as an animation, .webp or .gif."""
    out = Path(out)
    if out.suffix not in FORMATS:
        raise ValueError(f"{str(out)!r} must end in {' or '.join(FORMATS)}")
    write_atomic(out, animation(Film(run), out.suffix[1:].upper(), which))
    return out


def animation(film: Film, kind: str, which: int) -> bytes:
    """The film as a file of `kind`, WEBP or GIF: at most `MOST_FRAMES` frames, the last of which stays for a while."""
    steps = film.steps()
    if len(steps) < 2:
        raise ValueError(
            f"{film.run} has {len(steps)} {'snapshot' if len(steps) == 1 else 'snapshots'}, and a film needs two; "
            "train with --snapshots 60, for example"
        )
    shown = [steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), MOST_FRAMES)).round().astype(int)]
    pictures = [_picture(film.frame(step), which, step, steps[-1]) for step in shown]
    pause = round(1000 * SECONDS / len(shown))
    options: dict[str, Any] = {"quality": 50, "method": 4} if kind == "WEBP" else {"optimize": True}
    buffer = io.BytesIO()
    pictures[0].save(
        buffer,
        format=kind,
        save_all=True,
        append_images=pictures[1:],
        duration=[pause] * (len(pictures) - 1) + [pause + LAST_FRAME_MS],
        loop=0,
        **options,
    )
    return buffer.getvalue()


def _picture(frame: Frame, which: int, step: int, last: int) -> Image.Image:
    """The map above the strip above the step, `WIDTH` pixels wide."""
    if not 0 <= which < len(frame.maps):
        raise ValueError(f"the run has no map {which}; it has {len(frame.maps)}, counted from 0")
    shown = frame.maps[which]
    cells = draw(enlarge(shown.tiles_KCss, 24 if shown.grid.topology == "hexagonal" else 1), shown.grid)
    parts = [Image.fromarray(cells), Image.fromarray(np.broadcast_to(frame.strip_HWC, (*frame.strip_HWC.shape[:2], 3)))]
    scaled = [_wide(part) for part in parts]
    page = Image.new("RGB", (WIDTH, sum(part.height for part in scaled) + 8 + BAR), PAPER)
    page.paste(scaled[0], (0, 0), scaled[0] if scaled[0].mode == "RGBA" else None)
    page.paste(scaled[1], (0, scaled[0].height + 8))
    pen, below = ImageDraw.Draw(page), page.height - BAR
    pen.rectangle((0, below, WIDTH * step / max(last, 1), below + 2), fill=ACCENT)
    pen.text((6, below + 6), f"step {step:,}", fill=INK, font=ImageFont.load_default(15))
    return page


def _wide(image: Image.Image) -> Image.Image:
    """Pixels stay squares where it grows."""
    how = Image.Resampling.NEAREST if image.width < WIDTH else Image.Resampling.LANCZOS
    return image.resize((WIDTH, round(image.height * WIDTH / image.width)), how)
