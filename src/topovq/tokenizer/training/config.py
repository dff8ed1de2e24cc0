"""What a training run is: one dataclass of plain values, with an id that is the hash of what decides its result."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from topovq.neighborhood import recommended, recommended_decay
from topovq.quantizers.kohonen import REACH, make_grid
from topovq.tokenizer.models import MODELS, Tokenizer, as_meant, check_name, check_options, spelled_out
from topovq.tokenizer.training.record import RECORD_FILE, read_record

# What identifies a run: the fields that decide its result. The others say where and how it is done and watched.
IDENTITY = (
    *("data", "data_path", "image_size"),
    *("model", "model_options", "codebook_size", "code_dim", "quantizer", "quantizer_options"),
    *("steps", "batch_size", "learning_rate", "weight_decay", "clip", "seed"),
    *("validate_every", "precision"),
)
NOT_IN_RECORD = ("resume", "tensorboard", "wandb")
SCHEDULED = ("kohonen", "soft")  # quantizers whose recommended neighborhood shrinks with the training
DEFAULTS_OF = {"vqvae": (256, 1e-3), "vqvae2": (128, 3e-4)}  # batch size and learning rate of the paper's models


@dataclass
class TrainConfig:
    """One training run. The defaults are the paper's; `resolve()` fills in what is left open."""

    data: str = "photos"
    """Data set by name (see `topovq data`), or the path of a folder of images or of tar shards."""
    data_path: Path | None = None
    """Where the data set named by DATA lies, if not at its usual place."""
    out: Path | None = None
    """Folder of the run; runs/ID if not given, the id being the hash of the configuration."""
    image_size: int | None = None
    """Side of the square images; the data set's own if not given."""
    workers: int | None = None
    """Processes that decode images; the data set's own default if not given."""

    model: str = "vqvae"
    """vqvae (one level of tokens) or vqvae2 (two or more)."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the model, such as hidden=64 stride=8."""
    codebook_size: int = 512
    """K, the number of codes of each level."""
    code_dim: int = 64
    """Dimensions of a code."""
    quantizer: str = "kohonen"
    """kohonen (KSOM), ema (EMA-VQ), gradient (VQ), som-vae, soft (differentiable KSOM) or residual."""
    quantizer_options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the quantizer, such as neighborhood=gaussian tau=0.01."""

    steps: int = 30_000
    """Training steps."""
    batch_size: int | None = None
    """Images per step over all processes; 256 for vqvae and 128 for vqvae2 if not given."""
    learning_rate: float | None = None
    """AdamW's learning rate; 1e-3 for vqvae and 3e-4 for vqvae2 if not given."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of the weights and of the order of the images."""

    validate_every: int = 1_000
    """Steps between validations; the last step is always validated."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    log_every: int = 100
    """Steps between looks at the training loss (each one reads numbers back from the device)."""
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
        batch_size, learning_rate = DEFAULTS_OF[self.model]
        resolved = dataclasses.replace(
            self,
            batch_size=self.batch_size if self.batch_size is not None else batch_size,
            learning_rate=self.learning_rate if self.learning_rate is not None else learning_rate,
            precision=self.precision if self.precision != "auto" else "bf16" if device_type == "cuda" else "fp32",
            compile=self.compile if self.compile is not None else device_type == "cuda",
        )
        counts = ("codebook_size", "code_dim", "steps", "batch_size", "validate_every", "checkpoint_every")
        for name in (*counts, "keep_checkpoints", "log_every"):
            value = getattr(resolved, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("learning_rate", "clip"):
            if not getattr(resolved, name) > 0:
                raise ValueError(f"{name}={getattr(resolved, name)!r} must be above 0")
        if not isinstance(resolved.snapshots, int) or resolved.snapshots < 0:
            raise ValueError(f"snapshots={resolved.snapshots!r} must be a whole number, 0 for none")
        if resolved.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision={resolved.precision!r} is unknown; use auto, bf16 or fp32")
        resolved.quantizer_options = resolved._scheduled_options(resolved._started_options())
        if resolved.out is None:
            resolved.out = Path("runs") / resolved.run_id
        return resolved

    def _started_options(self) -> dict[str, Any] | None:
        """The quantizer's options of the run that is resumed; None where none is."""
        if not self.resume or self.out is None or not (self.out / RECORD_FILE).exists():
            return None
        return told_options(read_record(self.out / RECORD_FILE)[0])

    def _scheduled_options(self, started: dict[str, Any] | None) -> dict[str, Any]:
        """The quantizer's options with the recommended neighborhood spelled out, where it is left open.

        So the record says what was run, and a change of what is recommended is another run. A run that is resumed keeps
        the schedule it was started with: more steps are trained at its last width.
        """
        options = self.quantizer_options
        if started is not None and "neighbor_reduction" in started:
            options = {"neighbor_reduction": started["neighbor_reduction"], **options}
        options = spelled_out(self.quantizer, options)
        kind = options.get("quantizer", "kohonen") if self.quantizer == "residual" else self.quantizer
        given = [name for name in REACH if options.get(name) is not None]
        if kind not in SCHEDULED or options.get("learnable_codebook") or (given and given != ["steps"]):
            return options
        kept = {name: value for name, value in options.items() if name != "steps"}
        if not given and started is not None:
            names = (*REACH, "decay", "update_empty")
            return {**{name: started[name] for name in names if name in started}, **kept}
        topology, wrap = options.get("topology", "rectangular"), options.get("wrap", False)
        grid = make_grid(self.codebook_size, options.get("grid"), topology, wrap)
        steps = options.get("steps", self.steps)
        neighborhood, schedule, _ = recommended(grid, steps)
        decay = recommended_decay(steps)
        lower = {"decay": decay} if decay != recommended_decay(None) and "decay" not in kept else {}
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

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of the resolved values of the fields in IDENTITY."""
        values = self.as_dict()
        identity = {name: values[name] for name in IDENTITY}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON-able values, as the record's first line has it."""
        values = {name: v for name, v in dataclasses.asdict(self).items() if name not in NOT_IN_RECORD}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}

    def build_model(self, image_size: int, mean: Sequence[float], std: Sequence[float]) -> Tokenizer:
        """The model of this configuration for a data set's image size and pixel statistics."""
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


def told_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantizer's options that a record's first line tells of, as they were meant when it was written."""
    default = TrainConfig.__dataclass_fields__["quantizer"].default
    return as_meant(config.get("quantizer", default), config.get("quantizer_options", {}))
