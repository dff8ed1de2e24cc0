"""Quantizer: the one type that all quantizers are, for those who train them, watch them and draw their maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.grid import Grid, check_range
from topovq.metrics import Health, as_health, health_of_all
from topovq.quantizers import portrait
from topovq.quantizers.repair import advice, repair


class Quantizer(nn.Module):
    """Vectors become codes and tokens; codes live on maps and learn in training mode.

    A subclass gives `maps`, `forward` and the three methods on tokens. One whose codes have no places has no maps, and
    gives `codebook_size` and the figures itself.
    """

    graphable = True
    """Whether a training step may be compiled and replayed as a CUDA graph: nothing waits for the device."""

    def __init__(self) -> None:
        """The class says what the arguments are."""
        super().__init__()

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Quantize x, to a Quantized; what else `options` ask for comes after its three values."""
        raise NotImplementedError

    # Tokens

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """Codes of tokens, before any projection out; zeros for a token of -1."""
        raise NotImplementedError

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """What `forward` returned as `quantized` for these tokens."""
        raise NotImplementedError

    def coords(self, indices: Tensor) -> Tensor:
        """Places of tokens on their maps, int64 [..., grid axes]; -1 for masked ones."""
        raise NotImplementedError

    # The codebooks

    @property
    def maps(self) -> list[Codebook]:
        """The codebook of each token that a vector becomes, in the order of the tokens; some may be the same."""
        raise NotImplementedError

    def books(self) -> list[Codebook]:
        """The codebooks, each once."""
        found = list({id(book): book for book in self.maps}.values())
        if not found:
            raise AttributeError(f"{type(self).__name__} has no map: its codes have no places")
        return found

    @property
    def codebook_size(self) -> int:
        """How many codes there are; of several codebooks, in the first."""
        return self.books()[0].size

    @property
    def grid(self) -> Grid:
        """The map; of several, the first."""
        return self.books()[0].neighborhood.grid

    def freeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """Stop these codes (default: all) from moving; they are still chosen."""
        self._set_frozen(indices, True)

    def unfreeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """Let these codes (default: all) move again."""
        self._set_frozen(indices, False)

    def _set_frozen(self, indices: Tensor | Sequence[int] | None, value: bool) -> None:
        places = slice(None) if indices is None else torch.as_tensor(indices)
        books = self.books()
        if isinstance(places, Tensor):
            check_range("code", places, min(book.size for book in books))
        for book in books:
            book.frozen[places] = value

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradient accumulation: forwards within gather statistics; the first one outside moves the codes by all."""
        with ExitStack() as stack:
            for book in self.books():
                stack.enter_context(book.accumulate_updates())
            yield

    # To look at

    def plot(self) -> Any:
        """Draw each codebook as it is now: codes colored by principal components, U-matrix, hits.

        Returns matplotlib's axes: [3], or [codebooks, 3] where there are several.
        """
        return portrait.plot(self.books())

    def _repr_html_(self) -> str | None:
        """What a notebook shows: figures and maps. None, for the usual text, where the codes have no places."""
        return portrait.html_panel(type(self).__name__, self.books()) if self.maps else None

    # Figures, over all ranks, without waiting for the device

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy) of the running use of the codes, 0-dim; the mean over codebooks."""
        return torch.stack([book.perplexity() for book in self.books()]).mean()

    @property
    def usage(self) -> Tensor:
        """Share of codes chosen in the last 1/(1 - decay) updates, 0-dim; the mean over codebooks."""
        return torch.stack([book.usage() for book in self.books()]).mean()

    def read_health(self) -> Tensor:
        """The figures of `health()`, float32 [6] on the device: for those who cannot wait for it."""
        return health_of_all([book.read_health() for book in self.books()])

    def health(self) -> Health:
        """Usage, perplexity, dead codes (not chosen in the last 1/(1 - decay) updates) and drift: how far the codes
        moved since this was last asked, in units of their spread (nan the first time). `advice` names codes that are
        not finite or far outside the data, and says what to do. Waits for the device."""
        health = as_health(self.read_health().tolist())
        return health._replace(advice=advice(self.books())) if health.stray_codes else health

    def repair(self) -> int:
        """Put codes that are not finite or far outside the data (`health().advice` names them) between their neighbors
        on the map; how many there were. Waits for the device."""
        return sum(repair(book) for book in self.books())

    @property
    def skipped(self) -> Tensor:
        """How many vectors training has left out so far, int64, 0-dim: NaN, infinity, or far from all others."""
        return torch.stack([book.skipped for book in self.books()]).sum()

    @property
    def step(self) -> Tensor:
        """Codebook updates so far, int64, 0-dim; of several codebooks, of the first."""
        return self.books()[0].step
