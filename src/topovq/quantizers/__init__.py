from topovq.quantizers.base import Quantized
from topovq.quantizers.gradient import GradientVQ
from topovq.quantizers.kohonen import KohonenVQ
from topovq.quantizers.residual import ResidualVQ
from topovq.quantizers.soft import SoftKohonenVQ

__all__ = ["GradientVQ", "KohonenVQ", "Quantized", "ResidualVQ", "SoftKohonenVQ"]
