"""The paper's main table, ours beside theirs, from the records of this repository: nothing is trained.

python examples/paper_table.py [TABLE]    sensitivity, main, robustness, ablation or gradient

To train it yourself: python -m experiments main, on a GPU, or with --quick on the CPU.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
table = sys.argv[1] if len(sys.argv) > 1 else "main"
with tempfile.TemporaryDirectory() as out:
    command = [sys.executable, "-m", "experiments", table, "--render-only", "--format", "markdown", "--out", out]
    subprocess.run(command, cwd=ROOT, check=True)
