"""What the tests of the Triton kernels share. Without a GPU the kernels run in Triton's interpreter."""

import numpy as np
import torch
from quick_interpreter import quicken
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from topovq.grid import Grid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRIDS = [
    Grid(1),
    Grid(2),
    Grid(2, wrap=True),
    Grid(3, wrap=True),
    Grid(37),
    Grid(70, wrap=True),
    Grid((1, 5)),
    Grid((5, 1)),
    Grid((9, 20)),
    Grid((16, 32)),
    Grid((17, 33), wrap=True),
    Grid((5, 4), wrap=(False, True)),
    Grid((6, 3), wrap=(True, False)),
    Grid((3, 4, 5)),
    Grid((3, 17, 4), wrap=(True, False, True)),
    Grid((2, 2), size=3),
    Grid((5, 7), size=29),  # one code in the last row
    Grid((17, 20), size=333),
    Grid((17, 20), wrap=True, size=333),
]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _product(self, a, b, d, *_):
    """The interpreter's tl.dot, summed in float64: a BLAS may round a column by its place, tensor cores do not."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


InterpreterBuilder.create_dot = _product
if DEVICE == "cpu":
    quicken()
