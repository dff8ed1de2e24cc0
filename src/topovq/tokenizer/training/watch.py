"""A warning in plain words when a run's codes fall out of use, with what to do about it; an end where nothing helps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topovq.metrics import Health
from topovq.quantizers import Quantizer

WARN_BELOW = (0.5, 0.1)  # shares of the codes in use; each is warned of once a run
WARM_UP = 500  # steps in which codes may still find their places
SETTLED = 2.0  # cells: while a neighborhood is wider, codes move as one and few of them are chosen, as they should
ENOUGH = 10  # tokens for each code that a share asks for: fewer could not show that it is in use
MAPPED = ("kohonen", "residual")  # quantizers with the recommended neighborhood, unless their options say otherwise
CHOICES = ("quantizer", "neighborhood", "schedule", "tau", "radius")  # the options that do


class Diverged(RuntimeError):
    """The weights of a run are no longer numbers, and no step will change that."""

    def __init__(self, step: int, earlier: Sequence[Path]) -> None:
        kept = f"{earlier[-1]} is from before" if earlier else "there is no checkpoint from before"
        super().__init__(
            f"stopped at step {step:,}: weights are NaN or infinite, and training cannot mend them. Start again with a "
            f"lower --learning-rate; {kept}"
        )


def is_finite(model: nn.Module) -> bool:
    """Whether all that is saved of a model is numbers; waits for the device."""
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


class UsageWatch:
    """Looks at the running use of each level's codes and speaks when it falls below a share of WARN_BELOW."""

    def __init__(self, quantizers: Sequence[Quantizer], kind: str, options: dict[str, Any]) -> None:
        """`kind` and `options` are the run's `quantizer` and `quantizer_options`: what to do depends on them."""
        self.quantizers = quantizers
        self.kind, self.options = kind, options
        self.warned = 1.0  # the lowest share warned of so far

    def look(self, step: int, levels: Sequence[Health]) -> str | None:
        """What to tell the user after `step` steps, if anything. `levels` is the health of each quantizer."""
        if step < WARM_UP:
            return None
        found = None
        for number, (quantizer, health) in enumerate(zip(self.quantizers, levels)):
            size = quantizer.codebook_size
            below = [
                share
                for share in WARN_BELOW
                if health.usage < share < self.warned and health.tokens >= ENOUGH * share * size
            ]
            if below and _width(quantizer, step) <= SETTLED and (found is None or health.usage < levels[found].usage):
                found, lowest = number, min(below)
        if found is None:
            return None
        self.warned = lowest
        return self._sentence(step, found, levels[found])

    def _sentence(self, step: int, level: int, health: Health) -> str:
        size, tokens = self.quantizers[level].codebook_size, round(health.tokens, 2 - len(str(health.tokens)))
        where = f" of level {level}" if len(self.quantizers) > 1 else ""
        return (
            f"step {step:,}: {health.usage:.1%} of the {size:,} codes{where} are in use; {health.dead_codes:,} were "
            f"chosen by none of the last {tokens:,} tokens or so. " + advice(self.kind, self.options, size)
        )


def advice(kind: str, options: dict[str, Any], codebook_size: int) -> str:
    """What keeps more codes in use than this quantizer does."""
    over_the_training = "schedule" in options  # as "narrowing" is
    recommended = over_the_training or options.get("neighborhood") == "ride"
    set_here = [name for name in CHOICES if name in options and not recommended]
    if kind not in MAPPED:
        first = "use --quantizer kohonen: codes that learn together with their neighbors on a map stay in use"
    elif set_here:
        named = " and ".join(set_here)
        first = f"leave {named} out of --quantizer-options, so that the recommended neighborhood is used"
    elif over_the_training:
        first = "train for more --steps, in which the neighborhood spreads the codes over the data"
    else:
        first = "train for more --steps, in which dead codes come back beside busy ones"
    return f"What helps: {first}; or a smaller --codebook-size, if the data has no use for {codebook_size:,} codes."


def _width(quantizer: Quantizer, step: int) -> float:
    """How many cells wide codes move as one at `step`; 0 where they do not."""
    books = [book for book in quantizer.maps[:1] if not book.ride]
    neighborhoods = [book.neighborhood for book in books if book.neighborhood.kind != "none"]
    return float(neighborhoods[0].width(torch.tensor(step))) if neighborhoods else 0.0
