"""The page on maps says what the benchmarks measured."""

import csv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_of_the_page_is_that_of_the_records():
    with open(ROOT / "benchmarks" / "results" / "som.csv") as file:
        fits = [row for row in csv.DictReader(file) if row["measure"].startswith("fit")]
    lines = (ROOT / "docs" / "som.md").read_text().splitlines()
    assert len(fits) > 10
    for row in fits:
        (line,) = [line for line in lines if line.startswith(f"| {row['name']} ")]
        errors = f"{float(row['quantization_error']):.3f} / {float(row['topographic_error']):.3f}"
        assert f"{float(row['seconds']):.3g} | {errors}" in line


def test_what_the_page_says_of_a_gpu_is_what_the_records_say():
    with open(ROOT / "benchmarks" / "results" / "som_gpu.csv") as file:
        rows = {row["measure"]: row for row in csv.DictReader(file)}
    page = " ".join((ROOT / "docs" / "som.md").read_text().split())
    fit = rows["fit"]
    assert (fit["samples"], fit["features"], fit["codes"], fit["passes"]) == ("10000000", "64", "65536", "10")
    assert fit["hardware"] in page
    whole, search, predict = (float(rows[name]["seconds"]) for name in ("fit", "search alone, a pass", "predict"))
    assert f"take {whole:.2f} s, of which 12 searches at {search:.3f} s each are {12 * search / whole:.0%}" in page
    assert f"`predict` takes {predict:.3f} s" in page
    assert f"{float(fit['peak_mib']) / 1024:.1f} GiB beside the data ({10**7 * 64 * 4 / 2**30:.1f} GiB)" in page
    errors = float(fit["quantization_error"]), float(fit["topographic_error"])
    assert f"The quantization error is {errors[0]:.3f}, the topographic error {errors[1]:.3f}." in page
