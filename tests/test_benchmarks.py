"""The benchmarks' own helpers: memory of a call, kernels by their names, and the pictures from made-up files."""

import pytest
import torch

from benchmarks import kernels, plots
from benchmarks.layers import host_peak_mib
from benchmarks.measured import SHAPES, SMALL, Results


def row(library, mode, neighborhood, shape, ms, peak="1", floor="0.1", what="fwd+bwd+update"):
    n, k, d = map(str, shape)
    return {"library": library, "mode": mode, "neighborhood": neighborhood, "N": n, "K": k, "d": d, "what": what,
            "median_ms": str(ms), "peak_mib": peak, "roofline_ms": floor}  # fmt: skip


def test_memory_of_a_call_on_the_host():
    """16 MiB that are gone again, and 4 that are kept."""
    assert host_peak_mib(lambda: torch.ones(4, 2**20).sum(0)) == pytest.approx(16, abs=0.1)
    assert host_peak_mib(lambda: None) == 0


def test_a_figure_measured_twice_is_refused():
    twice = Results(layers=[row("topovq", "exact", "none", SMALL, 1.0)] * 2, scale=[])
    with pytest.raises(ValueError, match="2 rows"):
        twice.ours("exact", "none", SMALL)
    with pytest.raises(ValueError, match="no row of topovq, fast"):
        twice.ours("fast", "none", SMALL)


def test_the_picture_shows_what_was_measured_and_what_did_not_run():
    ours = [
        row("topovq", mode, kind, shape, 2.0)
        for mode in ("exact", "exact+graph", "fast+graph")
        for kind in ("hard", "gaussian", "exponential")
        for shape in SHAPES
    ]
    fits = [shape for shape in SHAPES if shape[1] < 262_144]
    peers = [row("plain-torch", "eager", "none", shape, shape[0]) for shape in fits]
    figure = plots.draw_layers(Results(layers=[*ours, *peers], scale=[]))
    time_over_k, time_over_n = figure.axes[:2]
    assert [16_384, 524_288] in [line.get_ydata().tolist() for line in time_over_n.get_lines()]
    crosses = {line.get_color(): line.get_xdata() for line in time_over_k.get_lines() if line.get_marker() == "x"}
    assert list(crosses[plots.COLORS["plain-torch"]]) == [262_144, 1_048_576]
    assert list(crosses[plots.COLORS["authors-formulation"]]) == [65_536, 262_144, 1_048_576]
    plots.plt.close(figure)


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
