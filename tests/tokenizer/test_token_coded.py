"""Tokens coded by probabilities: they come back exactly, in as few bits as the probabilities say, or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from topovq.storage import DamagedFile
from topovq.tokenizer.token_coded import Frequencies, decode_symbols, encode_symbols, probabilities
from topovq.tokenizer.tokenfile import model_of, open_writer, read_tokens

SHAPES = [(2, 2), (4, 4)]
CODES = 20


class Chain:
    """Each symbol is likely to be the one before it plus one; rows and columns of a 4 x 5 map in turn."""

    def __init__(self, id: str = "a" * 64, slope: float = 0.5) -> None:
        self.id, self.slope, self.at_once = id, slope, 3

    def symbols(self, levels: Sequence[Tensor]) -> np.ndarray:
        flat = torch.cat([level.reshape(len(level), -1) for level in levels], 1)
        return torch.stack([flat // 5, flat % 5], -1).reshape(len(flat), -1).to(torch.int32).numpy()

    def levels(self, symbols_nS: np.ndarray) -> tuple[Tensor, ...]:
        pairs = torch.from_numpy(symbols_nS.astype(np.int64)).unflatten(1, (-1, 2))
        flat = pairs[..., 0] * 5 + pairs[..., 1]
        sizes = [math.prod(shape) for shape in SHAPES]
        return tuple(part.reshape(-1, *shape) for part, shape in zip(flat.split(sizes, 1), SHAPES))

    def walk(self) -> Frequencies:
        before = np.zeros(self.at_once, np.int32)
        while True:
            apart = torch.arange(5)[None] - torch.from_numpy(before)[:, None] - 1
            before = yield probabilities(-self.slope * apart.abs().double())
            assert len(before) == self.at_once  # batches are always full: their size may change the last bits


def some_tokens(images: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(CODES, (images, *shape), generator=generator) for shape in SHAPES)


def test_symbols_take_the_bits_that_their_probabilities_say() -> None:
    chain = Chain(slope=2.0)
    symbols_nS = np.tile(np.array([1, 2, 3, 4] * 200, np.int32), (3, 1))
    words = encode_symbols(chain, symbols_nS)
    assert np.array_equal(decode_symbols(chain, words, 3, 800), symbols_nS)
    expected, walk = 0.0, chain.walk()
    weights = next(walk)
    for symbols in symbols_nS.T:
        expected -= float(np.log2(weights[np.arange(3), symbols]).sum())
        weights = walk.send(symbols)
    assert expected <= 32 * len(words) <= expected + 64


def test_the_last_bits_of_logits_do_not_matter() -> None:
    logits = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    assert np.array_equal(probabilities(logits), probabilities(logits + 1e-13 * torch.randn_like(logits)))
    assert np.allclose(probabilities(logits), logits.softmax(1), rtol=1 / 100)


def test_a_file_of_coded_tokens_comes_back(tmp_path: Path) -> None:
    levels, names, path = some_tokens(8), [f"{n}/ä.png" for n in range(8)], tmp_path / "tokens.tvq"
    with open_writer(path, SHAPES, CODES, "m" * 64, Chain()) as writer:
        writer.write(names[:5], [level[:5] for level in levels])
        writer.write(names[5:], [level[5:] for level in levels])
    got = list(read_tokens(path, 100, Chain()))
    assert [len(names) for names, _ in got] == [3, 3, 2]
    assert [name for names, _ in got for name in names] == names
    for number, level in enumerate(levels):
        assert torch.equal(torch.cat([found[number] for _, found in got]), level)
    assert model_of(path) == "m" * 64
    with open_writer(tmp_path / "none.tvq", SHAPES, CODES, None, Chain()):
        pass
    assert list(read_tokens(tmp_path / "none.tvq", 1, Chain())) == []


def test_what_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.tvq"
    with open_writer(path, SHAPES, CODES, None, Chain()) as writer:
        writer.write(list("abcd"), some_tokens(4))
    with pytest.raises(DamagedFile, match=r"tokens\.tvq was coded by another prior \(a{12}\) than this one \(b{12}\)"):
        list(read_tokens(path, 1, Chain("b" * 64)))
    with pytest.raises(DamagedFile, match="probabilities differ from those it was coded with"):
        list(read_tokens(path, 1, Chain(slope=0.51)))  # as another machine might compute them
    with pytest.raises(ValueError, match="is coded by a prior: name that one"):
        list(read_tokens(path, 1))
    with (
        pytest.raises(ValueError, match=r"must end in \.tvq"),
        open_writer(tmp_path / "a.npz", SHAPES, 5, None, Chain()),
    ):
        pass
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(DamagedFile, match=r"tokens\.tvq is "):
            list(read_tokens(path, 1, Chain()))
    path.write_bytes(data[:-40])
    with pytest.raises(DamagedFile, match="digest"):
        list(read_tokens(path, 1, Chain()))
