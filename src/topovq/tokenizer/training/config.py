"""What a training run is: one dataclass of plain values, with an id that is the hash of what decides its result."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal

from topovq.neighborhood import narrowing, recommended_decay
from topovq.quantizers.kohonen import REACH, RECOMMENDED, follows_gradient, make_grid
from topovq.tokenizer.models import MODELS, Tokenizer, as_meant, check_name, check_options, spelled_out
from topovq.tokenizer.training.record import RECORD_FILE, read_record

# What identifies a run: the fields that decide its result. The others say where and how it is done and watched.
IDENTITY = (
    *("data", "data_path", "image_size"),
    *("model", "model_options", "codebook_size", "code_dim", "quantizer", "quantizer_options"),
    *("steps", "batch_size", "learning_rate", "weight_decay", "clip", "seed"),
    *("validate_every", "precision"),
)
NOT_IN_RECORD = ("resume", "tensorboard", "wandb", "preset")  # what a preset decides is in the other fields
OPEN = ("kohonen", "soft")  # quantizers whose neighborhood may be left open
LARGEST_SEED = 2**63 - 1
# Batch size and learning rate: the paper's, and those usual for the third.
DEFAULTS_OF = {"vqvae": (256, 1e-3), "vqvae2": (128, 3e-4), "vqgan": (64, 1e-4)}
COUNTS = (
    *("codebook_size", "code_dim", "steps", "batch_size"),
    *("validate_every", "checkpoint_every", "keep_checkpoints", "log_every", "trace_every"),
)
VALIDATIONS = 10  # of a run, whatever its length
OWN_SIZE = ("photos", "cifar10")  # data sets whose images are small already
SMALL_HIDDEN = {"vqvae": 64, "vqvae2": 64, "vqgan": 16}  # the last has so many at the resolution of the image
# What `preset` gives where nothing is said: the paper's model, and one that trains on a CPU in a few minutes.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"codebook_size": 512, "code_dim": 64, "steps": 30_000},
    "small": {"image_size": 64, "codebook_size": 512, "code_dim": 32, "steps": 1_000, "batch_size": 32},
}


class Configuration:
    """What configurations have in common, a dataclass each: an id, and their values as a record has them.

    identifying    names of the fields that decide the result
    not_in_record  names of those that a record leaves out
    """

    identifying: ClassVar[tuple[str, ...]]
    not_in_record: ClassVar[tuple[str, ...]]
    out: Path | None
    steps: int | None
    batch_size: int | None
    validate_every: int | None
    checkpoint_every: int | None
    keep_checkpoints: int
    log_every: int | None

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of the resolved values that identify the run."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def identity(self) -> dict[str, Any]:
        """The values of the fields that decide the result."""
        values = self.as_dict()
        return {name: values[name] for name in self.identifying}

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON-able values, as the record's first line has it."""
        values = {name: v for name, v in dataclasses.asdict(self).items() if name not in self.not_in_record}  # type: ignore[call-overload]
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}

    def check_same(self, what: str, told: Mapping[str, Any]) -> None:
        """Refuse to go on with a training that was started, as `told`, with other values; its length may differ."""
        ours = self.identity
        differing = [name for name in ours if name != "steps" and name in told and told[name] != ours[name]]
        if differing:
            before, now = (", ".join(f"{name}={each[name]!r}" for name in differing) for each in (told, ours))
            raise ValueError(f"{what} was started with {before} but is resumed with {now}")


@dataclass
class TrainConfig(Configuration):
    """One training run. The defaults are the paper's; `resolve()` fills in what is left open.

    A run that is resumed keeps what it was started with, where that is left open.
    """

    identifying = IDENTITY
    not_in_record = NOT_IN_RECORD

    data: str = "photos"
    """Data set by name (see `topovq data`), or the path of a folder of images or of tar shards."""
    data_path: Path | None = None
    """Where the data set named by DATA lies, if not at its usual place."""
    out: Path | None = None
    """Folder of the run; runs/ID if not given, the id being the hash of the configuration."""
    preset: Literal["auto", "small", "full"] = "full"
    """Sizes that are not given: full (the paper's), small (minutes on a CPU), or auto (full on a GPU, else small)."""
    image_size: int | None = None
    """Side of the square images; if not given, the data set's own, or with the small preset at most 64."""
    workers: int | None = None
    """Processes that decode images; the data set's own default if not given."""

    model: str = "vqvae"
    """vqvae (one level of tokens), vqvae2 (two or more) or vqgan (one level; deeper, with attention)."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the model, such as hidden=64 stride=8."""
    codebook_size: int | None = None
    """K, the number of codes of each level; 512 if not given."""
    code_dim: int | None = None
    """Dimensions of a code; 64 if not given, 32 with the small preset."""
    quantizer: str = "kohonen"
    """kohonen (KSOM), ema (EMA-VQ), gradient (VQ), som-vae, soft (differentiable KSOM) or residual."""
    quantizer_options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the quantizer, such as neighborhood=gaussian tau=0.01."""

    steps: int | None = None
    """Training steps; 30,000 if not given, 1,000 with the small preset."""
    batch_size: int | None = None
    """Images per step over all processes; if not given, 256 for vqvae, 128 for vqvae2, 64 for vqgan, and 32 with the
    small preset."""
    learning_rate: float | None = None
    """AdamW's learning rate; 1e-3 for vqvae, 3e-4 for vqvae2, 1e-4 for vqgan if not given."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of the weights and of the order of the images."""

    validate_every: int | None = None
    """Steps between validations; if not given there are ten. The last step is always validated."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; if not given, at every validation and at least every 1,000 steps. The last step
    always has one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    log_every: int | None = None
    """Steps between looks at the training loss (each one reads numbers back from the device); if not given there are a
    hundred, at most 100 steps apart."""
    trace_every: int | None = None
    """Steps between batches whose loss and perplexity the record keeps; none if not given."""
    resume: bool = False
    """Continue the run in OUT from its newest checkpoint; starts it if there is none."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on the CPU."""
    compile: bool | None = None
    """torch.compile the model; if not given, on CUDA only (it takes half a minute to start)."""
    snapshots: int = 0
    """How many small pictures of the map to keep on the way, for `topovq explore RUN --follow` and `topovq film`."""
    tensorboard: bool = False
    """Also write TensorBoard files into OUT."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""

    def resolve(self, device_type: str) -> TrainConfig:
        """Check every value and fill in those left open; `device_type` is "cpu" or "cuda"."""
        check_name("model", self.model, MODELS)
        self._check_model_options()
        check_options(self.quantizer, self.quantizer_options)
        check_seed(self.seed)
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        started = self._started()
        resolved = dataclasses.replace(
            self,
            **self._left_open(started, device_type),
            precision=self.precision if self.precision != "auto" else "bf16" if device_type == "cuda" else "fp32",
            compile=self.compile if self.compile is not None else device_type == "cuda",
        )
        for name in ("learning_rate", "clip"):
            if not getattr(resolved, name) > 0:
                raise ValueError(f"{name}={getattr(resolved, name)!r} must be above 0")
        if not isinstance(resolved.snapshots, int) or resolved.snapshots < 0:
            raise ValueError(f"snapshots={resolved.snapshots!r} must be a whole number, 0 for none")
        if resolved.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision={resolved.precision!r} is unknown; use auto, bf16 or fp32")
        resolved.quantizer_options = resolved._scheduled_options(told_options(started) if started else None)
        if resolved.out is None:
            resolved.out = Path("runs") / resolved.run_id
        return resolved

    def is_small(self, device_type: str) -> bool:
        """Whether what is left open is that of the small preset."""
        check_name("preset", self.preset, ("auto", *PRESETS))
        return self.preset == "small" or (self.preset == "auto" and device_type == "cpu")

    def _started(self) -> dict[str, Any]:
        """The first line of the record of the run that is resumed; empty where none is."""
        if not self.resume or self.out is None or not (self.out / RECORD_FILE).exists():
            return {}
        return read_record(self.out / RECORD_FILE)[0]

    def _left_open(self, started: Mapping[str, Any], device_type: str) -> dict[str, Any]:
        """Values of the fields that nobody has set: those the run was started with, else the preset's."""
        batch_size, learning_rate = DEFAULTS_OF[self.model]
        defaults: dict[str, Any] = {"batch_size": batch_size, "learning_rate": learning_rate, "model_options": {}}
        small = self.is_small(device_type)
        defaults |= PRESETS["small" if small else "full"]
        if small:
            defaults["model_options"] = {"hidden": SMALL_HIDDEN[self.model]}
        if self.data in OWN_SIZE:
            defaults["image_size"] = None
        defaults |= started

        def chosen(name: str, otherwise: int | None = None) -> Any:
            given = getattr(self, name)
            return given if given is not None else defaults.get(name, otherwise)

        steps = chosen("steps")
        every = chosen("validate_every", max(1, round(steps / VALIDATIONS)))
        names = ("image_size", "codebook_size", "code_dim", "steps", "batch_size", "learning_rate")
        return {
            **{name: chosen(name) for name in names},
            "model_options": {**defaults["model_options"], **self.model_options},
            "validate_every": every,
            "checkpoint_every": chosen("checkpoint_every", min(1_000, every)),
            "log_every": chosen("log_every", max(1, min(100, steps // 100))),
        }

    def _scheduled_options(self, started: dict[str, Any] | None) -> dict[str, Any]:
        """The quantizer's options with the recommended neighborhood spelled out, where it is left open.

        So the record says what was run, and a change of what is recommended is another run. A run that is resumed keeps
        the schedule it was started with: more steps are trained at its last width.
        """
        options = self.quantizer_options
        if started is not None and "neighbor_reduction" in started:
            options = {"neighbor_reduction": started["neighbor_reduction"], **options}
        kind = options.get("quantizer", "kohonen") if self.quantizer == "residual" else self.quantizer
        given = [name for name in REACH if options.get(name) is not None]
        if options.get("neighborhood") in RECOMMENDED:
            given = ["steps"] if {*given} <= {"steps", "neighborhood"} else given
        if kind not in OPEN or follows_gradient(options) or (given and given != ["steps"]):
            return spelled_out(self.quantizer, options)
        kept = {name: value for name, value in options.items() if name != "steps"}
        if not given and started is not None:
            names = (*REACH, "decay", "update_empty")
            return {**{name: started[name] for name in names if name in started}, **kept}
        steps = options.get("steps", self.steps)
        decay = recommended_decay(steps)
        if options.get("neighborhood", "narrowing" if kind == "soft" else "ride") == "ride":
            return {"decay": decay, **kept, "neighborhood": "ride"}
        lower = {"decay": decay} if decay != recommended_decay(None) and "decay" not in kept else {}
        topology, wrap = options.get("topology", "rectangular"), options.get("wrap", False)
        assert self.codebook_size is not None
        grid = make_grid(self.codebook_size, options.get("grid"), topology, wrap)
        neighborhood, schedule, _ = narrowing(grid, steps)
        named = {"neighborhood": neighborhood, "schedule": schedule.to_dict()}
        return {"update_empty": False, **kept, **lower, **named}

    def _check_model_options(self) -> None:
        known = [name for name in inspect.signature(MODELS[self.model]).parameters if not hasattr(self, name)]
        for name in self.model_options:
            if hasattr(self, name):
                raise ValueError(
                    f"model option {name!r} has an option of its own: give {name}={self.model_options[name]!r}"
                )
            check_name(f"option of model {self.model!r}:", name, [n for n in known if n not in ("mean", "std")])

    def build_model(self, image_size: int, mean: Sequence[float], std: Sequence[float]) -> Tokenizer:
        """The model of this (resolved) configuration for a data set's image size and pixel statistics."""
        assert self.codebook_size is not None, "resolve() the configuration first"
        assert self.code_dim is not None
        return MODELS[self.model](
            image_size=image_size,
            codebook_size=self.codebook_size,
            code_dim=self.code_dim,
            quantizer=self.quantizer,
            quantizer_options=self.quantizer_options,
            mean=list(map(float, mean)),
            std=list(map(float, std)),
            **self.model_options,
        )  # type: ignore[call-arg]


def check_seed(seed: object) -> None:
    """Refuse what is no seed of everything that a seed is used for."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) <= LARGEST_SEED:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1, which is {LARGEST_SEED:,}")


def told_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantizer's options that a record's first line tells of, as they were meant when it was written."""
    default = TrainConfig.__dataclass_fields__["quantizer"].default
    return as_meant(config.get("quantizer", default), config.get("quantizer_options", {}))
