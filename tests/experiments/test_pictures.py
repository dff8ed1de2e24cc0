"""Pictures of models and the measures beside them: their numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from experiments.figures.measures import (
    batches,
    encoder_outputs,
    level_choices,
    neighbor_ratio,
    shift_scores,
    topographies,
)
from experiments.figures.pictures import Panel, draw_maps2, draw_scale_map, plate, shifted_strip, shrink, use_picture
from experiments.figures.style import save
from topovq.grid import Grid
from topovq.metrics import topographic_error
from topovq.tokenizer.atlas import charts
from topovq.tokenizer.models import VQVAE, VQVAE2
from topovq.view.pictures import moved

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 8, "code_dim": 8}


class Toy:
    """A model of one pixel whose tokens are its digits: two maps of a line, tens above ones; or ones alone."""

    def __init__(self, levels: int) -> None:
        self.quantizers = [SimpleNamespace(grid=Grid(4))] * levels
        self.mean_C11 = torch.zeros(1, 1, 1)

    def encode(self, x: Tensor) -> Any:
        ones, tens = x[:, 0].long() // 10 % 10, x[:, 0].long() // 100
        return (tens, ones) if len(self.quantizers) == 2 else ones

    def decode(self, tokens: Any) -> Tensor:
        tens, ones = tokens if len(self.quantizers) == 2 else (torch.zeros_like(tokens), tokens)
        return (100 * tens + 10 * ones)[:, None].to(torch.uint8)


def pixels(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)


def db(squared_error: float) -> float:
    return 10 * math.log10(255**2 / squared_error)


def test_psnr_over_the_offset_by_hand() -> None:
    # 11 and 21 are read as tokens 1 and 2 and written as 10 and 20; token 2 moved by 2 stops at the border, 3.
    scores = {s.offset: s for s in shift_scores(Toy(1), pixels(11, 21), range(-1, 3))}  # type: ignore[arg-type]
    assert scores[0].to_reconstruction == math.inf
    assert scores[0].to_original == pytest.approx(db(1))
    assert scores[1].to_reconstruction == pytest.approx(db(100))
    assert scores[1].to_original == pytest.approx(db(81))
    assert scores[2].to_reconstruction == pytest.approx(db((20**2 + 10**2) / 2))
    assert scores[-1].to_original == pytest.approx(db(11**2))
    assert {(s.moved, s.images) for s in scores.values()} == {("all tokens", 2)}


def test_levels_are_moved_together_and_alone() -> None:
    toy: Any = Toy(2)
    assert level_choices(toy) == {"both levels": (0, 1), "top alone": (0,), "bottom alone": (1,)}
    assert moved(toy, toy.encode(pixels(110)), 1, (1,))[1].item() == 2
    calls: list[None] = []
    scores = shift_scores(toy, pixels(110), [1], lambda: calls.append(None))
    assert [s.to_reconstruction for s in scores] == pytest.approx([db(110**2), db(100**2), db(10**2)])
    assert len(calls) == len(batches(pixels(110))) * 3
    strip = shifted_strip(toy_with_channels(2), pixels(110), [-1, 0, 1], "bottom alone")
    assert strip.flatten().tolist() == [100, 110, 120]


def toy_with_channels(levels: int) -> Any:
    toy: Any = Toy(levels)
    toy.channels = 1
    return toy


def test_neighboring_codes_over_any_two_by_hand() -> None:
    codes = torch.tensor([[0.0], [1.0], [3.0]])
    ratio, near = neighbor_ratio(codes, Grid(3))  # neighbors 1 and 2 apart; any two 1, 2, 3
    assert ratio == pytest.approx(1.5 / 2)
    assert near == pytest.approx(4 / 6)
    assert neighbor_ratio(torch.randn(4, 5), Grid((2, 2))) == (pytest.approx(1), 1.0)  # all touch
    with pytest.raises(ValueError, match="at least 2"):
        neighbor_ratio(codes[:1], Grid(1))


@pytest.mark.parametrize("kind", [VQVAE, VQVAE2])
def test_topography_is_of_what_the_quantizer_sees(kind: type) -> None:
    torch.manual_seed(0)
    model = kind(**SMALL, quantizer_options={"grid": [2, 4]}).eval()
    images = (torch.rand(3, 3, 16, 16) * 255).to(torch.uint8)
    seen = encoder_outputs(model, images)
    if kind is VQVAE:
        z = model.to_codes(model.encoder(model.normalize(images)))
        torch.testing.assert_close(seen[0], z.permute(0, 2, 3, 1).reshape(-1, 8))
    assert [len(x) for x in seen] == [3 * h * w for h, w in model.token_shapes]
    for found, chart, x in zip(topographies(model, images), charts(model), seen, strict=True):
        assert found.topographic_error == pytest.approx(float(topographic_error(x, chart.codes_KD, chart.grid)))
        # on 2 x 4 places the four corners have 3 neighbors each and the others 5, of 7 others
        assert found.chance_error == pytest.approx(1 - (4 * 3 + 4 * 5) / (8 * 7))
        assert (found.level, found.vectors) == (chart.name, len(x))
    assert not model.quantizers[0]._forward_pre_hooks
    with pytest.raises(ValueError, match="ResidualVQ has several codes"):
        encoder_outputs(kind(**SMALL, quantizer="residual"), images)


def test_a_picture_is_drawn_in_whole_pixels(tmp_path: Path) -> None:
    picture = np.arange(60, 60 + 4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    figure = plate([[Panel(picture, 7, "a title", [(2, "+1")], [(1, "KSOM", "black")])]], "A plate", "Its caption.")
    png, svg = save(figure, tmp_path, "plate")
    drawn = np.asarray(Image.open(png).convert("RGB")).reshape(-1, 3)
    for color in picture.reshape(-1, 3):
        assert (drawn == color).all(1).sum() == 7 * 7
    text = svg.read_text()
    assert ">Its caption.</text>" in text
    assert "image-rendering:pixelated" in text.replace(" ", "")
    again = save(figure, tmp_path / "again", "plate")[1]
    assert again.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["plate.png", "plate.svg"]


def test_large_images_are_made_smaller_by_averages() -> None:
    image = pixels(0, 100, 200, 100).view(1, 1, 2, 2)
    assert shrink(image, 2) is image
    assert shrink(image, 1).tolist() == [[[[100]]]]


def test_the_use_of_codes_is_red_where_there_is_none_and_brighter_with_more() -> None:
    picture = use_picture(torch.tensor([[0, 1], [3, 7]]))
    assert picture[0, 0].tolist() == [150, 20, 20]
    # log(1 + count) is 1, 2 and 3 times log 2: 40 + 215 thirds
    assert picture[0, 1].tolist() == [112] * 3
    assert picture[1, 0].tolist() == [183] * 3
    assert picture[1, 1].tolist() == [255] * 3


def test_maps2_wants_two_levels() -> None:
    with pytest.raises(ValueError, match="KSOM has 1 maps; expected the two"):
        draw_maps2({"KSOM": VQVAE(**SMALL).eval()}, "")


def test_maps_with_empty_places_are_drawn_too() -> None:
    torch.manual_seed(0)
    sizes = {**SMALL, "codebook_size": 7}  # 3 x 3, the last two of which are empty
    figure = draw_scale_map({"KSOM": VQVAE(**sizes).eval()}, {"KSOM": torch.arange(7)}, "")
    decoded, use = (axes.images[0].get_array() for axes in figure.axes)
    assert (decoded[8:, 4:] == 255).all()
    assert use.shape == (3, 3, 4)
    assert use[..., 3].tolist() == [[255] * 3, [255] * 3, [255, 0, 0]]
    assert len(draw_maps2({"KSOM": VQVAE2(**sizes).eval()}, "").axes) == 6
