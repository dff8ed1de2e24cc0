"""What the training of a prior is: one dataclass of plain values, as for a tokenizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from topovq.neighborhood import Schedule
from topovq.prior.corpus import TOKENS_FILE
from topovq.prior.head import MOST_AXES
from topovq.prior.transformer import HEADS, KIND, check_heads
from topovq.storage import CONFIG, read_json
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training.checkpoint import checkpoints, step_of
from topovq.tokenizer.training.config import Configuration, check_seed
from topovq.tokenizer.training.record import RECORD_FILE, read_record

if TYPE_CHECKING:
    from topovq.tokenizer.atlas import Chart

# What identifies a prior, besides the tokens: the fields that decide its result.
IDENTITY = (
    *("source", "run", "labels", "images", "head", "smoothing", "dim", "layers", "heads"),
    *("steps", "batch_size", "learning_rate", "weight_decay", "clip", "seed", "validate_every", "precision"),
)
COUNTS = (
    *("images", "dim", "layers", "heads", "steps", "batch_size"),
    *("validate_every", "checkpoint_every", "keep_checkpoints", "log_every"),
)
NOT_IN_RECORD = ("resume", "preset")
VALIDATIONS = 10
# The small one takes a few minutes on one thread with the 256 tokens an image that a small tokenizer has.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"dim": 384, "layers": 6, "heads": 6, "steps": 10_000, "batch_size": 128, "images": 100_000},
    "small": {"dim": 96, "layers": 3, "heads": 3, "steps": 1_000, "batch_size": 16, "images": 8_192},
}
WARM_UP = 0.05  # share of the steps in which the learning rate rises,
LAST_RATE = 0.1  # ... and of the rate that is left after it has fallen along half a cosine
SMOOTHED = 0.5  # share of the steps with smoothed targets,
LAST_WIDTH = 0.3  # ... whose width falls to this: a neighbor's weight is then 1.5e-5


@dataclass
class PriorConfig(Configuration):
    """One prior. `resolve()` fills in what is left open; one that is resumed keeps what it was started with."""

    identifying = IDENTITY
    not_in_record = NOT_IN_RECORD

    source: str
    """A run, whose tokenizer then encodes its own data set; or a token file that `topovq encode` wrote."""
    run: Path | None = None
    """The run of the tokenizer that wrote the token file."""
    out: Path | None = None
    """Folder of the prior; runs/ID if not given, the id being the hash of the configuration."""
    labels: bool = False
    """Learn the classes, too: the labels of cifar10, else the folder that an image lies in (cat/1.png)."""
    images: int | None = None
    """How many crops to encode where a data set draws crops endlessly (photos); 100,000, or 8,192 if small."""
    preset: Literal["auto", "small", "full"] = "full"
    """Sizes that are not given: full, small (minutes on a CPU with 256 tokens an image), or auto (full on a GPU, else
    small). If it is not given, the command takes auto, and PriorConfig full."""

    head: str = "map"
    """map (a row of the map, then a column; of maps of up to three axes), flat (one softmax over all codes) or tied
    (flat, tied to the codes)."""
    smoothing: float = 0.0
    """Label smoothing on the map: cells that targets are spread over at first. The width falls to nothing over the
    first half of the steps. 0 for none."""
    dim: int | None = None
    """Width of the transformer; 384, or 96 if small."""
    layers: int | None = None
    """Layers of the transformer; 6, or 3 if small."""
    heads: int | None = None
    """Attention heads; 6, or 3 if small."""

    steps: int | None = None
    """Training steps; 10,000, or 1,000 if small."""
    batch_size: int | None = None
    """Images per step over all processes; 128, or 16 if small."""
    learning_rate: float = 1e-3
    """AdamW's highest learning rate: it rises over the first steps and falls along a cosine."""
    weight_decay: float = 0.05
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of the weights and of the order of the images."""

    validate_every: int | None = None
    """Steps between validations; if not given there are ten. The model that is kept is the best of them."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; if not given, at every validation and at least every 1,000 steps."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    log_every: int | None = None
    """Steps between looks at the training loss; if not given there are a hundred, at most 100 steps apart."""
    resume: bool = False
    """Continue in OUT from its newest checkpoint; starts if there is none."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on the CPU."""
    compile: bool | None = None
    """torch.compile the transformer, which takes half a minute to start. If it is not given, the command does where the
    machine has CUDA, and PriorConfig where `device` is CUDA."""

    def resolve(self, device_type: str) -> PriorConfig:
        """Check every value and fill in those left open; `device_type` is "cpu" or "cuda"."""
        check_name("preset", self.preset, ("auto", *PRESETS))
        check_name("head", self.head, HEADS)
        check_name("precision", self.precision, ("auto", "bf16", "fp32"))
        check_seed(self.seed)
        small = self.preset == "small" or (self.preset == "auto" and device_type == "cpu")
        defaults = PRESETS["small" if small else "full"] | self._started()

        def chosen(name: str, otherwise: int | None = None) -> Any:
            given = getattr(self, name)
            return given if given is not None else defaults.get(name, otherwise)

        steps = chosen("steps")
        every = chosen("validate_every", max(1, round(steps / VALIDATIONS)))
        resolved = dataclasses.replace(
            self,
            **{name: chosen(name) for name in ("images", "dim", "layers", "heads", "steps", "batch_size")},
            validate_every=every,
            checkpoint_every=chosen("checkpoint_every", min(1_000, every)),
            log_every=chosen("log_every", max(1, min(100, steps // 100))),
            precision=self.precision if self.precision != "auto" else "bf16" if device_type == "cuda" else "fp32",
            compile=self.compile if self.compile is not None else device_type == "cuda",
        )
        for name in COUNTS:
            value = getattr(resolved, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(resolved, name) < math.inf:
                raise ValueError(f"{name}={getattr(resolved, name)!r} must be a number above 0")
        for name in ("smoothing", "weight_decay"):
            if not 0 <= getattr(resolved, name) < math.inf:
                raise ValueError(f"{name}={getattr(resolved, name)!r} must be a number of at least 0")
        if 0 < resolved.smoothing < LAST_WIDTH:
            raise ValueError(f"smoothing={resolved.smoothing!r} must be 0, or at least {LAST_WIDTH} cells of the map")
        check_heads(int(resolved.dim or 0), int(resolved.heads or 0))
        if resolved.out is None:
            resolved.out = Path("runs") / resolved.run_id
        return resolved

    def _started(self) -> dict[str, Any]:
        """The first line of the record of the training that is resumed; empty where none is."""
        if not self.resume or self.out is None or not (self.out / RECORD_FILE).exists() or kind_in(self.out) != KIND:
            return {}  # another's is refused later (check_started)
        return read_record(self.out / RECORD_FILE)[0]

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on."""
        assert self.steps is not None
        rising = max(1, round(WARM_UP * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, self.steps - rising))
        return self.learning_rate * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)

    @property
    def widths(self) -> Schedule | None:
        """How the width of smoothed targets falls; None where none are smoothed."""
        assert self.steps is not None
        span = max(1, round(SMOOTHED * self.steps))
        return Schedule.exponential(self.smoothing, LAST_WIDTH, span) if self.smoothing else None


def check_maps(config: PriorConfig, maps: Sequence[Chart]) -> None:
    """Refuse maps of more axes than the head knows."""
    for each in maps:
        if config.head == "map" and each.grid.ndim > MOST_AXES:
            raise ValueError(
                f"head='map' takes maps of up to {MOST_AXES} axes, but this tokenizer's is {list(each.grid.shape)}: "
                "--head flat works (head='flat')"
            )


def check_started(config: PriorConfig) -> list[dict[str, Any]]:
    """Refuse a folder with another prior or anything else; the lines of the record of this one, if there are any."""
    folder = config.out
    assert folder is not None
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise FileExistsError(f"{there} is a file; --out names a folder for the prior")
    kind = kind_in(folder)
    if kind not in (None, KIND):
        raise ValueError(f"{folder} holds no prior, but {kind!r}; choose another --out")
    started, begun = (folder / RECORD_FILE).exists(), bool(checkpoints(folder))
    if not config.resume and (started or begun):
        raise FileExistsError(f"{folder} already holds a prior; add --resume to continue it, or choose another --out")
    if not (started or begun):
        _check_empty(folder)
    lines = read_record(folder / RECORD_FILE) if started else []
    if lines:
        config.check_same(f"the prior in {folder}", {**dict.fromkeys(config.identifying), **lines[0]})
    return lines


def kind_in(folder: Path) -> str | None:
    """What was trained or saved in a folder: KIND, or the name of a tokenizer's model; None where nothing tells."""
    if (folder / RECORD_FILE).exists():
        first = read_record(folder / RECORD_FILE)[0]
        return KIND if first.get("quantizer") == KIND else str(first.get("model", "something else"))
    for place in (folder, *reversed(checkpoints(folder))):
        if (place / CONFIG).is_file():
            return str(read_json(place / CONFIG).get("model", "something else"))
    return None


def _check_empty(folder: Path) -> None:
    """Refuse a folder with files of others. Tokens of a training that was cut off before its record may be there."""
    if others := _others(folder):
        raise FileExistsError(
            f"{folder} is there already and is no training of a prior: it holds {others}; choose a new folder (--out)"
        )


def _others(folder: Path) -> str:
    """What is in a folder beside what a training of a prior leaves before its record, in words; empty for nothing."""
    found = [path.name for path in folder.iterdir()] if folder.exists() else []
    others = sorted(name for name in found if not name.startswith(".") and name != TOKENS_FILE)
    return f"{others[0]!r}" + f" and {len(others) - 1:,} more" * (len(others) > 1) if others else ""


def unfinished(folder: str | Path) -> str | None:
    """How far a prior is whose training is not finished, in words; None where it is, where no record tells, or where
    there is no prior yet (`none_in`)."""
    folder = Path(folder)
    try:
        lines = read_record(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() else []
    except ValueError:  # damaged: the weights have a manifest of their own
        return None
    if not lines or lines[-1]["event"] == "final" or "steps" not in lines[0] or not (folder / CONFIG).is_file():
        return None
    return f"the prior in {folder} is not finished: {_done(folder, lines)}"


def _done(folder: Path, lines: list[dict[str, Any]]) -> str:
    of_all = f" of {lines[0]['steps']:,}" if "steps" in lines[0] else ""
    return f"{steps_done(folder, lines):,}{of_all} steps are done"


def steps_done(folder: Path, lines: list[dict[str, Any]]) -> int:
    """How many steps were taken, by the record's lines and the checkpoints."""
    return max([*(line["step"] for line in lines[1:]), *map(step_of, checkpoints(folder))], default=0)


def none_in(folder: Path) -> Exception:
    """The error that says why there is no prior in `folder`, which has no config.json."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return FileNotFoundError(f"there is no prior in {folder}: {there} is a file; give the folder of a prior")
    kind, record = kind_in(folder), folder / RECORD_FILE
    if kind == KIND:
        done = _done(folder, read_record(record) if record.is_file() else [{}])
        return FileNotFoundError(
            f"the prior in {folder} has no validation yet: {done}; the same `topovq prior` with --resume goes on"
        )
    if kind is not None:
        return ValueError(f"{folder} holds no prior, but {kind!r}")
    if others := _others(folder):
        return FileNotFoundError(f"there is no prior in {folder}: it holds {others}")
    return FileNotFoundError(f"there is no prior in {folder}; `topovq prior RUN --out {folder}` would train one")
