"""The benchmarks' own helpers: clocks, memory, files that go on, checks, and the pictures from made-up files."""

import csv
import sys
import time

import pytest
import torch

from benchmarks import kernels, layers, layers_check, loop, plots
from benchmarks.layers_table import COLUMNS, Table
from benchmarks.layers_timing import host_peak_mib, wall_ms
from benchmarks.measured import RESULTS, SHAPES, SMALL, Results
from topovq.ops.quantize import quantize

FACTS = {"gpu": "none", "driver": "1", "torch": "2", "triton": "3", "commit": "c0ffee", "date": "2026-01-01"}
STEP = "fwd+bwd+update"


def row(library, mode, run, neighborhood, shape, ms, peak="1", floor="0.1", what=STEP):
    n, k, d = map(str, shape)
    return {"library": library, "mode": mode, "run": run, "neighborhood": neighborhood, "N": n, "K": k, "d": d,
            "what": what, "dtype": "float32", "median_ms": str(ms), "peak_mib": peak, "roofline_ms": floor}  # fmt: skip


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_memory_of_a_call_on_the_host():
    """16 MiB that are gone again, and 4 that are kept."""
    assert host_peak_mib(lambda: torch.ones(4, 2**20).sum(0)) == pytest.approx(16, abs=0.1)
    assert host_peak_mib(lambda: None) == 0


def test_the_clock_gives_milliseconds_of_one_call():
    ms = wall_ms(lambda: time.sleep(0.01), torch.device("cpu"))
    assert 10 <= ms < 20


def test_a_figure_measured_twice_is_refused():
    twice = Results(layers=[row("topovq", "exact", "eager", "none", SMALL, 1.0)] * 2, scale=[])
    with pytest.raises(ValueError, match="2 rows"):
        twice.ours("exact", "eager", "none", SMALL)
    with pytest.raises(ValueError, match="no figure of topovq, fast"):
        twice.ours("fast", "eager", "none", SMALL)


def test_a_row_with_a_reason_has_no_figure():
    failed = Results(layers=[row("plain-torch", "exact", "eager", "none", SMALL, "")], scale=[])
    assert failed.peer("plain-torch", SMALL) is None


@pytest.mark.parametrize("name", ["layers", "layers_cpu"])
def test_the_files_have_the_columns_that_are_written(name):
    rows = read(RESULTS / f"{name}.csv")
    assert tuple(rows[0]) == COLUMNS
    assert {row["mode"] for row in rows} <= {"exact", "fast"}
    assert {row["run"] for row in rows} <= set(layers.RUNS)
    assert all(row["median_ms"] or row["note"] for row in rows)


def test_a_file_goes_on_where_it_stopped(tmp_path):
    out, where = tmp_path / "layers.csv", ("topovq", "exact", "eager", "none", SMALL, STEP)
    Table(out, **FACTS).add(*where, 1.0)
    again = Table(out, **FACTS)
    assert again.has(*where)
    assert not again.has("topovq", "exact", "graph", "none", SMALL, STEP)
    later = Table(out, **{**FACTS, "commit": "facade"})
    assert not later.has(*where)
    later.add("plain-torch", *where[1:], None, note="out of memory")
    later.add(*where, 2.0)
    assert [(row["library"], row["median_ms"], row["note"]) for row in read(out)] == [
        ("topovq", "2.0000", ""),
        ("plain-torch", "", "out of memory"),
    ]
    Table(out, fresh=True, **FACTS).add(*where, 3.0)
    assert [row["median_ms"] for row in read(out)] == ["3.0000"]


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "old.csv").write_text("library,mode\n")
    with pytest.raises(ValueError, match="other columns"):
        Table(tmp_path / "old.csv", **FACTS)


def test_a_layer_that_fails_has_a_row_that_says_why(tmp_path):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")

    shape, cpu = (64, 16, 4), torch.device("cpu")
    bench = layers.Bench(Table(tmp_path / "a.csv", **FACTS), cpu, time.perf_counter() + 60, None)
    bench.layer(("plain-torch", "exact", "none"), fails, shape, ["eager", "graph"])
    for name, make in layers.layers(*shape[1:]).items():
        if layers.timed(shape, *name):
            bench.layer(name, make, shape, ["eager"])
    failed, _, *rest = read(tmp_path / "a.csv")
    assert (failed["median_ms"], failed["note"]) == ("", "out of memory")
    assert {(row["library"], row["neighborhood"]) for row in rest} >= {("topovq", "none"), ("topovq", "ride")}
    assert all(float(row["median_ms"]) > 0 for row in rest)


def test_searches_and_sums_are_timed_alone(tmp_path, monkeypatch):
    """As on a GPU, but for its clock and its graphs."""
    monkeypatch.setattr(layers, "device_ms", lambda call: (call(), 1.5)[1])
    monkeypatch.setattr(layers, "captured", lambda call: call)
    shape, out = (64, 15, 4), tmp_path / "a.csv"
    bench = layers.Bench(Table(out, **FACTS), torch.device("cpu"), time.perf_counter() + 60, None)
    layers.alone(bench, shape, ["topovq", "flash-kmeans"])
    rows = read(out)
    assert {row["what"] for row in rows if row["mode"] == "exact"} == {
        "assignment",
        "assignment, ordered codes",
        *(f"accumulate, {what}{how}" for what in ("uniform", "one code") for how in ("", ", deterministic")),
    }
    assert {(row["clock"], row["median_ms"]) for row in rows} == {("device", "1.5000")}
    layers.alone(bench, shape, ["topovq"])
    assert read(out) == rows
    monkeypatch.setattr(layers, "device_ms", lambda call: 1 / 0)
    layers.alone(bench, (64, 16, 4), ["topovq"])
    assert {row["note"] for row in read(out)[len(rows) :]} == {"ZeroDivisionError: division by zero"}


def test_nothing_is_started_after_the_limit():
    bench = layers.Bench(Table(None, **FACTS), torch.device("cpu"), time.perf_counter() + 10, None)
    bench.layer(("plain-torch", "exact", "none"), lambda: pytest.fail("compiled too late"), SMALL, ["compiled"])
    assert len(bench.left) == 1


def test_few_layers_are_compiled():
    chosen = [
        (shape, *name, run)
        for shape in [*layers.COMMON, *layers.LARGE]
        for name in layers.layers(*shape[1:])
        for run in layers.COMPILED
        if layers.timed(shape, *name) and layers.planned(shape, *name, run)
    ]
    assert len(chosen) <= 32
    assert all((shape, "topovq", "exact", "ride", "compiled") in chosen for shape in layers.COMMON)


def test_the_check_sees_a_wrong_choice():
    assert layers_check.check_edge(3, torch.float32, "cpu", "cpu") == 12
    layers_check.check_update(5, "cpu", "cpu")
    x, codes, keep = torch.randn(50, 8), torch.randn(20, 8), torch.ones(50, dtype=torch.bool)
    choice = quantize(x, codes, keep, "euclidean", "exact", True)
    layers_check.compare(choice, x, codes, keep, "euclidean")
    with pytest.raises(AssertionError, match="euclidean search"):
        layers_check.compare(choice._replace(index_N=(choice.index_N + 1) % 20), x, codes, keep, "euclidean")


def test_the_picture_shows_what_was_measured_and_what_did_not_run():
    ours = [
        row("topovq", mode, run, kind, shape, 2.0)
        for mode, run in (("exact", "eager"), ("exact", "graph"), ("fast", "graph"))
        for kind in ("hard", "gaussian", "exponential")
        for shape in SHAPES
    ]
    fits = [shape for shape in SHAPES if shape[1] < 262_144]
    peers = [row("plain-torch", "exact", "eager", "none", shape, shape[0]) for shape in fits]
    figure = plots.draw_layers(Results(layers=[*ours, *peers], scale=[]))
    time_over_k, time_over_n = figure.axes[:2]
    assert [16_384, 524_288] in [line.get_ydata().tolist() for line in time_over_n.get_lines()]
    crosses = {line.get_color(): line.get_xdata() for line in time_over_k.get_lines() if line.get_marker() == "x"}
    assert list(crosses[plots.COLORS["plain-torch"]]) == [262_144, 1_048_576]
    assert list(crosses[plots.COLORS["authors-formulation"]]) == [65_536, 262_144, 1_048_576]
    plots.plt.close(figure)


def test_the_loop_times_every_library_and_the_share_of_its_quantizer(tmp_path):
    pytest.importorskip("vector_quantize_pytorch")
    out = tmp_path / "loop.csv"
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--commit", "c0ffee"]
    loop.main([*arguments, "--quantizers", "FSQ", "--runs", "eager"])
    assert [row["quantizer"] for row in read(out)] == ["identity", "FSQ"] * 2
    before = read(out)
    loop.main(arguments)
    rows = read(out)
    assert rows[:4] == before, "what was measured is measured again"
    assert tuple(rows[0]) == loop.COLUMNS
    assert len(rows) == 3 * len(loop.QUANTIZERS), "both cases eager, one compiled"
    by = {(row["case"], row["quantizer"], row["run"]): row for row in rows}
    for (case, name, run), row in by.items():
        assert row["ms"], row["note"]
        base = float(by[case, "identity", run]["ms"])
        if name != "identity":
            assert float(row["quantizer_ms"]) == pytest.approx(float(row["ms"]) - base, abs=2e-4)
            share = 100 * float(row["quantizer_ms"]) / float(row["ms"])
            assert float(row["share_percent"]) == pytest.approx(share, abs=0.1)
        if name.startswith("topovq"):
            assert row["note"] == "", "the compiler does not see the whole model"


def test_the_loop_says_why_a_library_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vector_quantize_pytorch", None)
    out = tmp_path / "loop.csv"
    quick = ["--device", "cpu", "--quick", "--cases", "vqvae", "--quantizers", "FSQ", "--runs", "eager"]
    loop.main([*quick, "--out", str(out)])
    _, fsq = read(out)
    assert fsq["ms"] == ""
    assert "vector_quantize_pytorch" in fsq["note"]


def test_the_loop_trains():
    case = loop.quick(loop.CASES[0])
    for make in loop.QUANTIZERS.values():
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        model = loop.Autoencoder(case, make(case.code_dim, case.codebook_size))
        batches = loop.smooth_images(case, cpu)[:1]
        step, before = loop.training_step(model, model, batches, cpu), model(batches[0]).item()
        for _ in range(60):
            step()
        assert model(batches[0]).item() < before


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
