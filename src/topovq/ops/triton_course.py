"""Width and strength of a neighborhood at the codebook's step, computed where they are needed (ops/kernel.py: Course).

The numbers of a course are compiled into the kernels: arguments of a kernel are rounded to float32, in which a place
at distance sqrt(2) is no longer within sqrt(2).
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from topovq.ops.kernel import NARROWEST, Course

NARROW = tl.constexpr(NARROWEST)


@triton.jit
def width_and_strength(
    step_ptr,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr,
    TAU: tl.constexpr, START: tl.constexpr, END: tl.constexpr, STEPS: tl.constexpr, LOG_RATIO: tl.constexpr,
):  # fmt: skip
    """Both float64; where SCHEDULE is "given", step_ptr points at the width itself."""
    width = tl.full((), START, tl.float64)
    strength = tl.full((), 1.0, tl.float64)
    if SCHEDULE == "given":
        width = tl.load(step_ptr)
    else:
        t = tl.load(step_ptr).to(tl.float64)
        if SCHEDULE == "harmonic":
            value = 1.0 / (1.0 + t * tl.full((), TAU, tl.float64))
            if KIND == "hard":
                strength = value
            elif KIND == "gaussian":
                width = width * tl.sqrt(value)
            else:
                width = width * value
        else:
            progress = tl.minimum(t / tl.full((), STEPS, tl.float64), 1.0)
            if SCHEDULE == "linear":
                width = width + tl.full((), END - START, tl.float64) * progress
            else:
                width = width * tl.exp(progress * tl.full((), LOG_RATIO, tl.float64))
            width = tl.maximum(width, tl.full((), NARROW, tl.float64))
    return width, strength


def course_constants(course: Course) -> dict[str, Any]:
    """The arguments of `width_and_strength`."""
    log_ratio = math.log(course.end / course.start) if course.schedule == "exponential" else 0.0
    return {
        "KIND": course.kind,
        "SCHEDULE": course.schedule,
        "TAU": float(course.tau),
        "START": float(course.start),
        "END": float(course.end),
        "STEPS": float(course.steps),
        "LOG_RATIO": log_ratio,
    }
