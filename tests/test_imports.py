"""The house: imports point one way, and the core needs little."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import topovq

PACKAGE = Path(topovq.__file__).parent

# From the door to the cellar: a room may import those below it, never those above (docs/explanation/house.md says why).
FLOORS = {
    5: ["__main__", "cli", "commands", "demo", "demo_generate", "exits"],
    4: ["view", "loading"],
    3: ["prior", "tokenizer"],
    2: ["som", "callbacks", "convert", "interop"],
    1: [
        "quantizers",
        "pretrained",
        "storage",
        "codebook",
        "state",
        "metrics",
        "rules",
        "drawing",
        "ops",
        "neighborhood",
        "grid",
        "distributed",
        "cluster",
        "missing",
        "panel",
    ],
}
ROOMS = [room for floor in FLOORS.values() for room in floor]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
CORE = ["ops", "grid", "neighborhood", "codebook", "rules", "quantizers", "interop", "convert"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "topovq":
            names = [node.module] if node.module != "topovq" else [f"topovq.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "topovq"]
        else:
            continue
        found |= {name.split(".")[1] for name in names if "." in name}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = ROOMS.index(room_of(path))
    for room in imported_rooms(path) - {room_of(path)}:
        assert room in ROOMS, f"{path.name} imports topovq.{room}, which has no place in the house"
        assert ROOMS.index(room) > here, f"{room_of(path)} imports {room}, which is above it"


def test_mypy_is_strict_on_the_core_floor():
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["tool"]["mypy"]
    strict = next(each for each in settings["overrides"] if each.get("disallow_untyped_defs"))
    assert {name.removeprefix("topovq.").removesuffix(".*") for name in strict["module"]} == set(FLOORS[1])


def test_no_two_modules_have_one_name():
    """But for kernels, which are named as their operation."""
    names = [path.stem for path in FILES if path.stem != "__init__" and path.parent != PACKAGE / "ops" / "triton"]
    assert sorted(names) == sorted(set(names))


def test_the_page_on_the_house_says_the_same():
    page = (PACKAGE.parents[1] / "docs" / "explanation" / "house.md").read_text()
    told: dict[int, set[str]] = {}
    for floor, rooms in re.findall(r"^\| (\d) \| ([^|]*) \|", page, re.MULTILINE):
        told.setdefault(int(floor), set()).update(re.findall(r"`(\w+)/?`", rooms))
    assert told == {floor: set(rooms) - {"__main__"} for floor, rooms in FLOORS.items()}


def test_the_core_imports_with_torch_numpy_and_safetensors_alone():
    """In a fresh process in which everything else that topovq depends on cannot be imported."""
    blocked = [
        "huggingface_hub",
        "PIL",
        "tyro",
        "rich",
        "matplotlib",
        "sklearn",
        "skimage",
        "pyarrow",
        "scipy",
        "constriction",
    ]
    code = f"""
import sys
import tempfile
for name in {blocked}:
    sys.modules[name] = None
import torch
import topovq
for name in {CORE}:
    __import__("topovq." + name)
assert "triton" not in sys.modules or torch.cuda.is_available(), "the kernels are for CUDA alone"
vq = topovq.KohonenVQ(4, 16)
vq(torch.randn(8, 4))
with tempfile.TemporaryDirectory() as folder:
    vq.save_pretrained(folder)
    assert torch.equal(topovq.KohonenVQ.from_pretrained(folder).codebook, vq.codebook)
try:
    topovq.KohonenVQ.from_pretrained("somebody/something")
except ImportError as error:
    assert "pip install 'topovq[train]'" in str(error)
else:
    raise AssertionError("a name on the Hub without huggingface_hub should say what to install")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
