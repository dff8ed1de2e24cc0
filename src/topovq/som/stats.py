"""Stats: what some rows of a table say, as sums that add up.

The batch rule needs sums over all rows and nothing else. So any parts of a table can be looked at anywhere, in any
order, and what they say is added: `a + b`, `sum(parts)`, or `Stats.merge(parts)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from topovq.storage import DamagedFile

FORMAT = "topovq stats 1"
NUMBERS = 16  # of the codes, by which they are known again
ALIKE = 1e-3  # of the codes' deviation: what copies of a map may differ by that add up in orders of their own


@dataclass(frozen=True)
class Asked:
    """The codes that statistics are of: how many passes moved them, and some of their numbers."""

    passes: int
    numbers: tuple[float, ...]
    deviation: float

    @staticmethod
    def about(codes_KD: np.ndarray, passes: int) -> Asked:
        every = codes_KD.reshape(-1)
        chosen = every[np.linspace(0, every.size - 1, min(NUMBERS, every.size)).round().astype(np.int64)]
        return Asked(int(passes), tuple(chosen.astype(np.float64).tolist()), float(codes_KD.std(0).max()))

    @staticmethod
    def read(told: str | None) -> Asked | None:
        """What `json.dumps(asdict(self))` made."""
        if told is None:
            return None
        fields = json.loads(told)
        return Asked(int(fields["passes"]), tuple(map(float, fields["numbers"])), float(fields["deviation"]))

    def like(self, other: Asked) -> bool:
        """Whether both are the same codes, or copies of one map that two machines moved alike."""
        if self.passes != other.passes or len(self.numbers) != len(other.numbers):
            return False
        within = ALIKE * max(self.deviation, other.deviation)
        return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=within) for a, b in zip(self.numbers, other.numbers))


class Stats(Mapping[str, Tensor]):
    """Sums by name: float64 tensors, on the device where they were made.

    What `SelfOrganizingMap.statistics` gives has
        sums [K, D]         of the members of each code, each times its weight
        weights             of these members: [K, 1], or [K, D] where values are missing, one for each feature
        error, weight, rows of all rows: distance to the closest code times weight, weight, number
    They know which codes they are of: those of different ones do not add up, and `update` refuses them.
    """

    asked: Asked | None = None  # unknown, where they are of older versions or made by hand

    def __init__(self, **sums: Tensor) -> None:
        self._sums = sums

    def of(self, asked: Asked | None) -> Stats:
        """The same sums, of these codes."""
        stats = Stats(**self._sums)
        stats.asked = asked
        return stats

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Stats) -> Stats:
        if not isinstance(other, Stats):
            return NotImplemented
        if self.keys() != other.keys():
            raise ValueError(f"statistics of {', '.join(self)} and of {', '.join(other)} do not add up: they differ")
        if self.asked is not None and other.asked is not None and not self.asked.like(other.asked):
            raise ValueError(
                f"statistics of different codes (after {self.asked.passes} and {other.asked.passes} passes) do not add "
                "up: take all parts with the same codes"
            )
        try:
            sums = {name: value + other[name].to(value.device) for name, value in self.items()}
            return Stats(**sums).of(other.asked if self.asked is None else self.asked)
        except RuntimeError:
            shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in (self, other)]
            raise ValueError(f"statistics of shapes {shapes[0]} and {shapes[1]} do not add up") from None

    def __radd__(self, other: object) -> Stats:
        """`sum` starts at 0."""
        return self if other == 0 else NotImplemented

    @staticmethod
    def merge(parts: Iterable[Stats]) -> Stats:
        """The statistics of all parts together, added in the order they come in."""
        total = None
        for part in parts:
            total = part if total is None else total + part
        if total is None:
            raise ValueError("there are no statistics to merge: expected those of at least one part")
        return total

    def to_bytes(self) -> bytes:
        """All of it as safetensors."""
        sums = {name: value.detach().cpu().contiguous() for name, value in self.items()}
        asked = {} if self.asked is None else {"asked": json.dumps(asdict(self.asked))}
        return safetensors.torch.save(sums, metadata={"format": FORMAT, **asked})

    @staticmethod
    def from_bytes(data: bytes) -> Stats:
        """What `to_bytes` made, on the CPU."""
        try:
            sums = safetensors.torch.load(data)
            asked = Asked.read(_header(data).get("asked"))
        except (safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
            raise DamagedFile(f"these {len(data):,} bytes are no statistics: {error}") from None
        if any(value.dtype != torch.float64 for value in sums.values()):
            raise DamagedFile("these statistics are damaged: expected float64")
        return Stats(**sums).of(asked)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as bytes, so that a process without this device can read them."""
        return Stats.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return "Stats(" + ", ".join(f"{name}: {list(value.shape)}" for name, value in self.items()) + ")"


def _header(data: bytes) -> dict[str, str]:
    """What safetensors were saved with: eight bytes say how long the JSON is that has it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {})
