"""Errors in tokens: where they go, how many there are, and what the table says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from experiments.prior.tokens import ERROR_COLUMNS, as_csv, error_rows, errors_of_run, with_errors
from tests.small_runs import make_run
from topovq.grid import Grid
from topovq.metrics import not_neighbors
from topovq.tokenizer.training.runs import load_run


@pytest.mark.parametrize(
    "grid", [Grid((5, 6)), Grid((4, 6), topology="hexagonal", wrap=True), Grid((2, 3, 4))], ids=str
)
def test_errors_go_to_neighbors_or_anywhere(grid: Grid) -> None:
    tokens = torch.randint(grid.size, (40, 8, 8), generator=torch.Generator().manual_seed(1))
    near, far = (
        with_errors(tokens, grid, 0.1, kind, torch.Generator().manual_seed(0)) for kind in ("neighbor", "random")
    )
    for other in (near, far):
        assert (other != tokens).float().mean() == pytest.approx(0.1, abs=0.02)
        assert 0 <= int(other.min()) <= int(other.max()) < grid.size
    assert torch.equal(near != tokens, far != tokens)  # the same places
    assert not not_neighbors(near, tokens, grid).any()
    assert not_neighbors(far, tokens, grid).any()
    moved = (near - tokens)[near != tokens]
    assert len(moved.unique()) > grid.ndim  # both ways along each axis
    assert torch.equal(with_errors(tokens, grid, 0.0, "random", torch.Generator()), tokens)


def test_the_table_says_what_errors_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=30)
    rows = list(csv.DictReader(as_csv(ERROR_COLUMNS, errors_of_run("KSOM", run)).splitlines()))
    assert tuple(rows[0]) == ERROR_COLUMNS
    assert (rows[0]["errors"], rows[0]["K"], rows[0]["psnr_lost"]) == ("none", "12", "0")
    lost = {(row["errors"], row["share"]): float(row["psnr_lost"]) for row in rows}
    assert 0 < lost["random", "0.001"] < lost["random", "0.1"]
    model = load_run(run)
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    assert [row["share"] for row in error_rows(model, images, model.quantizers[0].grid, [0.5])] == [0.0, 0.5, 0.5]
