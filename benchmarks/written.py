"""How a page is written: figures, tables, sentences, and the blocks that they stand in.

A block is what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

BLOCK = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


def ms(value: float) -> str:
    """Three digits: 0.0504, 1.99, 12.5, 1,089."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def mib(value: float) -> str:
    return f"{value:,.1f}" if value < 9.95 else f"{value:,.0f}"


def goal(value: float) -> str:
    return f"{value:g}"


def times(value: float) -> str:
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x"


def more(value: float) -> str:
    return f"{100 * value:+.1f}%"


def met(value: float, limit: float) -> str:
    return "yes" if value <= limit else "**no**"


def named(shape: tuple[int, int, int]) -> str:
    return "{:,} x {:,} x {}".format(*shape)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
