"""A vector quantizer whose codes live on a map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topovq import convert
from topovq.grid import Grid
from topovq.interop import export_quantizers, replace_quantizers
from topovq.loading import load
from topovq.neighborhood import Neighborhood, Schedule
from topovq.quantizers import GradientVQ, GroupedResidualVQ, KohonenVQ, Quantized, Quantizer, ResidualVQ, SoftKohonenVQ

if TYPE_CHECKING:
    from topovq.som import GrowingNeuralGas, NeuralGas, SelfOrganizingMap

__all__ = [
    "GradientVQ",
    "Grid",
    "GroupedResidualVQ",
    "GrowingNeuralGas",
    "KohonenVQ",
    "Neighborhood",
    "NeuralGas",
    "Quantized",
    "Quantizer",
    "ResidualVQ",
    "Schedule",
    "SelfOrganizingMap",
    "SoftKohonenVQ",
    "convert",
    "export_quantizers",
    "load",
    "replace_quantizers",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """The estimators, imported when asked for: they need scikit-learn, which the layers do not."""
    if name in ("GrowingNeuralGas", "NeuralGas", "SelfOrganizingMap"):
        from topovq import som

        return getattr(som, name)
    raise AttributeError(f"module 'topovq' has no attribute {name!r}")
