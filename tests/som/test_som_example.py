"""The example runs, and finds what is known of its data."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "wine_map.py"


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
