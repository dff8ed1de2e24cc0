"""Schedules of the neighborhood over codebook sizes, from which the recommended one was chosen.

    python -m benchmarks.schedules                  the table, from records/schedule
    python -m benchmarks.schedules --run            runs what is missing first (24 short runs, for a GPU)

The CIFAR-10 model of the paper, 6,000 steps, one seed. The Gaussian's width falls exponentially from a share of the
map's side to its last width over a share of the steps; EMA-VQ and the paper's hard neighborhood stand beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from topovq.neighborhood import LEAST_START, Schedule
from topovq.studies.library import Library
from topovq.studies.specs import configs
from topovq.studies.sweep import run_all
from topovq.training import TrainConfig

STEPS = 6_000
SIZES = (512, 4_096, 16_384)
TRIED = [  # share of the side, share of the steps, last width
    (1 / 16, 0.5, 0.3),
    (1 / 8, 0.5, 0.3),
    (1 / 32, 0.5, 0.3),
    (1 / 16, 0.3, 0.3),
    (1 / 16, 0.8, 0.3),
    (1 / 16, 0.5, 0.5),
]
RECORDS = Path(__file__).parents[1] / "records"


def rows() -> Iterator[tuple[str, list[TrainConfig]]]:
    """What a row of the table says, and its runs, one a size."""
    base = replace(configs("main", seeds=1)[0], steps=STEPS)

    def run(size: int, quantizer: str, **options: object) -> TrainConfig:
        return replace(base, codebook_size=size, quantizer=quantizer, quantizer_options=options)

    for share, span, end in TRIED:
        falls = [
            Schedule.exponential(max(LEAST_START, share * size**0.5), end, round(span * STEPS)).to_dict()
            for size in SIZES
        ]
        yield (
            f"side / {round(1 / share)} to {end} over {span:g} of the steps",
            [run(size, "kohonen", neighborhood="gaussian", schedule=fall) for size, fall in zip(SIZES, falls)],
        )
    yield "`hard`, the paper's", [run(size, "kohonen", neighborhood="hard") for size in SIZES]
    yield "EMA-VQ", [run(size, "ema") for size in SIZES]


def table(records: Path = RECORDS) -> list[str]:
    """The rows in Markdown: validation loss (1e-3) and codes in use at the last step."""
    library = Library([records])
    lines = [f"| neighborhood | {' | '.join(f'K = {size:,}' for size in SIZES)} |", "| --- |" + " --: |" * len(SIZES)]
    for label, runs in rows():
        shown = []
        for config in runs:
            found = library.finished(config)
            last = found.validations()[-1] if found else None
            shown.append(f"{1e3 * last['loss']:.1f}, {last['usage']:.1%}" if last else "not run")
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="train what is missing, into --runs")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "schedules")
    arguments = parser.parse_args()
    if arguments.run:
        library = Library([RECORDS])
        todo = [config for _, runs in rows() for config in runs if library.finished(config) is None]
        run_all(todo, arguments.runs)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
