"""A page in the browser to walk on the map: `topovq explore RUN`."""

from topovq.view.explorer.server import explore

__all__ = ["explore"]
