"""The run's record: one flat JSON object a line, appended as things happen.

The first line has `event: config` (the resolved configuration, the code's commit, versions, hardware, seed); then
`validation` lines (`step`, `loss`, `perplexity`, `usage`, ...), `trace` lines where they were asked for (trace.py),
`resumed` lines where a run was continued, one `final`.
Usage is one thing everywhere: the share of the K codes that are chosen at least once in a stated number of tokens. In a
validation line `usage` and `perplexity` are of the `tokens` of the validation images; `train_usage`,
`train_perplexity` and `dead_codes` are of the last `train_tokens` tokens in training. `train_loss` is the mean of the
training steps since the last validation (or since the run was resumed), the same measure as `loss`. `drift` is how far
the codes moved in the last `drift_steps` steps (metrics.py).
Each line ends with a `crc32` of what comes before it, which readers check and leave out; older records have none.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from topovq.storage import append, write_atomic

RECORD_FILE = "record.jsonl"
MOST_BYTES = 1 << 26
CHECKSUM = "crc32"  # the last field of a line: of all that comes before it
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


# The numbers that those who read an event rely on; of any other event it is the step.
FIELDS: dict[str, tuple[str, ...]] = {
    "config": (),
    "validation": ("step", "loss"),
    "final": ("step", "steps", "best_loss", "seconds"),
}


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
    if not path.is_file():  # a named pipe would be waited at for ever
        raise FileNotFoundError(f"there is no record at {path}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; no record has more than {MOST_BYTES:,}")
    text = path.read_bytes()
    lines, checked = [], set()
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        where = f"{path}, line {number}"
        fields, has_sum = _parse(line, where)
        checked.add(has_sum)
        needed = FIELDS.get(fields["event"], ("step",))
        if not all(_fits(fields, name) for name in needed):
            raise ValueError(f"{where} is no line of a record; expected {', '.join(needed)} in {line[:80]!r}")
        lines.append(fields)
    if not lines or lines[0]["event"] != "config" or any(line["event"] == "config" for line in lines[1:]):
        raise ValueError(f"{path} is not a run's record: its first line must be a 'config' event, and no other")
    if len(checked) > 1:
        raise ValueError(f"{path} is damaged: some of its lines have a {CHECKSUM}, and some have none")
    return lines


def _parse(line: bytes, where: str) -> tuple[dict[str, Any], bool]:
    """The fields of a line without its checksum, and whether it has one, which is then right."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): {line[:80]!r}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise ValueError(f"{where} is no line of a record; expected an object with an event, not {line[:80]!r}")
    told = fields.pop(CHECKSUM, None)
    if told is not None and line != _with_sum(line[: line.rfind(b", ")]):
        raise ValueError(
            f"{where} is damaged or was changed: its {CHECKSUM} is not {told!r}. If you changed it yourself, take the "
            f"{CHECKSUM} out of every line"
        )
    return fields, told is not None


def _with_sum(start: bytes) -> bytes:
    """A line from its fields, `{"event": ..., ...` without the last brace."""
    return start + f', "{CHECKSUM}": "{zlib.crc32(start):08x}"}}'.encode()


def _fits(fields: dict[str, Any], name: str) -> bool:
    """Whether a field that readers rely on is there, a whole number or one that may be null where it was not finite."""
    value = fields.get(name, "missing")
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return whole if name in ("step", "steps") else whole or value is None or isinstance(value, float)


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


def finite(value: Any) -> Any:
    """The value as JSON may hold it: numbers that are not finite become null, at any depth."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(fields: dict[str, Any]) -> bytes:
    return _with_sum(json.dumps(finite(fields), allow_nan=False).encode()[:-1]) + b"\n"


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
