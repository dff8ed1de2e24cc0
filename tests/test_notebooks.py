"""Every notebook runs top to bottom, in little time, and shows what it is there to show.

The cells are run as a notebook runs them: in a namespace of their own, and the value of a last line without a semicolon
is shown, as HTML where it has that. No kernel is needed for it: the cells use nothing of IPython's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from warm import python

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
MOST_SECONDS = 15  # on one core
RUNNER = """
import ast, json, sys, time
import matplotlib.pyplot as plt

def run(cells, check):
    plt.close("all")
    began, names, shown = time.process_time(), {"__name__": "__main__"}, []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) and not source.endswith(";") else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
            if value is not None:
                html = getattr(value, "_repr_html_", None)
                shown.append(html() if html else repr(value))
    exec(check, names | {"shown": shown})
    return {"seconds": time.process_time() - began, "figures": len(plt.get_fignums()), "shown": len(shown)}

told = {}
for path, check in json.loads(sys.argv[1]).items():
    told[path] = run(json.load(open(path))["cells"], check)
print(json.dumps(told))
"""
# What holds when the last cell has run, how many figures were drawn, and how many values were shown.
EXPECTED = {
    "first_quantizer.ipynb": (
        "assert vq.usage > 0.9 and errors[-1] < 0.3 * errors[0] and moved < drawn / 2; assert 'updates' in shown[0]",
        (3, 2),
    ),
    "collapse_cured.ipynb": (
        "assert alone.usage < 0.1 and mapped.usage > 0.5; assert history_mapped[-1][2] < history_alone[-1][2]",
        (3, 2),
    ),
    "map_of_a_table.ipynb": (
        "assert som.topographic_error_ < 0.1 and agree > 0.9; assert 'topographic error' in shown[0]",
        (3, 1),
    ),
}


def test_every_notebook_is_tried_here():
    assert {path.name for path in NOTEBOOKS.iterdir() if path.suffix == ".ipynb"} == set(EXPECTED)


def test_they_run_from_top_to_bottom(tmp_path):
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    checks = {str(NOTEBOOKS / name): check for name, (check, _) in EXPECTED.items()}
    done = python("-c", RUNNER, json.dumps(checks), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for path, told in json.loads(done.stdout.splitlines()[-1]).items():
        assert (told["figures"], told["shown"]) == EXPECTED[Path(path).name][1], path
        assert told["seconds"] < MOST_SECONDS, path
    assert list(tmp_path.iterdir()) == []  # they leave nothing behind


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_committed_without_outputs(name):
    book = json.loads((NOTEBOOKS / name).read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert book["cells"][0]["source"][0].startswith("# ")
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
