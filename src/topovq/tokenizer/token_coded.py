"""Token files coded by a prior's probabilities (.tvq), with the range coder of `constriction`.

A file is MAGIC, a header in JSON (the model, the prior, shapes), chunks of images, and the SHA-256 of all that. A chunk
has its images' names, their tokens as one stream, and a checksum of the tokens.

Coded tokens come back exactly, or not at all. The decoder must compute the encoder's probabilities bit for bit. Three
things see to that: both go the same steps with the same number of images at a time, the prior computes in float64, and
its logits are rounded (`probabilities`) before they are used. Another machine may still differ in the last bits of a
float64, and rarely, where a logit lies that close between two steps, in a rounded logit. The checksum tells, and the
file is refused.

Legend: B images at a time, S symbols of an image, each one of V.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from topovq.missing import MissingExtra
from topovq.storage import DamagedFile
from topovq.tokenizer.token_npz import CHUNK, HELD, LONGEST, Batch

MAGIC = b"topovq coded tokens 1\n"
SUFFIX = ".tvq"
STEPS = 256  # of a logit, in one nat
HEAD = struct.Struct("<IIII")  # of a chunk: images, bytes of names, words of the stream, CRC-32 of the tokens
LARGEST_HEADER = 1 << 16
SEAL = 32  # bytes of the digest at the end

Frequencies = Generator[np.ndarray, np.ndarray, None]


class Coder(Protocol):
    """What gives the probabilities: a prior (`topovq.prior.coding`).

    id       tells it from every other one
    at_once  B: how many images it takes at a time, always
    """

    id: str
    at_once: int

    def symbols(self, levels: Sequence[Tensor]) -> np.ndarray:
        """Tokens of each level [n, ...] -> int32 [n, S], in the order in which they are coded."""

    def levels(self, symbols_nS: np.ndarray) -> tuple[Tensor, ...]:
        """The tokens of symbols."""

    def walk(self) -> Frequencies:
        """Yields the probabilities of the next symbol, float64 [B, V], and is sent these symbols, int32 [B]; S times.
        Of fewer images than B the rest are 0."""


def probabilities(logits_BV: Tensor) -> np.ndarray:
    """float64 [B, V] of logits that are rounded to steps of 1 / STEPS, so that their last bits do not matter."""
    logits = logits_BV.double().cpu().numpy()
    steps = np.rint((logits - logits.max(1, keepdims=True)) * STEPS)
    weights: np.ndarray = np.exp(steps / STEPS)
    return weights / weights.sum(1, keepdims=True)


def encode_symbols(coder: Coder, symbols_nS: np.ndarray) -> np.ndarray:
    """The symbols of at most `at_once` images as words, uint32."""
    stream, family = _constriction()
    encoder, walk, number = stream.queue.RangeEncoder(), coder.walk(), len(symbols_nS)
    weights = next(walk)
    for place, symbols_n in enumerate(np.ascontiguousarray(symbols_nS.T)):
        encoder.encode(symbols_n, family, np.ascontiguousarray(weights[:number]))
        if place + 1 < symbols_nS.shape[1]:
            weights = walk.send(_padded(symbols_n, coder.at_once))
    words: np.ndarray = encoder.get_compressed()
    return words


def decode_symbols(coder: Coder, words: np.ndarray, number: int, length: int) -> np.ndarray:
    """The symbols int32 [number, length] of words; ValueError where the words are none of this coder."""
    stream, family = _constriction()
    decoder, walk, found = stream.queue.RangeDecoder(words), coder.walk(), []
    weights = next(walk)
    for place in range(length):
        try:
            found.append(decoder.decode(family, np.ascontiguousarray(weights[:number])))
        except AssertionError as error:  # what constriction raises
            raise ValueError("no symbols of this coder") from error
        if place + 1 < length:
            weights = walk.send(_padded(found[-1], coder.at_once))
    return np.stack(found, 1)


def _padded(symbols_n: np.ndarray, size: int) -> np.ndarray:
    return np.pad(symbols_n, (0, size - len(symbols_n)))


def _constriction() -> tuple[Any, Any]:
    try:
        import constriction
    except ImportError:
        raise MissingExtra("constriction, which codes tokens,", "train") from None
    return constriction.stream, constriction.stream.model.Categorical(perfect=False)


class CodedWriter:
    """Gathers images until there are as many as the coder takes at a time."""

    def __init__(self, path: Path, shapes: Sequence[tuple[int, ...]], model: str | None, coder: Coder) -> None:
        self.coder = coder
        self.names: list[str] = []
        self.waiting: list[np.ndarray] = []
        self.digest = hashlib.sha256()
        self.file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        told = {"shapes": [list(shape) for shape in shapes], "model": model, "prior": coder.id}
        header = json.dumps({**told, "at_once": coder.at_once}).encode()
        self._put(MAGIC + struct.pack("<I", len(header)) + header)

    def write(self, names: Sequence[str], levels: Sequence[Tensor]) -> None:
        self.names += names
        self.waiting.append(self.coder.symbols(levels))
        while len(self.names) >= self.coder.at_once:
            self._flush(self.coder.at_once)

    def close(self, finish: bool) -> None:
        with self.file:
            if finish:
                if self.names:
                    self._flush(len(self.names))
                self._put(HEAD.pack(0, 0, 0, 0))
                self.file.write(self.digest.digest())

    def _flush(self, number: int) -> None:
        symbols_nS = np.concatenate(self.waiting)
        names, self.names = self.names[:number], self.names[number:]
        symbols_nS, self.waiting = symbols_nS[:number], [symbols_nS[number:]]
        words = encode_symbols(self.coder, symbols_nS)
        said = zlib.compress(json.dumps(names).encode(), 9)
        self._put(
            HEAD.pack(number, len(said), len(words), _checksum(symbols_nS)) + said + words.astype("<u4").tobytes()
        )

    def _put(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)


def coded_header(path: Path) -> dict[str, Any]:
    """What a coded file says of itself; DamagedFile where it is not whole."""
    with open(path, "rb") as file:
        size, digest = file.seek(0, os.SEEK_END) - SEAL, hashlib.sha256()
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedFile("is no file of coded tokens")
        file.seek(0)
        while file.tell() < size and (data := file.read(min(CHUNK, size - file.tell()))):
            digest.update(data)
        if digest.digest() != file.read():
            raise DamagedFile("is damaged: it is not what its digest says")
        file.seek(len(MAGIC))
        told = json.loads(file.read(min(LARGEST_HEADER, *struct.unpack("<I", file.read(4)))))
    shapes = told["shapes"]
    for name in ("at_once", "prior"):
        if type(told[name]) is not (int if name == "at_once" else str):
            raise DamagedFile(f"says {name}={told[name]!r}")
    if 8 * told["at_once"] * sum(map(int, map(np.prod, shapes))) > HELD:
        raise DamagedFile(f"says that {told['at_once']:,} images of the shapes {shapes} are coded at a time")
    return {**told, "shapes": [tuple(shape) for shape in shapes]}


def read_coded(path: Path, coder: Coder) -> Iterator[Batch]:
    """The (names, levels) of a coded file, as many images at a time as are coded together."""
    told = coded_header(path)
    if told["prior"] != coder.id:
        raise DamagedFile(
            f"was coded by another prior ({told['prior'][:12]}) than this one ({coder.id[:12]}): give that one"
        )
    coder.at_once = told["at_once"]
    length = coder.symbols([torch.zeros(1, *shape, dtype=torch.int64) for shape in told["shapes"]]).shape[1]
    with open(path, "rb") as file:
        file.seek(len(MAGIC))
        file.seek(struct.unpack("<I", file.read(4))[0], os.SEEK_CUR)
        while True:
            number, said, words, checksum = HEAD.unpack(file.read(HEAD.size))
            if not number:
                return
            names = json.loads(zlib.decompressobj().decompress(file.read(said), (4 * LONGEST + 4) * number))
            data = np.frombuffer(file.read(4 * words), "<u4").astype(np.uint32)
            if number > told["at_once"] or len(names) != number or not all(isinstance(name, str) for name in names):
                raise DamagedFile(f"has {number:,} images and {len(names):,} names in a chunk of {told['at_once']:,}")
            try:
                symbols_nS = decode_symbols(coder, data, number, length)
            except ValueError:
                symbols_nS = np.zeros((0, length), np.int32)
            if _checksum(symbols_nS) != checksum:
                raise DamagedFile(
                    "cannot be decoded here: the prior's probabilities differ from those it was coded with. Decode it "
                    "with the same version of torch on the same kind of device"
                )
            yield names, coder.levels(symbols_nS)


def _checksum(symbols_nS: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(symbols_nS, dtype="<i4").tobytes())
