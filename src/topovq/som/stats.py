"""Stats: what some rows of a table say, as sums that add up.

The batch rule needs sums over all rows and nothing else. So any parts of a table can be looked at anywhere, in any
order, and what they say is added: `a + b`, `sum(parts)`, or `Stats.merge(parts)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from topovq.storage import DamagedFile

FORMAT = "topovq stats 1"


class Stats(Mapping[str, Tensor]):
    """Sums by name: float64 tensors, on the device where they were made.

    What `SelfOrganizingMap.statistics` gives has
        sums [K, D]         of the members of each code, each times its weight
        weights             of these members: [K, 1], or [K, D] where values are missing, one for each feature
        error, weight, rows of all rows: distance to the closest code times weight, weight, number
    """

    def __init__(self, **sums: Tensor) -> None:
        self._sums = sums

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Stats) -> Stats:
        if self.keys() != other.keys():
            raise ValueError(f"statistics of {', '.join(self)} and of {', '.join(other)} do not add up: they differ")
        try:
            return Stats(**{name: value + other[name].to(value.device) for name, value in self.items()})
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
        return safetensors.torch.save(sums, metadata={"format": FORMAT})

    @staticmethod
    def from_bytes(data: bytes) -> Stats:
        """What `to_bytes` made, on the CPU."""
        try:
            sums = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise DamagedFile(f"these {len(data):,} bytes are no statistics: {error}") from None
        if any(value.dtype != torch.float64 for value in sums.values()):
            raise DamagedFile("these statistics are damaged: expected float64")
        return Stats(**sums)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as bytes, so that a process without this device can read them."""
        return Stats.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return "Stats(" + ", ".join(f"{name}: {list(value.shape)}" for name, value in self.items()) + ")"
