"""Two more tables of the study `prior`, from its records: what errors in tokens cost, and how small tokens become.

    python -m experiments.prior_extras records/prior --out docs/results

writes token-errors-DATA.csv and compression-DATA.csv for every data set whose samples were looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import compression, token_errors
from experiments.prior_cells import Cell
from experiments.prior_study import find_sampled
from experiments.runs import FACTS
from topovq.storage import write_atomic


def error_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of `token_errors`, of one tokenizer."""
    facts = _facts(record)
    rows = record["sampled"].get("errors", [])
    for row in rows:
        tokens = record["sampled"]["error_tokens"]
        lost = rows[0]["psnr"] - row["psnr"]
        yield {**facts, "codebook": Cell.of(record["cell"]).book.codebook, "tokens": tokens, **row, "psnr_lost": lost}


def size_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of `compression`: what the prior needs is its validation bits. A form that no quality brings to the tokens'
    PSNR has its own; records of before have none."""
    told = record["sampled"]["sizes"]
    sizes = {**told, "prior": record["sampled"]["bits_per_token"] * told["tokens_per_pixel"]}
    facts = {**_facts(record), "images": told["images"]}
    for form in compression.FORMS:
        psnr = told.get(f"{form}_psnr", told["psnr"])
        yield {**facts, "form": form, "bits_per_pixel": sizes[form], "psnr": psnr}


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    book = Cell.of(record["cell"]).book
    known = {name: record.get(name) or "" for name in FACTS}
    return {"data": book.data, "K": book.K, "images": record["sampled"]["error_images"], **known}


def write_extras(records: Path, out: Path) -> list[Path]:
    """Write both tables of every data set; the files."""
    found = list(find_sampled([records]).values())
    if not found:
        raise FileNotFoundError(f"no record of samples of the study prior is below {records}")
    written = []
    for data in sorted({Cell.of(record["cell"]).book.data for record in found}):
        mine = [record for record in found if Cell.of(record["cell"]).book.data == data]
        ours = [record for record in mine if Cell.of(record["cell"]).book.codebook == "KSOM"]
        for name, columns, rows in (
            ("token-errors", token_errors.COLUMNS, [row for record in mine for row in error_rows(record)]),
            ("compression", compression.COLUMNS, [row for record in ours for row in size_rows(record)]),
        ):
            path = out / f"{name}-{data}.csv"
            write_atomic(path, token_errors.as_csv(columns, rows).encode())
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder with the records of the study")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the CSVs")
    asked = parser.parse_args()
    print(*write_extras(asked.records, asked.out), sep="\n")


if __name__ == "__main__":
    main()
