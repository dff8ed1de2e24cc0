"""Small codebooks for tests, and how they learn from a batch."""

import torch

from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def book_of(codes: torch.Tensor, kind: str, *shape: int, step: int = 0, **options) -> Codebook:
    """A codebook as it is at the start, but with these codes, in their type."""
    options = {"decay": 0.75, "eps": 0.25, **options}
    book = Codebook(codes.shape[1], Neighborhood(kind, Grid(shape or len(codes))), **options).to(codes.dtype)
    book.codes.copy_(codes)
    book.sums.copy_(codes)
    book.step.fill_(step)
    return book


def learn(book: Codebook, x: torch.Tensor, index: torch.Tensor | list[int], skipped: int = 0) -> None:
    """One update from vectors and the codes they chose (-1: left out)."""
    book.learn(*accumulate(x, torch.as_tensor(index), book.size), torch.tensor(skipped))


def state_of(book: Codebook) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in book.state_dict().items()}


def assert_state(book: Codebook, state: dict[str, torch.Tensor]) -> None:
    for name, value in book.state_dict().items():
        assert torch.equal(value, state[name]), name


def assert_values(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, double(expected).view_as(actual), rtol=0, atol=1e-9)


LINE, LINE_X, LINE_INDEX = double([[0], [2], [6]]), double([[-1], [1.5], [2.5], [8]]), [0, 1, 1, 2]
SQUARE, SQUARE_X = double([[0, 0], [4, 0], [0, 4], [4, 4]]), double([[0, 1], [1, 0], [5, 4]])
SQUARE_INDEX = [0, 0, 3]
