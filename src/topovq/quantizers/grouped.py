"""GroupedResidualVQ: channels in groups, each with its own ResidualVQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.pretrained import HubModule
from topovq.quantizers.kohonen import KohonenVQ
from topovq.quantizers.quantizer import Quantizer
from topovq.quantizers.residual import ResidualVQ, residual_as_saved
from topovq.quantizers.results import Quantized


class GroupedResidualVQ(Quantizer, HubModule):
    """`quantized, indices, losses = GroupedResidualVQ(dim, codebook_size, num_quantizers=4, groups=2)(x)`.

    indices [groups, ..., quantizers], losses [groups, quantizers]. All further options go to each ResidualVQ.
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int | Sequence[int],
        num_quantizers: int | None = None,
        *,
        groups: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(groups, int) or groups < 1 or dim % groups:
            raise ValueError(f"groups={groups!r} must be an int of at least 1 that divides dim={dim}")
        self.dim = dim
        self.groups = groups
        self.rvqs = nn.ModuleList(
            ResidualVQ(dim // groups, codebook_size, num_quantizers, **options) for _ in range(groups)
        )
        named = self._groups()[0]._hub_mixin_config
        settings = {name: named[name] for name in ("neighborhood", "neighbor_reduction") if name in named}
        (getattr(self, "_hub_mixin_config", None) or {}).update(settings)

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Self:
        return super()._from_pretrained(**residual_as_saved(arguments))

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """As ResidualVQ.forward, for each group; with return_all_codes=True the codes of each group are a tuple."""
        if x.ndim < 2 or x.shape[self._channels] != self.dim:
            raise ValueError(f"x of shape {tuple(x.shape)} must have dim = {self.dim} channels at {self._channels}")
        dropout = self._groups()[0].dropout
        if dropout is not None and self.training:
            # One draw for all groups.
            seed = options.pop("rand_quantize_dropout_fixed_seed", None)
            options["dropped_after"] = dropout.draw(x.device, seed)
        parts = [rvq(part, *arguments, **options) for rvq, part in zip(self.rvqs, x.chunk(self.groups, self._channels))]
        quantized, indices, losses, *codes = zip(*parts)
        made = Quantized(torch.cat(quantized, self._channels), torch.stack(indices), torch.stack(losses))
        return (*made, *codes) if codes else made

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """[groups, quantizers, ...]: what ResidualVQ.get_codes_from_indices gives for each group."""
        return torch.stack([rvq.get_codes_from_indices(tokens) for rvq, tokens in self._with_tokens(indices)])

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """What `forward` returned as `quantized` for these tokens [groups, ..., quantizers]."""
        parts = [rvq.get_output_from_indices(tokens) for rvq, tokens in self._with_tokens(indices)]
        return torch.cat(parts, self._channels)

    def coords(self, indices: Tensor) -> Tensor:
        """Places of tokens on the maps, int64 [groups, ..., quantizers, grid axes]."""
        return torch.stack([rvq.coords(tokens) for rvq, tokens in self._with_tokens(indices)])

    def _with_tokens(self, indices: Tensor) -> list[tuple[ResidualVQ, Tensor]]:
        if indices.shape[:1] != (self.groups,):
            raise ValueError(
                f"tokens of shape {tuple(indices.shape)} must begin with {self.groups}, the number of groups"
            )
        return list(zip(self._groups(), indices))

    def _groups(self) -> list[ResidualVQ]:
        return [rvq for rvq in self.rvqs if isinstance(rvq, ResidualVQ)]

    @property
    def _channels(self) -> int:
        return -1 if self._groups()[0]._keeps_channels_last else 1

    @property
    def quantizers(self) -> list[KohonenVQ]:
        return [vq for rvq in self._groups() for vq in rvq.quantizers]

    @property
    def maps(self) -> list[Codebook]:
        return [book for rvq in self._groups() for book in rvq.maps]

    @property
    def skipped(self) -> Tensor:
        """As in every quantizer, over the groups."""
        return torch.stack([rvq.skipped for rvq in self._groups()]).sum()

    @property
    def codebooks(self) -> Tensor | tuple[Any, ...]:
        """[groups, quantizers, K, D]; a tuple of what each ResidualVQ has where sizes differ."""
        codes = [rvq.codebooks for rvq in self._groups()]
        alike = [part for part in codes if isinstance(part, Tensor)]
        return torch.stack(alike) if alike else tuple(codes)

    @property
    def codebook(self) -> Tensor | tuple[Any, ...]:
        return self.codebooks
