"""What a notebook shows of quantizers, grids, figures and maps, and the pictures of a live quantizer."""

import io
import re
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image

mpl.use("Agg")
import matplotlib.pyplot as plt

from topovq import Grid, KohonenVQ, Quantizer, ResidualVQ, SelfOrganizingMap
from topovq.drawing import code_colors, draw_colors, value_colors
from topovq.panel import panel, png


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def learned(vq: Quantizer) -> Quantizer:
    torch.manual_seed(0)
    for _ in range(5):
        vq(torch.randn(64, 4))
    return vq


class Tags(HTMLParser):
    """Refuses what is not closed, and has the text and the images' descriptions."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.alts: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.alts.append(dict(attrs)["alt"])
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def test_a_png_of_our_own_is_read_by_others():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        assert np.array_equal(np.asarray(image), pixels)


def test_a_panel_escapes_what_it_is_given():
    assert "<b>" not in panel("<b>", {"<b>": "<b>"})


def test_colors_by_hand():
    line = torch.linspace(-1, 1, 51)[:, None] * torch.tensor([[3.0, 4.0]])
    colors = code_colors(line)
    assert colors[:, 0].tolist() == sorted(colors[:, 0].tolist())  # red goes along the only direction there is
    assert (colors[0, 0], colors[-1, 0]) == (0, 255)
    assert (colors[:, 2] == 128).all()  # there is no third
    broken = line.clone()
    broken[7] = torch.nan
    assert code_colors(broken)[7].tolist() == [0, 0, 0]
    assert (code_colors(torch.ones(4, 3)) == 0).all()
    shades = value_colors(np.array([0.0, 1.0, np.nan, 0.5]))
    assert shades.tolist() == [[68, 1, 84], [253, 231, 37], [0, 0, 0], [33, 145, 140]]


@pytest.mark.parametrize("topology", ["rectangular", "hexagonal"])
def test_cells_of_a_drawing_have_their_colors(topology):
    colors = np.arange(18, dtype=np.uint8).reshape(6, 3)
    drawn = draw_colors(colors, Grid((2, 3), topology=topology), 90)
    seen = {tuple(color) for color in drawn[drawn[..., 3] == 255][:, :3].tolist()}
    assert seen == set(map(tuple, colors.tolist()))
    assert abs(drawn.shape[1] - 90) < 30
    if topology == "rectangular":
        assert drawn.shape[:2] == (60, 90)
        assert drawn[45, 75].tolist() == [15, 16, 17, 255]  # code 5, in row 1 and column 2


def test_a_quantizer_shows_its_figures_and_maps_and_stays_as_it_is():
    vq = learned(KohonenVQ(4, 12, topology="hexagonal", steps=100))
    vq.health()
    learned(vq)
    before = {name: value.clone() for name, value in vq.state_dict().items()}
    shown = Tags(vq._repr_html_())
    for fact in (
        "KohonenVQ",
        "12 of 4 dimensions",
        "3 x 4 hexagonal",
        "neighborhood ride",
        f"{vq.usage:.1%}",
        "updates 10",
    ):
        assert fact in re.sub(r"\s+", " ", shown.text)
    assert [alt.split()[0] for alt in shown.alts] == ["codes,", "U-matrix:", "hits:"]
    assert all(torch.equal(value, before[name]) for name, value in vq.state_dict().items())
    assert vq.health().drift > 0  # since it was asked, not since it was looked at


def test_quantizers_of_many_codebooks_and_of_none():
    shown = Tags(learned(ResidualVQ(4, 16, 6))._repr_html_())
    assert "6 codebooks of 16 of 4 dimensions" in shown.text
    assert len(shown.alts) == 3 * 4
    assert Tags(KohonenVQ(4, 12, neighborhood="none")._repr_html_()).text.count("in use") == 0  # nothing was counted

    class Placeless(Quantizer):
        maps = ()

    assert Placeless()._repr_html_() is None


def test_health_shows_every_figure():
    vq = learned(KohonenVQ(4, 12))
    assert "drift not known yet" in re.sub(r"\s+", " ", Tags(vq.health()._repr_html_()).text)
    health = learned(vq).health()
    text = Tags(health._repr_html_()).text
    assert f"{health.drift:.2%}" in text
    assert [name for name in health._fields if name.replace("_", " ") not in text] == ["advice"]  # there is none
    assert "advice mend <them>" in re.sub(r"\s+", " ", Tags(health._replace(advice="mend <them>")._repr_html_()).text)
    assert f"{health.usage:.1%}" in text


@pytest.mark.parametrize(
    ("grid", "told", "numbers"),
    [
        (Grid((2, 3), topology="hexagonal", wrap=(False, True)), ["hexagonal", "2, open", "3, goes round"], 6),
        (Grid((3, 4), size=11), ["11 at 12 places: the last row is not full"], 11),
        (Grid(5), ["axis 0", "5, open"], 5),
        (Grid((2, 2, 2)), ["axis 2"], 0),
        (Grid((20, 30)), ["600"], 0),
    ],
    ids=str,
)
def test_a_grid_shows_its_places(grid, told, numbers):
    html = grid._repr_html_()
    text = Tags(html).text
    assert [fact for fact in told if fact not in text] == []
    assert html.count("<text") == numbers
    assert html.count("M") >= (grid.size if grid.ndim < 3 else 0)


def test_a_map_of_a_table_shows_itself_once_it_is_fitted():
    som = SelfOrganizingMap((3, 4))
    assert "topographic error" not in som._repr_html_()
    assert "sk-" in som._repr_html_()
    som.fit(np.random.default_rng(0).normal(size=(30, 3)))
    html = som._repr_mimebundle_()["text/html"]
    assert html == som._repr_html_() or len(html) == len(som._repr_html_())  # scikit-learn numbers its diagrams
    assert f"{som.topographic_error_:.1%}" in html
    assert html.count("<img") == 3
    assert "sk-" in html


def test_a_map_shows_itself_without_labels_and_while_it_is_moved():
    x = np.random.default_rng(0).normal(size=(30, 3))
    som = SelfOrganizingMap((3, 4)).fit(lambda: [x])
    html = som._repr_html_()
    assert f"{som.topographic_error_:.1%}" in html
    assert html.count("<img") == 3
    html = som.update(som.statistics(x))._repr_html_()
    assert "11 passes" in html
    assert "topographic error" not in html
    assert html.count("<img") == 2


def test_plot_draws_codes_distances_and_hits():
    vq = learned(KohonenVQ(4, 12, topology="hexagonal"))
    codes, distances, hits = (ax.collections[0] for ax in vq.plot())
    np.testing.assert_allclose(codes.get_facecolor()[:, :3], code_colors(vq.codebook) / 255)
    np.testing.assert_allclose(hits.get_array(), vq.maps[0].hits)
    assert distances.get_array().min() > 0
    assert len(distances.get_paths()[0].vertices) == 7  # a hexagon, closed
    assert learned(ResidualVQ(4, [9, 6])).plot().shape == (2, 3)
    for grid in (7, (2, 2, 3)):
        vq = KohonenVQ(4, int(np.prod(grid)), grid=grid)
        assert len(vq.plot()[0].collections[0].get_paths()) == vq.codebook_size
