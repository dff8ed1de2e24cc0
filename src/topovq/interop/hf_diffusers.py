"""diffusers' `VectorQuantizer`, which its VQModel holds."""

from __future__ import annotations

from torch import nn

from topovq.interop.embedding import LegacyReplacement
from topovq.interop.library import Library, package


class DiffusersReplacement(LegacyReplacement):
    """KohonenVQ (`.vq`) behind the interface of diffusers' VectorQuantizer."""


def matches(module: nn.Module) -> bool:
    return package(module) == "diffusers"


LIBRARIES = (Library("VectorQuantizer of diffusers", "VectorQuantizer", matches, DiffusersReplacement),)
