"""Models over tokens: heads that know the map, a small transformer, training, sampling."""

from topovq.prior.head import FlatHead, Head, MapHead
from topovq.prior.transformer import Prior

__all__ = ["FlatHead", "Head", "MapHead", "Prior"]
