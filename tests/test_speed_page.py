"""docs/speed.md says what the CSV files say: its tables are made from them, and so are the claims in its prose."""

import copy
import re
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from experiments import specs
from experiments.library import Library

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kernels, measured, plots, tables, written  # noqa: E402
from benchmarks.layers import host_peak_mib  # noqa: E402

PAGE = ROOT / "docs" / "speed.md"
SMALL, FIRST, LARGEST = (16_384, 512, 64), (524_288, 512, 64), (65_536, 1_048_576, 64)


@pytest.fixture(scope="module")
def results():
    return measured.Results.read()


def row(library, mode, neighborhood, shape, ms, peak="", floor="", what="fwd+bwd+update"):
    n, k, d = map(str, shape)
    return {"library": library, "mode": mode, "neighborhood": neighborhood, "N": n, "K": k, "d": d, "what": what,
            "median_ms": str(ms), "peak_mib": str(peak), "roofline_ms": str(floor)}  # fmt: skip


def only(**files):
    empty = {name: [] for name in measured.Results.__dataclass_fields__}
    return measured.Results(**{**empty, **files})


def test_the_page_is_what_the_files_say(results):
    page = PAGE.read_text()
    assert page == tables.filled(page, results), "run python -m benchmarks.plots"


def test_a_changed_figure_would_be_noticed(results):
    page = PAGE.read_text()
    changed = copy.deepcopy(results)
    slow = next(r for r in changed.layers if r["library"] == "plain-torch" and r["N"] == "524288")
    assert slow["median_ms"] != "123.4"
    slow["median_ms"] = "123.4"
    assert "| plain torch EMA-VQ | 123 |" in tables.filled(page, changed)
    assert "| plain torch EMA-VQ | 123 |" not in page


def test_no_figure_is_typed_by_hand():
    prose = written.BLOCK.sub("", PAGE.read_text())
    assert len(prose) > 1000
    assert re.findall(r"\d[\d.,]*\s*(?:ms|MiB|GiB|GB|%|x faster|times)\b", prose) == []


def test_the_readme_has_the_same_figures(results):
    said = (ROOT / "README.md").read_text()
    steps = [
        (results.ours("exact+graph", "hard", FIRST), results.ours("exact", "hard", FIRST, column="peak_mib"), 2),
        (results.ours("exact", "hard", FIRST), results.ours("exact", "hard", FIRST, column="peak_mib"), 1),
        *((results.peer(name, FIRST), results.peer(name, FIRST, "peak_mib"), 1) for name in measured.PEERS),
    ]
    table = said[said.index("| N = 524,288 vectors") :].splitlines()[2:]
    for line, (ms, mib, digits) in zip(table, steps, strict=False):
        _, _, time, memory, _ = (part.strip(" *") for part in line.split("|"))
        assert (time, memory) == (f"{ms:.{digits}f}", f"{mib:,.1f} MiB" if mib < 1 else f"{mib:,.0f} MiB"), line
    at = {row["case"]: row for row in results.training if row["quantizer"] == "kohonen hard" and "graph" in row["way"]}
    small, large = at["vqvae 32x32, batch 256"], at["vqvae2 256x256, batch 128"]
    said = " ".join(said.split())
    assert f"batch 256, {float(small['ms']):.2f} ms; its 256x256 VQ-VAE-2" in said
    assert f"batch 128, {float(large['ms']):.1f} ms and {float(large['peak_mib']) / 1024:.1f} GiB." in said


def test_memory_of_a_call_on_the_host():
    """16 MiB that are gone again, and 4 that are kept."""
    assert host_peak_mib(lambda: torch.ones(4, 2**20).sum(0)) == pytest.approx(16, abs=0.1)
    assert host_peak_mib(lambda: None) == 0


def test_a_page_without_a_block_is_refused(results):
    page = PAGE.read_text().replace("begin cpu", "begin gpu").replace("end cpu", "end gpu")
    with pytest.raises(ValueError, match="gpu"):
        tables.filled(page, results)


@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures_are_there_and_small(name):
    picture = PAGE.parent / name
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size < 150_000
    assert f"]({name})" in PAGE.read_text()


def test_the_picture_shows_what_was_measured_and_what_did_not_run(results):
    figure = plots.draw_layers(results)
    time_over_k, time_over_n = figure.axes[:2]
    drawn = [line.get_ydata().tolist() for line in time_over_n.get_lines()]
    assert [results.peer("plain-torch", SMALL), results.peer("plain-torch", FIRST)] in drawn
    crosses = {line.get_color(): line.get_xdata() for line in time_over_k.get_lines() if line.get_marker() == "x"}
    assert list(crosses[plots.COLORS["plain-torch"]]) == [262_144, 1_048_576]
    assert list(crosses[plots.COLORS["authors-formulation"]]) == [65_536, 262_144, 1_048_576]
    plots.plt.close(figure)


@pytest.mark.parametrize(
    ("value", "text"), [(0.05044, "0.0504"), (1.9896, "1.99"), (5.0, "5.00"), (99.96, "100"), (1088.7, "1,089")]
)
def test_three_digits(value, text):
    assert written.ms(value) == text


def test_targets_are_compared_with_both_figures(monkeypatch):
    shape = (10, 20, 3)
    monkeypatch.setattr(tables, "TARGETS", [(shape, "exact", ("none", "hard"), 2.0, 64)])
    rows = [
        *(row("topovq", "exact", "none", shape, 2.5, 64.0), row("topovq", "exact+graph", "none", shape, 2.0, 64.0)),
        *(row("topovq", "exact", "hard", shape, 1.5, 65.0), row("topovq", "exact+graph", "hard", shape, 2.01, 65.0)),
    ]
    made = tables.targets(only(layers=rows))
    assert "| `none`, exact | 2 | 2.00 | yes | 2.50 | **no** | 64 | 64 | yes |" in made
    assert "| `hard`, exact | 2 | 2.01 | **no** | 1.50 | yes | 64 | 65 | **no** |" in made
    assert "- Missed: time at 10 x 20 x 3, exact, target 2: `hard` 2.01 ms.\n" in made
    assert "- Missed: memory at 10 x 20 x 3, exact, target 64: `hard` 65 MiB.\n" in made


def test_a_figure_measured_twice_is_refused():
    twice = only(layers=[row("topovq", "exact", "none", SMALL, 1.0)] * 2)
    with pytest.raises(ValueError, match="2 rows"):
        twice.ours("exact", "none", SMALL)
    with pytest.raises(ValueError, match="no row of topovq, fast"):
        twice.ours("fast", "none", SMALL)


def test_why_a_peer_is_missing():
    # 3 x 65,536 x 262,144 floats are 192 GiB; twice 3 x 65,536 x 65,536 are 96 GiB and fit, so time was the reason.
    assert tables.missing("plain-torch", (65_536, 262_144, 64)) == "did not fit: over 192 GiB"
    assert tables.missing("authors-formulation", (65_536, 65_536, 64)) == "left out: over 5 s"


def test_what_sets_a_floor():
    assert tables.limit(0.2, 0.2) == "bytes"
    assert tables.limit(3.0, 1.0) == "products"
    assert tables.limit(3.0, 2.0) == "products exact, bytes fast"


def test_slower_than_ema():
    times = {"ema": 2.0, "kohonen hard": 2.08, "kohonen": 2.1, "kohonen at 0.2": 2.2, "kohonen at 0.75": 2.02}
    rows = [{"codebook_size": "512", "quantizer": name, "ms": str(ms), "peak_mib": "100"} for name, ms in times.items()]
    made = tables.scale(only(scale=rows))
    cells = "| 512 | 2.00 | 2.08 | +4.0% | yes | 2.20 | +10.0% | **no** | 2.02 | +1.0% | 100 | 100 | 100 |"
    assert cells in made
    said = " ".join(made.split())
    assert "Within that: `hard`. Beyond that at its most: the recommended one at 512 (+10.0%)." in said
    assert said.endswith("is at most +5.5% slower, which is at 512 codes.")


@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolutions"),
        ("nvjet_sm90_tst_32x64_64x16_1x2_h_bz_splitK_NTN", "convolutions"),
        ("triton_red_fused_convolution_backward_12", "sums of gradients"),
        ("triton_poi_fused_cat_convolution_0", "activations, additions"),
        ("_search_kernel", "quantizers"),
        ("_norm_kernel", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", kernels.BESIDE),
        ("Memcpy DtoD (Device -> Device)", "copies and zeros"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, of):
    assert kernels.kind(kernel) == of


def test_what_fills_a_step_adds_up(results):
    rows = [r for r in results.kernels if r["kind"] != kernels.BESIDE]
    calls, ms = (sum(float(r[column]) for r in rows) for column in ("calls", "ms"))
    said = f"the {calls:.0f} kernels of a step take {ms:.1f} ms"
    assert said in " ".join(tables.kernels(results).split())


def test_codes_in_the_order_of_a_map_are_named_where_they_were_measured(results):
    changed, what = copy.deepcopy(results), "assignment, ordered codes"
    changed.layers[:] = [each for each in changed.layers if each["what"] != what]
    assert "in the order of a map" not in tables.limits(changed)
    search = results.search("topovq", "exact", FIRST)
    changed.layers.append(row("topovq", "exact+graph", "none", FIRST, 1.5 * search, what=what))
    said = " ".join(tables.limits(changed).split())
    assert "as after training, the exact search takes 1.50x as long at 524,288 x 512 x 64." in said


class TestTheProse:
    """What the page says in words."""

    def test_in_a_graph_it_is_faster_than_every_peer(self, results):
        for shape in measured.SHAPES:
            found = [value for library in measured.PEERS if (value := results.peer(library, shape)) is not None]
            assert all(results.ours("exact+graph", "hard", shape) < value for value in found)

    def test_a_few_percent_say_nothing(self, results):
        assert results.ours("exact+graph", "hard", LARGEST) > results.ours("exact", "hard", LARGEST)

    def test_at_the_first_shape_the_search_meets_no_limit(self, results):
        found, product = tables.floors(results)
        n, k, d = FIRST
        for mode, products in (("exact", 3), ("fast", 1)):
            search = results.search("topovq", mode, FIRST)
            assert search > 1.5 * products * product * n * k * d
            assert search > 1.5 * found[FIRST][1] / 6  # the floor is that of bytes there, of which x is a sixth
        assert tables.limit(*found[FIRST]) == "bytes"

    def test_no_step_reaches_its_floor(self, results):
        steps = [r for r in results.layers if r["what"] == "fwd+bwd+update"]
        assert len(steps) > 60
        assert all(float(r["median_ms"]) > float(r["roofline_ms"]) for r in steps)

    def test_with_many_codes_the_search_is_almost_the_whole_step(self, results):
        for shape in measured.SHAPES[1:5]:
            search = results.search("topovq", "exact", shape)
            assert search / results.ours("exact+graph", "none", shape) > 0.9

    def test_hard_and_ema_coincide_and_the_recommended_lies_above(self, results):
        at = {(int(r["codebook_size"]), r["quantizer"]): float(r["ms"]) for r in results.scale}
        for size in {size for size, _ in at}:
            assert at[size, "kohonen hard"] / at[size, "ema"] == pytest.approx(1, abs=0.025)
            assert at[size, "kohonen at 0.75"] / at[size, "ema"] == pytest.approx(1, abs=0.015)
            assert (at[size, "kohonen"] / at[size, "ema"] > 1.02) == (size >= 65_536)

    def test_eager_and_small_it_beats_one_peer_and_not_the_other(self, results):
        eager = results.ours("exact", "hard", SMALL)
        assert results.peer("plain-torch", SMALL) < eager < results.peer("vector-quantize-pytorch", SMALL)

    def test_the_new_convolutions_learn_the_same(self):
        """`hard` before and after: the lowest validation losses, and the last."""
        found = {}
        for folder, seeds in (("check", (20, 21, 22)), ("cifar10", range(5))):
            library = Library([ROOT / "records" / folder])
            hard = next(cell for cell in specs.cells("main") if cell.neighborhood == "hard")
            runs = [library.finished(hard.config(seed)) for seed in seeds]
            curves = [[1e3 * seen["loss"] for seen in run.validations()] for run in runs]
            for name, pick in (("lowest", min), ("last", lambda curve: curve[-1])):
                values = [pick(curve) for curve in curves]
                found[folder, name] = f"{mean(values):.2f} ± {stdev(values):.2f}"
        said = " ".join(PAGE.read_text().split())
        assert f"lowest validation loss at {found['check', 'lowest']} (1e-3), five before" in said
        assert f"written at {found['cifar10', 'lowest']}; at the last step" in said
        assert f"step it was {found['check', 'last']} and {found['cifar10', 'last']}." in said

    def test_on_a_cpu_it_takes_less_time_and_memory(self, results):
        rows = [line.strip("| ").split(" | ") for line in tables.cpu(results).splitlines() if " x " in line][1:]
        assert len(rows) == 6
        for _, _, mine, whole, _, mib, whole_mib in rows:
            assert float(mine) < float(whole) / 3
            assert float(mib) < float(whole_mib.replace(",", "")) / 20

    def test_one_code_is_no_bottleneck(self, results):
        assert "**no**" not in tables.accumulation(results)
