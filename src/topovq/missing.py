"""What is said where an optional package is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtra(ImportError):
    """An optional package is needed; the message says how to install it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'topovq[{extra}]'")


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import what `extra` brings; a package that is not there is named together with the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "topovq"):
            raise
        raise MissingExtra(package, extra) from None
