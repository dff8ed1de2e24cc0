"""Width and strength of a neighborhood at the codebook's step, computed where they are needed (neighborhood.py).

The numbers of a course lie on the device in float64: arguments of a kernel are rounded to float32, in which a place at
distance sqrt(2) is no longer within sqrt(2). Compiled into the kernels, each course would need kernels of its own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.neighborhood import NARROWEST, Neighborhood

NARROW = tl.constexpr(NARROWEST)


class Course(NamedTuple):
    """The numbers of a neighborhood that kernels compute with."""

    kind: str
    schedule: str
    tau: float
    start: float
    """The largest width there will be: schedules only fall."""
    end: float
    steps: int


def course_of(neighborhood: Neighborhood) -> Course:
    plan = neighborhood.schedule
    return Course(neighborhood.kind, plan.kind, plan.tau or 0.0, neighborhood.widest, plan.end or 0.0, plan.steps or 1)


@triton.jit
def width_and_strength(step_ptr, course_ptr, KIND: tl.constexpr, SCHEDULE: tl.constexpr):
    """Both float64; where SCHEDULE is "given", step_ptr points at the width itself."""
    width = tl.load(course_ptr + 1)
    strength = tl.full((), 1.0, tl.float64)
    if SCHEDULE == "given":
        width = tl.load(step_ptr)
    else:
        t = tl.load(step_ptr).to(tl.float64)
        if SCHEDULE == "harmonic":
            value = 1.0 / (1.0 + t * tl.load(course_ptr))
            if KIND == "hard":
                strength = value
            elif KIND == "gaussian":
                width = width * tl.sqrt(value)
            else:
                width = width * value
        else:
            progress = tl.minimum(t / tl.load(course_ptr + 3), 1.0)
            if SCHEDULE == "linear":
                width = width + (tl.load(course_ptr + 2) - width) * progress
            else:
                width = width * tl.exp(progress * tl.load(course_ptr + 4))
            width = tl.maximum(width, tl.full((), NARROW, tl.float64))
    return width, strength


@lru_cache(maxsize=256)
def course_table(course: Course, device: torch.device) -> Tensor:
    """tau, start, end, steps and log(end / start), float64 on the device, made once."""
    log_ratio = math.log(course.end / course.start) if course.schedule == "exponential" else 0.0
    numbers = [course.tau, course.start, course.end, course.steps, log_ratio]
    return torch.tensor(numbers, dtype=torch.float64, device=device)
