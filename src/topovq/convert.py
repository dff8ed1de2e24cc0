"""The door to `topovq.interop`: codebooks and quantizers of other libraries, into and out of topovq."""

from topovq.interop import *  # noqa: F403
from topovq.interop import __all__ as __all__
