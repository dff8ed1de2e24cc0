"""The wheel, installed outside the repository: it is whole, and each extra brings what its part needs.

The environments are bare: they hold the wheel and links to those installed packages that its own metadata ask for,
directly or indirectly. What a part needs beyond that is not there, and nothing is downloaded.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import topovq

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "src")


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """What a command prints, on either stream."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode != 0) is fails, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the sdist, from a copy: nothing that an earlier build left can slip in."""
    folder = tmp_path_factory.mktemp("build")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def requirements(wheel: Path, extra: str) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": extra})]


def needed(wheel: Path, extra: str) -> dict[str, metadata.Distribution]:
    """The installed packages that `topovq[extra]` asks for, and those that they ask for, by name."""
    found: dict[str, metadata.Distribution] = {}
    seen = set()
    queue = requirements(wheel, extra)
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if requirement.name == "topovq":
            queue += [r for e in requirement.extras for r in requirements(wheel, e)]
            continue
        package = found[requirement.name] = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(package.version, prereleases=True), f"{requirement}: {package.version}"
        for further in map(Requirement, package.requires or []):
            if any(further.marker is None or further.marker.evaluate({"extra": e}) for e in {"", *requirement.extras}):
                queue.append(further)
    return found


def install(wheel: Path, extra: str, folder: Path) -> Path:
    """An environment in `folder` with the wheel and what it needs; returns its folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    for package in needed(wheel, extra).values():
        for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))
    programs = folder / "env" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    where = run(programs / "python", "-Ic", "import topovq; print(topovq.__file__)", cwd=folder)
    assert where.strip() == str(site / "topovq" / "__init__.py")
    return programs


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "topovq").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == files
    assert {"topovq/py.typed"} < held
    assert any(name.endswith("index.html") for name in held)


def test_the_version_is_that_of_the_package(wheel):
    assert wheel.name.split("-")[1] == topovq.__version__
    assert f"\nversion: {topovq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{topovq.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# What each of several lines of code raises; a process of its own for each, forked when torch is there
TRIES = """
import os, sys
import topovq
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(code)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_torch_numpy_and_safetensors_are_enough_for_the_layers(wheel, tmp_path):
    assert {r.name for r in requirements(wheel, "")} == {"torch", "numpy", "safetensors"}
    programs = install(wheel, "", tmp_path)
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "KohonenVQ" in snippet
    again = "vq.save_pretrained('saved'); assert torch.equal(KohonenVQ.from_pretrained('saved').codebook, vq.codebook)"
    run(programs / "python", "-Ic", f"{snippet}\n{again}", cwd=tmp_path)
    # What is missing is named.
    assert "pip install 'topovq[train]'" in run(programs / "topovq", "--help", cwd=tmp_path, fails=True)
    lacks = {
        "from topovq import SelfOrganizingMap": "som",
        "from topovq.tokenizer.training import train": "train",
        "from topovq.view.report import write_report": "train",
    }
    said = run(programs / "python", "-Ic", TRIES, *lacks, cwd=tmp_path).splitlines()
    for line, extra in zip(said, lacks.values(), strict=True):
        assert f"pip install 'topovq[{extra}]'" in line, line


def test_som_brings_the_estimators_and_their_pictures(wheel, tmp_path):
    code = (
        "import numpy as np; from topovq import SelfOrganizingMap; "
        "som = SelfOrganizingMap((3, 3)).fit(np.random.default_rng(0).normal(size=(50, 2))); som.plot('u_matrix')"
    )
    run(install(wheel, "som", tmp_path) / "python", "-Ic", code, cwd=tmp_path)


def test_train_brings_the_command_line(wheel, tmp_path):
    programs = install(wheel, "train", tmp_path)
    run(programs / "topovq", "demo", "--quick", "--out", "demo", cwd=tmp_path)
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
    said = run(programs / "topovq", "explore", "demo/kohonen", cwd=tmp_path, fails=True)
    assert "pip install 'topovq[view]'" in said


def test_view_brings_the_explorer(wheel, tmp_path):
    code = "import uvicorn; from topovq.view.explorer.app import create_app"
    run(install(wheel, "view", tmp_path) / "python", "-Ic", code, cwd=tmp_path)
