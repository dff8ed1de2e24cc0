"""The study `prior` as data: its tokenizers (Book) and the priors that are trained on their tokens (Cell).

    flat            one softmax over all codes
    flat tied       the same, tied to the codes of the tokenizer
    row/column      a row of the map, then a column of it, judged by the code that lies there, too
    row/column blind   the same, which is not told the codes
    bits            the first third of a token's bits, then the others: [6, 12] with 262,144 codes
    own             the factors that the codes of FSQ (its dimensions) and LFQ (bits) have by themselves
    ... shuffled    after the codes were renumbered at random, which takes the map's order away

With smoothing, targets are spread over neighbors on the map by a Gaussian whose width falls from WIDEST cells to
NARROWEST over SMOOTHED of the steps; then they are the tokens alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.peers import fsq_levels
from topovq.grid import Grid

# The codebook's name in the table -> that of experiments.clients.methods
CODEBOOKS = {"KSOM": "recommended", "EMA-VQ": "ema", "vqp": "vqp-rewritten", "FSQ": "fsq", "LFQ": "lfq"}
HEADS = ("flat", "flat tied", "row/column", "row/column shuffled", "row/column blind", "bits", "bits shuffled", "own")
SIZES = (512, 16_384, 65_536, 262_144)
SIDES = {"cifar10": 32, "imagenet160": 64, "photos": 32}  # of the images, or of the crops taken of them
WIDEST, NARROWEST, SMOOTHED = 8.0, 0.5, 0.6
SEEDS = 3  # of the main cells


@dataclass(frozen=True)
class Book:
    """A tokenizer: the paper's VQ-VAE, 8 x 8 tokens an image."""

    data: str = "cifar10"
    codebook: str = "KSOM"
    K: int = 262_144
    steps: int = 4_000
    hidden: int = 128
    code_dim: int = 64
    batch: int = 256
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def id(self) -> str:
        return _id(self)

    @property
    def name(self) -> str:
        return f"{self.data} {self.codebook} K={self.K}"


@dataclass(frozen=True)
class Cell:
    """A prior on the tokens of a book. The seed is that of the prior: all use the same tokens."""

    book: Book
    head: str = "row/column"
    smoothing: bool = False
    steps: int = 3_000
    seed: int = 0
    dim: int = 384
    layers: int = 6
    batch: int = 256
    learning_rate: float = 6e-4

    @property
    def id(self) -> str:
        return _id(self)

    @property
    def name(self) -> str:
        smoothed = " smoothed" * self.smoothing
        return f"{self.book.name} {self.head}{smoothed} {self.steps} steps seed {self.seed}"

    @classmethod
    def of(cls, told: dict[str, Any]) -> Cell:
        """A cell as a record tells it."""
        return cls(**{**told, "book": Book(**told["book"])})


def _id(cell: Any) -> str:
    return hashlib.sha256(json.dumps(asdict(cell), sort_keys=True).encode()).hexdigest()[:12]


def digits(book: Book, head: str) -> list[int]:
    """The sizes of a token's digits, most significant first, for the heads `bits`, `own` and `row/column blind`."""
    if head == "row/column blind":
        return list(Grid.balanced(book.K).shape)
    if head == "own" and book.codebook == "FSQ":
        return list(fsq_levels(book.K))[::-1]  # the first dimension counts least in FSQ's numbers
    bits = (book.K - 1).bit_length()
    return [2 ** (bits // 3), 2 ** (bits - bits // 3)]


def cells() -> list[Cell]:
    """The study, the most telling runs first. A tokenizer's runs stand together, so that one is trained once."""
    main, seeds = Cell(Book()), range(1, SEEDS)
    short = round(0.6 * main.steps)
    found = [replace(main, head=head) for head in ("row/column", "bits", "flat", "row/column blind")]
    found += [replace(main, smoothing=True), replace(main, head="row/column shuffled")]
    found += [replace(main, steps=short, smoothing=smoothing) for smoothing in (True, False)]
    found += [replace(main, head=head, seed=seed) for head in ("row/column", "bits") for seed in seeds]
    found += [replace(main, smoothing=True, seed=seed) for seed in seeds]
    found += [replace(main, head=head) for head in ("bits shuffled", "flat tied")]
    found += [replace(main, head="flat", seed=seed) for seed in seeds]
    found += of_map(Book(K=SIZES[1]))
    found += [Cell(Book(K=SIZES[1]), head, seed=seed) for head in ("row/column", "flat") for seed in seeds]
    found += others("cifar10", SIZES[1])
    found += [Cell(Book(data="imagenet160"), head) for head in ("row/column", "bits", "flat", "row/column shuffled")]
    found += of_map(Book(K=SIZES[2])) + others("cifar10", SIZES[3])
    found += of_map(Book(K=SIZES[0])) + others("cifar10", SIZES[0]) + others("cifar10", SIZES[2])
    for size in SIZES[::-1]:
        book = Book(data="imagenet160", K=size)
        found += [Cell(book, head) for head in ("row/column", "flat", "bits", "row/column shuffled")]
        found += others("imagenet160", size)
    return list(dict.fromkeys(found))


def of_map(book: Book) -> list[Cell]:
    """Every head on the tokens of a map, and smoothed targets."""
    heads = ("row/column", "flat", "row/column shuffled", "flat tied", "bits")
    return [*(Cell(book, head) for head in heads), Cell(book, smoothing=True)]


def others(data: str, size: int) -> list[Cell]:
    """The codebooks of others, by the head that suits them and by a flat one."""
    found = []
    for codebook in ("EMA-VQ", "vqp", "FSQ", "LFQ"):
        book = Book(data=data, codebook=codebook, K=size)
        found += [Cell(book, "own" if codebook in ("FSQ", "LFQ") else "row/column"), Cell(book, "flat")]
    return found


def quick_cells() -> list[Cell]:
    """A version of seconds, on photographs: every head and every codebook once."""
    book = Book(data="photos", K=64, steps=30, hidden=16, code_dim=8, batch=16)
    small = Cell(book, steps=20, dim=32, layers=1, batch=8)
    found = [replace(small, head=head) for head in HEADS if head != "own"]
    found.append(replace(small, smoothing=True))
    for codebook in ("EMA-VQ", "vqp"):
        found.append(replace(small, book=replace(book, codebook=codebook)))
    for codebook in ("FSQ", "LFQ"):
        found.append(replace(small, head="own", book=replace(book, codebook=codebook)))
    return found
