"""Every example runs as a user would run it, and shows what it is there to show."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from warm import python

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"train_on_ray.py": "test_on_ray.py"}  # where there is a cluster already
ENVIRONMENT = os.environ | {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def run(name: str, *arguments: str | Path, cwd: Path, **environment: str) -> str:
    done = python(EXAMPLES / name, *arguments, cwd=cwd, env=ENVIRONMENT | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_short_and_tried_here():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path.name
        tests = Path(__file__).with_name(ELSEWHERE.get(path.name, "test_examples.py")).read_text()
        assert f'"{path.name}"' in tests, f"{path.name} has no test"


def test_codes_in_use(tmp_path):
    output = run("codes_in_use.py", cwd=tmp_path)
    (map_error, map_usage), (error, usage) = re.findall(r"error ([\d.]+), (\d+)% of the codes in use", output)
    assert int(map_usage) > 50 > 10 > int(usage)
    assert float(map_error) < float(error)


def test_replace_quantizers(tmp_path):
    pytest.importorskip("vector_quantize_pytorch", reason="the example replaces its quantizer")
    output = run("replace_quantizers.py", cwd=tmp_path)
    assert output.count("['vq']") == 2
    assert output.count("the same tokens: True") == 2
    assert "of the original class: True" in output


def test_my_pictures(tmp_path):
    output = run("my_pictures.py", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert "80 pictures, columns image, tokens, 64 tokens each" in output
    (work,) = tmp_path.glob("my_pictures_*")
    assert len(list((work / "decoded").iterdir())) == 80
    assert float(re.search(r"PSNR ([\d.]+)", output)[1]) > 15


def test_paper_table(tmp_path):
    output = run("paper_table.py", cwd=tmp_path)
    assert "loss ours" in output
    assert re.search(r"^\| ksom \| hard \| \d+ \| \d+\.\d+ ± ", output, re.MULTILINE)


def page_at(address: str) -> bytes:
    """What the server answers; its address is printed a moment before it listens."""
    for _ in range(200):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(address) as page:
            return page.read()
        time.sleep(0.1)
    raise AssertionError(f"nothing answers at {address}")


def test_explore_a_run(tmp_path):
    command = [sys.executable, EXAMPLES / "explore_a_run.py"]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        assert b"<title>" in page_at(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_wine_map(tmp_path):
    output = run("wine_map.py", tmp_path, cwd=tmp_path)
    assert output.count("cluster") == 3
    assert int(re.search(r"cultivar: (\d+)%", output)[1]) > 90
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "code_projection", "component_planes", "hit_map", "label_map", "training_curves", "u_matrix",
    ]  # fmt: skip
