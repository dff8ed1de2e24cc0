"""A vector quantizer whose codes live on a map."""

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.quantizers import GradientVQ, KohonenVQ, Quantized, ResidualVQ, SoftKohonenVQ

__all__ = [
    "GradientVQ",
    "Grid",
    "KohonenVQ",
    "Neighborhood",
    "Quantized",
    "ResidualVQ",
    "Schedule",
    "SoftKohonenVQ",
]
__version__ = "0.1.0"
