"""What quantizers in a row or side by side share: figures over all of them, freezing, accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.health import Health, as_health, together
from topovq.quantizers.kohonen import KohonenVQ


class Stack:
    """Several quantizers. Those that share one codebook are one where figures are added up."""

    @property
    def quantizers(self) -> list[KohonenVQ]:
        raise NotImplementedError

    def _distinct(self) -> list[KohonenVQ]:
        return list({id(vq.codebooks): vq for vq in self.quantizers}.values())

    def _have_started(self) -> bool:
        """Whether no codebook is still to take its start from the data."""
        books = [book for vq in self._distinct() for book in vq._books()]
        for book in books:
            book.settle()
        return all(book.is_initialized for book in books)

    @property
    def codebook_size(self) -> int:
        """Of the first quantizer."""
        return self.quantizers[0].codebook_size

    @property
    def grid(self) -> Grid:
        """Of the first quantizer."""
        return self.quantizers[0].grid

    @property
    def perplexity(self) -> Tensor:
        """The mean over the quantizers, 0-dim."""
        return torch.stack([vq.perplexity for vq in self._distinct()]).mean()

    @property
    def usage(self) -> Tensor:
        """The mean over the quantizers, 0-dim."""
        return torch.stack([vq.usage for vq in self._distinct()]).mean()

    def read_health(self) -> Tensor:
        return together([vq.read_health() for vq in self._distinct()])

    def health(self) -> Health:
        """As KohonenVQ.health, over all of them: dead codes are added up, the others are means."""
        return as_health(self.read_health().tolist())

    @property
    def skipped(self) -> Tensor:
        return self.quantizers[0].skipped

    @property
    def step(self) -> Tensor:
        return self.quantizers[0].step

    def freeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """As KohonenVQ.freeze, in all of them."""
        for vq in self.quantizers:
            vq.freeze(indices)

    def unfreeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """As KohonenVQ.unfreeze, in all of them."""
        for vq in self.quantizers:
            vq.unfreeze(indices)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """As KohonenVQ.accumulate, for all of them."""
        with ExitStack() as stack:
            for vq in self._distinct():
                stack.enter_context(vq.accumulate())
            yield
