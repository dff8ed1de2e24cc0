from topovq.quantizers.gradient import GradientVQ
from topovq.quantizers.grouped import GroupedResidualVQ
from topovq.quantizers.kohonen import KohonenVQ
from topovq.quantizers.quantizer import Quantizer
from topovq.quantizers.residual import ResidualVQ
from topovq.quantizers.results import Quantized
from topovq.quantizers.soft import SoftKohonenVQ

__all__ = ["GradientVQ", "GroupedResidualVQ", "KohonenVQ", "Quantized", "Quantizer", "ResidualVQ", "SoftKohonenVQ"]
