"""Layouts: the inputs a quantizer takes become vectors with channels last on the way in, and their old layout after.

Legend: B batch, C channels (= `dim`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layout(nn.Module):
    """[B, ..., C]; [B, C, ...] with channel_last=False; [B, C, h, w] and [B, C, d, h, w] as feature maps."""

    def __init__(self, dim: int, channel_last: bool, accept_image_fmap: bool, accept_3d_fmap: bool) -> None:
        super().__init__()
        if accept_image_fmap and accept_3d_fmap:
            raise ValueError("accept_image_fmap and accept_3d_fmap exclude each other: choose the one your input has")
        self.dim = dim
        self.channel_last = channel_last
        self.accept_image_fmap = accept_image_fmap
        self.accept_3d_fmap = accept_3d_fmap

    def _check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"x must hold floating-point vectors, got {x.dtype}")
        if self.accept_image_fmap or self.accept_3d_fmap:
            axes, layout = (
                (4, "[B, C, height, width]") if self.accept_image_fmap else (5, "[B, C, depth, height, width]")
            )
            if x.ndim != axes or x.shape[1] != self.dim:
                raise ValueError(f"x of shape {tuple(x.shape)} must be {layout} with C = dim = {self.dim}")
        elif not self.channel_last:
            if x.ndim < 2 or x.shape[1] != self.dim:
                raise ValueError(f"x of shape {tuple(x.shape)} must be [B, C, ...] with C = dim = {self.dim}")
        elif x.ndim < 2:
            raise ValueError(f"x of shape {tuple(x.shape)} must be [B, ..., C] with C = dim = {self.dim}")
        elif x.shape[-1] != self.dim:
            hint = ""
            if x.ndim in (4, 5) and x.shape[1] == self.dim:
                option = "accept_image_fmap" if x.ndim == 4 else "accept_3d_fmap"
                hint = f"; for feature maps with channels first use {option}=True"
            raise ValueError(f"x of shape {tuple(x.shape)} must end in dim = {self.dim}{hint}")

    def _channels_to_last(self, x: Tensor) -> Tensor:
        return x if self._keeps_channels_last else x.movedim(1, -1)

    def _channels_back(self, x: Tensor) -> Tensor:
        return x if self._keeps_channels_last else x.movedim(-1, 1)

    @property
    def _keeps_channels_last(self) -> bool:
        return self.channel_last and not (self.accept_image_fmap or self.accept_3d_fmap)

    def _checked_mask(self, mask: Tensor | None, lens: Tensor | None, z: Tensor) -> Tensor | None:
        if lens is not None:
            if mask is not None:
                raise ValueError("mask and lens exclude each other: give one")
            if z.ndim != 3 or lens.shape != z.shape[:1]:
                raise ValueError(
                    f"lens of shape {tuple(lens.shape)} needs x of [B, n, C] with one length per batch entry, "
                    f"got vectors of shape {tuple(z.shape)}"
                )
            return torch.arange(z.shape[1], device=z.device) < lens[:, None]
        if mask is not None and (mask.dtype != torch.bool or mask.shape != z.shape[:-1]):
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} and {mask.dtype} must be bool of shape {tuple(z.shape[:-1])}, "
                "the shape of x without its channels"
            )
        return mask
