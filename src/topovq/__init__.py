"""A vector quantizer whose codes live on a map.

Quantizers  KohonenVQ, GradientVQ, SoftKohonenVQ, ResidualVQ, GroupedResidualVQ; all are a Quantizer, give a Quantized
Their maps  Grid, Neighborhood, Schedule
Estimators  SelfOrganizingMap, NeuralGas, GrowingNeuralGas, as in scikit-learn
What was saved or trained  load
Other models' quantizers  replace_quantizers, export_quantizers, convert
Logs of training loops    topovq.callbacks: Lightning, transformers, Accelerate, Weights & Biases
"""

from __future__ import annotations

import importlib.util
import sys
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


ESTIMATORS = ("GrowingNeuralGas", "NeuralGas", "SelfOrganizingMap")  # imported when asked for: they need scikit-learn


def __getattr__(name: str) -> Any:
    if name in ESTIMATORS:
        from topovq import som

        return getattr(som, name)
    raise AttributeError(f"module 'topovq' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """The public names that can be used with what is installed, for `dir` and `help`."""
    missing = () if importlib.util.find_spec("sklearn") else ESTIMATORS
    return sorted({*__all__, "__version__"}.difference(missing))
