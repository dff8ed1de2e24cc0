"""ResidualVQ: quantizers in a row, each of which quantizes what the ones before it left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from topovq.grid import Grid
from topovq.health import Health, as_health, together
from topovq.quantizers.base import Quantized
from topovq.quantizers.gradient import REDUCTION, REDUCTION_BEFORE, GradientVQ
from topovq.quantizers.kohonen import KohonenVQ, drop_ignored
from topovq.quantizers.soft import SoftKohonenVQ
from topovq.saving import HubModule

QUANTIZERS: dict[str, type[KohonenVQ]] = {"kohonen": KohonenVQ, "gradient": GradientVQ, "soft": SoftKohonenVQ}


class ResidualVQ(nn.Module, HubModule):
    """`quantized, indices, loss = ResidualVQ(dim, codebook_size, num_quantizers=4)(x)`.

    indices get one more axis, last: one token per quantizer. The loss is the sum of theirs, the gradient of the output
    the mean of theirs: with straight-through, x gets it once, however many quantizers there are.
    quantizer  "kohonen", "gradient" or "soft"; all further options go to each of them
    """

    def __init__(
        self, dim: int, codebook_size: int, num_quantizers: int, *, quantizer: str = "kohonen", **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(num_quantizers, int) or num_quantizers < 1:
            raise ValueError(f"num_quantizers={num_quantizers!r} must be an int of at least 1")
        if quantizer not in QUANTIZERS:
            choices = ", ".join(map(repr, QUANTIZERS))
            raise ValueError(f"quantizer={quantizer!r} is unknown; choose one of {choices}")
        if options.get("heads", 1) != 1:
            raise ValueError(f"heads={options['heads']!r}: a residual quantizer has one head; use more quantizers")
        kind = QUANTIZERS[quantizer]
        if kind is GradientVQ:
            options = {**REDUCTION, **options}
            (getattr(self, "_hub_mixin_config", None) or {}).update(neighbor_reduction=options["neighbor_reduction"])
        self.layers = nn.ModuleList(kind(dim, codebook_size, **options) for _ in range(num_quantizers))

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Any:
        before = REDUCTION_BEFORE if arguments.get("quantizer") == "gradient" else {}
        return super()._from_pretrained(**{**before, **drop_ignored(arguments)})

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        lens: Tensor | None = None,
        freeze_codebook: bool | None = None,
        **unsupported: Any,
    ) -> Quantized:
        left, total = x, torch.zeros_like(x)
        tokens, losses = [], []
        for layer in self.layers:
            quantized, indices, loss = layer(left, mask=mask, lens=lens, freeze_codebook=freeze_codebook, **unsupported)
            left = left - quantized.detach()
            total = total + quantized
            tokens.append(indices)
            losses.append(loss)
        # Each layer hands its output's gradient on to x; their mean is what one quantizer's would be.
        value = total.detach()
        total = value + (total - value) / len(self.layers)
        return Quantized(total, torch.stack(tokens, -1), torch.stack(losses).sum())

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """Codes of each quantizer, [quantizers, ...] in the layout of one."""
        return torch.stack([vq.get_codes_from_indices(tokens) for vq, tokens in self._with_tokens(indices)])

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """What `forward` returned as `quantized` for these tokens; a token of -1 adds nothing."""
        parts = [vq.get_output_from_indices(tokens) for vq, tokens in self._with_tokens(indices)]
        total = torch.zeros_like(parts[0])
        for part in parts:  # added in the order of `forward`, so that both agree bit for bit
            total = total + part
        return total

    def coords(self, indices: Tensor) -> Tensor:
        """Places of tokens on the maps, int64 [..., quantizers, grid axes]."""
        return self.quantizers[0].coords(indices)

    def _with_tokens(self, indices: Tensor) -> list[tuple[KohonenVQ, Tensor]]:
        if indices.shape[-1:] != (len(self.layers),):
            raise ValueError(
                f"tokens of shape {tuple(indices.shape)} must end in {len(self.layers)}, the number of quantizers"
            )
        return list(zip(self.quantizers, indices.unbind(-1)))

    @property
    def quantizers(self) -> list[KohonenVQ]:
        return [layer for layer in self.layers if isinstance(layer, KohonenVQ)]

    @property
    def codebook(self) -> Tensor:
        """[quantizers, K, D]."""
        return torch.stack([vq.codebook for vq in self.quantizers])

    @property
    def codebook_size(self) -> int:
        return self.quantizers[0].codebook_size

    @property
    def grid(self) -> Grid:
        return self.quantizers[0].grid

    @property
    def perplexity(self) -> Tensor:
        """The mean over the quantizers, 0-dim."""
        return torch.stack([vq.perplexity for vq in self.quantizers]).mean()

    @property
    def usage(self) -> Tensor:
        """The mean over the quantizers, 0-dim."""
        return torch.stack([vq.usage for vq in self.quantizers]).mean()

    def read_health(self) -> Tensor:
        return together([vq.read_health() for vq in self.quantizers])

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
            for vq in self.quantizers:
                stack.enter_context(vq.accumulate())
            yield
