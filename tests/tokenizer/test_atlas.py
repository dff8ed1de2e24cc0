"""The maps of a model: neighbors and distances by hand, tiles against plain decoding, drawings by their pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from topovq.drawing import draw, places
from topovq.grid import Grid
from topovq.metrics import neighbor_distances, neighbors
from topovq.tokenizer.atlas import (
    charts,
    fields,
    from_planes,
    map_picture,
    tiles,
    to_planes,
)
from topovq.tokenizer.models import VQVAE, VQVAE2

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 8, "code_dim": 8}


def near(grid: Grid, place: int) -> list[int]:
    return sorted(k for k in neighbors(grid)[place].tolist() if k >= 0)


def test_neighbors_by_hand() -> None:
    plain = Grid((3, 4))  # 0 1 2 3 / 4 5 6 7 / 8 9 10 11
    assert near(plain, 0) == [1, 4]
    assert near(plain, 5) == [1, 4, 6, 9]
    assert near(Grid((3, 4), wrap=True), 0) == [1, 3, 4, 8]
    assert near(Grid(5), 4) == [3]
    assert near(Grid((2, 2)), 0) == [1, 2]
    assert near(Grid((2, 2), wrap=True), 0) == [1, 2]
    hexagons = Grid((3, 3), topology="hexagonal")  # odd rows lie half a cell to the right
    assert near(hexagons, 4) == [1, 2, 3, 5, 7, 8]
    assert near(hexagons, 0) == [1, 3]
    assert near(Grid(1), 0) == []
    # 0 1 2 3 / 4 5 6 7 / 8 9: nothing below 6 and 7, nothing to the right of 9
    assert near(Grid((3, 4), size=10), 6) == [2, 5, 7]
    assert near(Grid((3, 4), size=10), 9) == [5, 8]
    assert near(Grid((3, 4), size=10, wrap=True), 3) == [0, 2, 7]
    assert near(Grid((3, 3), topology="hexagonal", size=7), 4) == [1, 2, 3, 5]


def test_distances_by_hand() -> None:
    codes = torch.tensor([[0.0], [1.0], [5.0]])
    assert neighbor_distances(codes, Grid(3)).tolist() == [1.0, 2.5, 4.0]
    assert neighbor_distances(codes[:1], Grid(1)).tolist() == [0.0]


def test_places_on_the_page() -> None:
    assert places(Grid((2, 3))).tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert places(Grid(5)).tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert places(Grid((2, 2), topology="hexagonal"))[2].tolist() == pytest.approx([0.5, 3**0.5 / 2])
    assert places(Grid((2, 2, 2)))[5].tolist() == [1, 2]


def test_a_drawing_has_each_cell_at_its_place() -> None:
    cells = np.arange(6, dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(2, 2).repeat(3, 3)
    picture = draw(cells, Grid((2, 3)))
    assert picture.shape == (4, 6, 4)
    assert picture[::2, ::2, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (picture[..., 3] == 255).all()


def test_places_without_a_code_are_blank() -> None:
    cells = np.full((5, 2, 2, 3), 9, np.uint8)
    picture = draw(cells, Grid((2, 3), size=5))
    assert picture.shape == (4, 6, 4)
    assert picture[::2, ::2, 3].tolist() == [[255, 255, 255], [255, 255, 0]]
    hexagons = draw(np.full((7, 20, 20, 3), 9, np.uint8), Grid((3, 3), topology="hexagonal", size=7))
    full = draw(np.full((9, 20, 20, 3), 9, np.uint8), Grid((3, 3), topology="hexagonal"))
    assert hexagons.shape == full.shape
    assert (hexagons[45:, 20:, 3] == 0).all()
    assert (hexagons[:30] == full[:30]).all()


def test_hexagons_stand_on_their_tips_and_leave_no_gap_inside() -> None:
    cells = np.full((9, 20, 20, 3), 7, np.uint8)
    picture = draw(cells, Grid((3, 3), topology="hexagonal"))
    assert picture[0, 0, 3] == 0  # a corner is empty
    assert picture[0, 10, 3] == 255  # the tip is not
    middle = picture[12:-12, 20:-20, 3]
    assert (middle == 255).mean() > 0.98


@pytest.mark.parametrize("quantizer", ["kohonen", "residual"])
@pytest.mark.parametrize("kind", [VQVAE, VQVAE2])
def test_planes_are_the_tokens_of_any_model(kind: type, quantizer: str) -> None:
    torch.manual_seed(0)
    model = kind(**SMALL, quantizer=quantizer).eval()
    maps = charts(model)
    levels, stages = len(model.quantizers), 4 if quantizer == "residual" else 1
    assert len(maps) == levels * stages
    tokens = model.encode((torch.rand(2, 3, 16, 16) * 255).to(torch.uint8))
    planes = to_planes(tokens)
    assert [tuple(plane.shape[1:]) for plane in planes] == [chart.shape for chart in maps]
    assert torch.equal(model.decode(from_planes(planes, maps)), model.decode(tokens))
    assert map_picture(model, maps, len(maps) - 1).shape[2] == 4


def test_a_tile_is_what_a_code_decodes_to_in_the_middle_of_itself() -> None:
    torch.manual_seed(0)
    model = VQVAE2(**SMALL).eval()
    maps = charts(model)
    assert [chart.name for chart in maps] == ["top", "bottom"]
    image = model.decode((torch.full((1, 3, 3), 2), torch.full((1, 6, 6), 5)))[0]
    assert torch.equal(fields(model, maps, 1, torch.tensor([5]), [2, 0])[0], image)
    assert torch.equal(tiles(model, maps, 1, [2, 0])[5], image[:, 12:16, 12:16])
    assert torch.equal(tiles(model, maps, 0, [0, 5])[2], image[:, 8:16, 8:16])
