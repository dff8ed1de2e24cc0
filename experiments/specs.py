"""What is to be run for each table, as data: a table is a list of cells, and a cell and a seed are one training run.

The paper's tables are the rows of paper/targets.csv. Beside them stand rows of ours: `exponential` (the formula of the
authors' code) after each `gaussian` (the paper's formula) of `main` and `ablation`, both in `robustness`, and with
plain blocks the variants of the SOM-VAE in `gradient`. `scale` is a study of our own: methods over codebook sizes.

The model has the residual blocks of the authors' code (`paper`) or ours (`plain`). Runs of both are never in one table.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tyro.conf import arg

from experiments.peers import PEERS
from topovq.grid import Grid
from topovq.neighborhood import Schedule
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig

# The paper's numbers (targets.csv): losses in 1e-3, steps in thousands, mean and std over seeds.
KEYS = ("table", "dataset", "method", "neighborhood", "grid_dim", "tau", "count_init", "update_empty")
MEASURES = ("loss", "steps10", "steps20")
COLUMNS = ("loss_mean", "loss_std", "steps10_mean_k", "steps10_std_k", "steps20_mean_k", "steps20_std_k")
# How many images the paper trains on: of CIFAR-10 by its authors' split, of the others as it rounds them.
IMAGES = {"cifar10": 40_053, "imagenet": 1_300_000, "faces": 43_000}
ROUNDING = 0.1  # by how much a number of images may differ and be the paper's nevertheless

TABLES = ("sensitivity", "main", "robustness", "ablation", "gradient")
SCALE = "scale"
CLIENTS = "clients"
PRIOR = "prior"
Blocks = Literal["paper", "plain"]
# The residual blocks of a model, as its options: the authors' (the skip adds relu(x), no biases), and ours.
BLOCKS: dict[Blocks, dict[str, str]] = {"paper": {"residual": "activated"}, "plain": {}}
SEEDS: dict[Blocks, int] = {"paper": 10, "plain": 5}
FEWER_SEEDS: dict[Blocks, int] = {"paper": 5, "plain": 3}  # of the tables with many cells
PAPER_STEPS = 30_000
QUICK: Literal["photos"] = "photos"  # the data set of the quick versions
Dataset = Literal["cifar10", "imagenet", "faces", "photos"]
Format = Literal["terminal", "markdown", "csv", "latex"]

SIZES = {"hidden": 128, "residual_layers": 2, "residual_hidden": 32}


@cache
def targets() -> dict[tuple[str, ...], dict[str, str]]:
    """Each row's key (`KEYS`) -> its `COLUMNS` and `seeds`, as the paper prints them; empty where it has no number."""
    rows = csv.DictReader((Path(__file__).parent / "paper" / "targets.csv").read_text().splitlines())
    return {tuple(row[key] for key in KEYS): {name: row[name] for name in (*COLUMNS, "seeds")} for row in rows}


def other_data(dataset: str, images: int) -> bool:
    """Whether so many training images are not those of the paper; no data set of ours alone is."""
    paper = IMAGES.get(dataset)
    return paper is not None and abs(images - paper) > ROUNDING * paper


@dataclass(frozen=True)
class Options:
    """How a table or figure is made; every field is an option of `python -m experiments`."""

    dataset: Dataset = "cifar10"
    """Which of the paper's data sets; imagenet and faces need --data-path to be run (not to be drawn). photos
    is that of --quick."""
    seeds: int | None = None
    """Runs of each cell; if not given 10, in ablation and gradient 5 (with plain blocks 5 and 3), in scale 3, quick 2.
    Scale has one of quantizers of others and beyond 16,384 codes. Pictures are of one, measures too if not given."""
    steps: int | None = None
    """Training steps of each run; the paper's 30,000 if not given, with --quick 400."""
    batch_size: int | None = None
    """Images a step; the paper's if not given (256 for cifar10, else 128), with --quick 64."""
    blocks: Blocks | None = None
    """Residual blocks of the model: paper (the authors') or plain (ours). If not given: paper; with --render-only
    plain where no whole table of paper is there (with --partial, where more of plain is). Plain in scale and quick."""
    codebooks: Annotated[tuple[int, ...] | None, arg(metavar="K [K ...]")] = None
    """Only these sizes of the codebook (in scale)."""
    jobs: int | None = None
    """Runs at a time; chosen for the machine if not given."""
    data_path: Path | None = None
    """Where the data set lies, if not at its usual place."""
    runs: Path = Path("runs")
    """Folder of the runs, each in a folder named by its id."""
    records: tuple[Path, ...] = field(default_factory=lambda: tuple(filter(Path.is_dir, [Path("records")])))
    """Folders with records of finished runs, which are not repeated; records/ where there is one. --records with
    nothing after it has every run done here."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("reproduced")
    """Folder for the tables (CSV, markdown) and figures (PNG, SVG)."""
    render_only: bool = False
    """Run nothing: draw from what is there, and refuse where runs are missing."""
    partial: bool = False
    """Draw a table from some of its runs; its caption says which are missing."""
    format: Format = "terminal"
    """How the table is printed."""

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "batch_size", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        check_name("format", self.format, get_args(Format))
        check_name("data set of the tables", self.dataset, SETTINGS)
        for folder in self.records:
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no folder of records at {folder}")

    def seeds_of(self, table: str) -> int:
        """How many seeds a cell of a table has."""
        if self.seeds is not None:
            return self.seeds
        few = FEWER_SEEDS if table in (SCALE, "ablation", "gradient") else SEEDS
        return QUICK_SEEDS if self.dataset == QUICK else few[blocks_of(table, self.dataset, self.blocks)]


def blocks_of(table: str, dataset: str, asked: Blocks | None) -> Blocks:
    """The residual blocks of the runs of a table."""
    return "plain" if table == SCALE or dataset == QUICK else asked or "paper"


# All of a run that its cell does not say: also what is the trainer's default, so that an id never changes.
CIFAR10 = TrainConfig(
    data="cifar10",
    image_size=32,
    model="vqvae",
    model_options=SIZES | {"stride": 4},
    codebook_size=512,
    code_dim=64,
    steps=PAPER_STEPS,
    batch_size=256,
    learning_rate=1e-3,
    weight_decay=0.0,
    clip=1.0,
    validate_every=1_000,
    checkpoint_every=10_000,
    keep_checkpoints=1,
    log_every=500,
    precision="bf16",
)
IMAGENET = replace(
    CIFAR10,
    data="imagenet",
    image_size=256,
    model="vqvae2",
    model_options=SIZES | {"strides": [4, 2]},
    batch_size=128,
    learning_rate=3e-4,
    checkpoint_every=2_000,
    log_every=100,
)
SETTINGS = {
    "cifar10": CIFAR10,
    "imagenet": IMAGENET,
    "faces": replace(IMAGENET, data="faces"),
    QUICK: replace(
        CIFAR10,
        data=QUICK,
        model_options={"hidden": 32, "residual_layers": 1, "residual_hidden": 16, "stride": 4},
        codebook_size=128,
        code_dim=16,
        steps=400,
        batch_size=64,
        learning_rate=2e-3,
        validate_every=20,
        checkpoint_every=200,
        log_every=20,
        device="cpu",
        precision="fp32",
    ),
}
QUICK_SEEDS = 2
# At 256x256 the study of large codebooks has one level of 32x32 tokens, as tokenizers do.
SCALE_SETTINGS = {"faces": replace(SETTINGS["faces"], model="vqvae", model_options=SIZES | {"stride": 8})}

# method -> the quantizer's name and what the name says of its options
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ema": ("ema", {}),
    "ksom": ("kohonen", {"neighborhood": "narrowing"}),  # if the cell names none: what was recommended until 0.2
    "ksom-paper": ("kohonen", {}),
    "ride": ("kohonen", {"neighborhood": "ride"}),  # what is recommended now
    # The softmax cools to its last temperature within the training, and stays there.
    "soft-0.01": ("soft", {"temperature": Schedule.exponential(1.0, 0.01, 10_000).to_dict()}),
    "soft-0.0001": ("soft", {"temperature": Schedule.exponential(1.0, 0.0001, 20_000).to_dict()}),
    "gradient": ("gradient", {}),
    # The paper's row: its authors' code pulls neighbors toward the winning code by squares that it adds up over
    # dimensions, and its last sweep weighs that by 0.1.
    "som-vae": ("som-vae", {"neighbor_target": "winner", "neighbor_weight": 0.1, "neighbor_reduction": "sum"}),
    **{
        f"som-vae-{target}-mean-{weight}": (
            "som-vae",
            {"neighbor_target": target, "neighbor_weight": weight, "neighbor_reduction": "mean"},
        )
        for target in ("winner", "input")
        for weight in (0.1, 1.0)
    },
    **{name: (name, {}) for name in PEERS},
}

# Data set, method and blocks of rows that nobody has run: a table of records names them and is whole without them.
PENDING = (("cifar10", "som-vae", "plain"),)


@dataclass(frozen=True)
class Cell:
    """One row of a table: the key columns of targets.csv, as they are written there, and the size of the codebook."""

    table: str
    dataset: str
    method: str
    neighborhood: str = ""
    grid_dim: str = ""
    tau: str = ""
    count_init: str = ""
    update_empty: str = ""
    codebook_size: int | None = None
    """The data set's own if not given."""
    most_seeds: int | None = field(default=None, compare=False)
    """No more seeds than this, however many are asked for."""
    blocks: Blocks = "plain"
    precision: str | None = None
    """The data set's own if not given."""

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in KEYS)

    @property
    def paper(self) -> dict[str, str] | None:
        """The paper's numbers, where it has this row."""
        return targets().get(self.key) if self.codebook_size is None else None

    @property
    def pending(self) -> bool:
        """Whether a table is whole without this row, until all its runs are there."""
        ours = self.table == "robustness" and self.neighborhood in ("gaussian", "exponential")
        return ours or (self.dataset, self.method, self.blocks) in PENDING

    @property
    def setting(self) -> Any:
        """A TrainConfig that leaves no number open."""
        known = SCALE_SETTINGS if self.table == SCALE else {}
        return known.get(self.dataset) or SETTINGS[self.dataset]

    @property
    def name(self) -> str:
        """What tells this row from the others of its table, in words."""
        words = [self.method, *[word for word in (self.neighborhood,) if word not in ("", "none")]]
        values = {"K": self.codebook_size, "grid": f"{self.grid_dim}-D" * bool(self.grid_dim), "tau": self.tau}
        values |= {"count_init": self.count_init, "update_empty": self.update_empty}
        return " ".join([*words, *[f"{name}={value}" for name, value in values.items() if value]])

    def seeds(self, number: int) -> range:
        return range(number if self.most_seeds is None else min(number, self.most_seeds))

    def config(
        self, seed: int, steps: int | None = None, data_path: Path | None = None, batch_size: int | None = None
    ) -> TrainConfig:
        """The run of this cell with this seed; precision and all else is named, so its id is the same everywhere."""
        setting = self.setting
        size = self.codebook_size or setting.codebook_size
        quantizer, options = METHODS[self.method]
        return replace(
            setting,
            data_path=data_path,
            model_options=setting.model_options | BLOCKS[self.blocks],
            codebook_size=size,
            quantizer=quantizer,
            quantizer_options=options | self._options(size),
            steps=setting.steps if steps is None else steps,
            batch_size=setting.batch_size if batch_size is None else batch_size,
            seed=seed,
            precision=self.precision or setting.precision,
        )

    def _options(self, size: int) -> dict[str, Any]:
        """The quantizer's options that the key columns name."""
        options: dict[str, Any] = {}
        if self.neighborhood not in ("", "none"):
            options["neighborhood"] = self.neighborhood
            options["tau"] = float(self.tau)
            options["grid"] = list(Grid.balanced(size, int(self.grid_dim)).shape)
        if self.count_init:
            options["count_init"] = float(self.count_init)
        if self.update_empty:
            options["update_empty"] = self.update_empty == "yes"
        return options


CODEBOOKS = (512, 1_024, 4_096, 16_384, 65_536, 262_144)
OURS_AT_SCALE = (
    Cell(SCALE, "cifar10", "ema", "none", count_init="1", update_empty="yes"),
    Cell(SCALE, "cifar10", "ksom-paper", "hard", "2", "0.1", "1", "yes"),
    Cell(SCALE, "cifar10", "ksom"),
)
PEERS_AT_SCALE = tuple(Cell(SCALE, "cifar10", name) for name in PEERS)
SCALE_SEEDS_UP_TO = 16_384  # beyond it, and for the peers, one seed


def cells(
    table: str, dataset: str = "cifar10", codebooks: Sequence[int] | None = None, blocks: Blocks | None = None
) -> list[Cell]:
    """The rows of a table for a data set; `dataset="photos"` gives the rows of CIFAR-10's for the quick version."""
    check_name("table", table, (*TABLES, SCALE))
    check_name("data set of the tables", dataset, SETTINGS)
    if codebooks is not None and table != SCALE:
        raise ValueError(f"codebooks={list(codebooks)} goes with {SCALE!r}; the table {table!r} has one size, 512")
    rows = _scale(dataset, codebooks) if table == SCALE else _paper_cells(table, dataset)
    if not rows:
        has = dict.fromkeys(key[1] for key in targets() if key[0] == table)
        raise ValueError(f"the table {table!r} has no rows for {dataset!r}; it has them for {', '.join(has)}")
    chosen = blocks_of(table, dataset, blocks)
    return _with_ours([replace(cell, blocks=chosen) for cell in rows])


def configs(table: str, options: Options) -> list[TrainConfig]:
    """The runs that a table is made of, each once."""
    return once(
        cell.config(seed, options.steps, options.data_path, options.batch_size)
        for cell in cells(table, options.dataset, options.codebooks, options.blocks)
        for seed in cell.seeds(options.seeds_of(table))
    )


def once(wanted: Iterable[TrainConfig]) -> list[TrainConfig]:
    """Each run once: cells of several tables may share it."""
    return list({config.run_id: config for config in wanted}.values())


def _paper_cells(table: str, dataset: str) -> list[Cell]:
    named = "cifar10" if dataset == QUICK else dataset
    return [
        replace(Cell(**dict(zip(KEYS, key))), dataset=dataset)  # type: ignore[arg-type]
        for key in targets()
        if key[:2] == (table, named)
    ]


def _with_ours(paper: Iterable[Cell]) -> list[Cell]:
    rows = []
    for cell in paper:
        rows.append(cell)
        if cell.table in ("main", "ablation") and cell.neighborhood == "gaussian":
            rows.append(replace(cell, neighborhood="exponential"))
        if (cell.table, cell.method, cell.dataset, cell.blocks) == ("robustness", "ksom", "cifar10", "paper"):
            rows += [replace(cell, neighborhood=kind) for kind in ("gaussian", "exponential")]
        if cell.method == "som-vae" and cell.blocks == "plain":
            rows += [replace(cell, method=name) for name in METHODS if name.startswith("som-vae-")]
    return rows


def _scale(dataset: str, codebooks: Sequence[int] | None) -> list[Cell]:
    if dataset == "imagenet":
        raise ValueError(f"{SCALE!r} is done on cifar10 and, with one level and 16,384 codes, on faces")
    methods: tuple[Cell, ...] = (*OURS_AT_SCALE, *PEERS_AT_SCALE)
    sizes: tuple[int, ...] = CODEBOOKS
    if dataset == QUICK:
        methods, sizes = OURS_AT_SCALE, (512, 4_096)
    elif dataset == "faces":
        methods, sizes = (OURS_AT_SCALE[0], OURS_AT_SCALE[2]), (16_384,)
    chosen = sizes if codebooks is None else tuple(codebooks)
    for size in chosen:
        if size not in sizes:
            raise ValueError(
                f"codebooks={list(chosen)}: {SCALE!r} on {dataset} has the sizes {', '.join(map(str, sizes))}"
            )
    rows = []
    for size in chosen:
        for cell in methods:
            many = cell in OURS_AT_SCALE and size <= SCALE_SEEDS_UP_TO
            rows.append(replace(cell, dataset=dataset, codebook_size=size, most_seeds=None if many else 1))
    return rows
