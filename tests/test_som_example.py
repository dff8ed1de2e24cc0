"""The example runs, and finds what is known of its data."""

import csv
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "wine_map.py"


def test_wine_map(tmp_path):
    process = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path],
        capture_output=True, text=True, check=False, env=os.environ | {"MPLBACKEND": "Agg"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("cluster") == 3
    share = int(process.stdout.split("cultivar: ")[1].split("%")[0])
    assert share > 90
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "code_projection", "component_planes", "hit_map", "label_map", "training_curves", "u_matrix",
    ]  # fmt: skip


def test_the_table_of_the_page_is_that_of_the_records():
    root = EXAMPLE.parent.parent
    with open(root / "benchmarks" / "results" / "som.csv") as file:
        fits = [row for row in csv.DictReader(file) if row["measure"].startswith("fit")]
    lines = (root / "docs" / "som.md").read_text().splitlines()
    assert len(fits) > 10
    for row in fits:
        (line,) = [line for line in lines if line.startswith(f"| {row['name']} ")]
        errors = f"{float(row['quantization_error']):.3f} / {float(row['topographic_error']):.3f}"
        assert f"{float(row['seconds']):.3g} | {errors}" in line
