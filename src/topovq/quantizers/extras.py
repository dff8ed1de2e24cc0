"""What a quantizer can do beside its rule: penalties, sampling, and other ways for the gradient.

All of it is off by default, and named as in vector-quantize-pytorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Extras:
    orthogonal_reg_weight: float = 0.0
    """weight of a penalty on codes that point the same way (orthogonal.py); it makes the codes parameters"""
    orthogonal_reg_active_codes_only: bool = False
    """only codes that this batch chose"""
    orthogonal_reg_max_codes: int | None = None
    """at most so many codes, drawn at each step"""
    stochastic_sample_codes: bool = False
    """in training, draw codes with probability softmax(-distance / temperature) instead of choosing the closest"""
    sample_codebook_temp: float = 1.0
    """that temperature; 0 chooses the closest. `forward` can give another"""
    directional_reparam: bool = False
    """the gradient goes to x and codes through a noisy direction and the error's length (directional.py)"""
    directional_reparam_variance: float = 5e-3
    route_gradients_to_input: bool = True
    """False: the output's gradient goes to the codes, if they are parameters, and not to x"""

    def __post_init__(self) -> None:
        for name in ("orthogonal_reg_weight", "sample_codebook_temp", "directional_reparam_variance"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
        most = self.orthogonal_reg_max_codes
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"orthogonal_reg_max_codes={most!r} must be an int of at least 1, or None for all")

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Extras:
        """The extras among these options, which lose them. A value of None is the default."""
        found = {field.name: options.pop(field.name) for field in fields(cls) if field.name in options}
        return cls(**{name: value for name, value in found.items() if value is not None})
