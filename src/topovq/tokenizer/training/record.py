"""The run's record: one flat JSON object a line, appended as things happen.

The first line has `event: config` (the resolved configuration, the code's commit, versions, hardware, seed); then
`validation` lines (`step`, `loss`, `perplexity`, `usage`, ...), `resumed` lines where a run was continued, one `final`.
In a validation line `perplexity` and `usage` are of the validation set; `train_perplexity`, `train_usage`, `dead_codes`
are of the last training batches, and `drift` is how far the codes moved in the last `drift_steps` steps (metrics.py).
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from topovq.storage import append, write_atomic

RECORD_FILE = "record.jsonl"
VERSIONS_OF = (
    "topovq",
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "pillow",
    "scikit-image",
    "scikit-learn",
    "vector-quantize-pytorch",
)


class Record:
    """Appends lines to `path`; each is on the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, **config: Any) -> None:
        """Make the file with its first line: a record without one would be no record."""
        write_atomic(self.path, _line({"event": "config", **config}))

    def append(self, event: str, **fields: Any) -> None:
        append(self.path, _line({"event": event, **fields}))

    def rewind(self, step: int, **config: Any) -> None:
        """Go back to a checkpoint at `step`: later lines and a half-written last one go; the first becomes `config`."""
        kept = [line for line in read_record(self.path)[1:] if line["event"] != "final" and line["step"] <= step]
        write_atomic(self.path, b"".join(map(_line, [{"event": "config", **config}, *kept])))


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; a last line without its line end was never finished and is left out."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no record at {path}") from None
    whole = text[: text.rfind(b"\n") + 1]
    lines = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): {line[:80]!r}") from None
    if not lines or lines[0].get("event") != "config":
        raise ValueError(f"{path} is not a run's record: its first line must be a 'config' event")
    return lines


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """What a result may depend on besides the configuration."""
    cuda = device.type == "cuda"
    return {
        **_commit(),
        **{f"version_{name}": version for name in VERSIONS_OF if (version := _version(name))},
        "version_python": platform.python_version(),
        "version_cuda": torch.version.cuda if cuda else None,
        "hardware": torch.cuda.get_device_name(device) if cuda else _processor(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def _line(fields: dict[str, Any]) -> bytes:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _commit() -> dict[str, Any]:
    """The commit of the checkout this file runs from, and whether it has changes; empty outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}  # installed, perhaps below somebody else's repository
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain", "--", ".")),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"
