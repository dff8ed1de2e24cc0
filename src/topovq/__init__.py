"""A vector quantizer whose codes live on a map."""

from topovq import convert
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
    "convert",
]
__version__ = "0.1.0"
