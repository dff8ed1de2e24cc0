"""Files that are sound files of their kind, and still must not be taken for what they claim to be."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from PIL import Image


def make(sound: Path, out: Path) -> None:
    """Write them to `out`: one folder a format, named as in targets.py."""
    for folder, files in (
        ("parquet", parquets(sound / "tokens.parquet")),
        ("npz", npzs(sound / "tokens.npz")),
        ("tar", tars(sound / "images")),
        ("image", images()),
        ("state", states(sound / "unfinished" / "checkpoints" / "step-00000004" / "state.pt")),
        ("weights", weights(sound / "run" / "model.safetensors")),
        ("config", configs(sound / "run" / "config.json")),
    ):
        (out / folder).mkdir(parents=True)
        for name, data in files:
            (out / folder / name).write_bytes(data)


def parquets(sound: Path) -> Iterator[tuple[str, bytes]]:
    table = pq.read_table(sound)
    names, rows = table.column("image"), table.column("tokens").to_pylist()
    first, second, *others = rows

    def written(tokens: Any, images: Any = names, kind: Any = None, metadata: Any = table.schema.metadata) -> bytes:
        buffer = io.BytesIO()
        column = tokens if isinstance(tokens, pa.Array) else pa.array(tokens, kind)
        pq.write_table(pa.table({"image": images, "tokens": column}).replace_schema_metadata(metadata), buffer)
        return buffer.getvalue()

    yield "floats", written([[value + 0.4 for value in row] for row in rows])
    yield "bools", written([[bool(value) for value in row] for row in rows])
    yield "strings", written([[str(value) for value in row] for row in rows])
    yield "ragged", written([first[:-1], [*second, 0], *others])
    yield "nulls", written([[None, *first[1:]], second, *others])
    yield "null row", written([None, second, *others])
    yield "too large", written([[10**6, *first[1:]], second, *others])
    yield "negative", written([[-1, *first[1:]], second, *others])
    yield "duplicate names", written(rows, pa.array([names[0].as_py()] * len(rows)))
    yield "names outside", written(rows, pa.array([f"../{number}" for number in range(len(rows))]))
    yield "null names", written(rows, pa.array([None] * len(rows), pa.string()))
    yield "numbers as names", written(rows, pa.array(range(len(rows))))
    yield "no lists", written([row[0] for row in rows])
    for shape in ([8, 2], [4, 4, 1], [0], [-1], [10**9, 10**9], "4", None, {}):
        told = {b"topovq": json.dumps({"shapes": {"tokens": shape}}).encode()}
        yield f"shape {str(shape).replace('/', '')}", written(rows, metadata=told)
    for text in (b"", b"[]", b"{}", b'{"shapes": {"image": [4, 4]}}', b'{"shapes": {}}'):
        yield f"metadata {text.decode()}", written(rows, metadata={b"topovq": text})


def npzs(sound: Path) -> Iterator[tuple[str, bytes]]:
    with np.load(sound) as arrays:
        names, tokens = arrays["image"], arrays["tokens"]

    def written(**arrays: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=True, **arrays)
        return buffer.getvalue()

    yield "floats", written(image=names, tokens=tokens + 0.4)
    yield "bools", written(image=names, tokens=tokens.astype(bool))
    yield "strings", written(image=names, tokens=tokens.astype(str))
    yield "objects", written(image=names, tokens=tokens.astype(object))
    yield "more tokens than names", written(image=names[:-1], tokens=tokens)
    yield "more names than tokens", written(image=names, tokens=tokens[:-1])
    yield "flat", written(image=names, tokens=tokens.reshape(len(tokens), -1))
    yield "other shape", written(image=names, tokens=tokens.reshape(len(tokens), 8, 2))
    yield "fortran", written(image=names, tokens=np.asfortranarray(tokens + 12))
    yield "too large", written(image=names, tokens=tokens.astype(np.int64) + 10**12)
    yield "negative", written(image=names, tokens=-1 - tokens.astype(np.int64))
    yield "duplicate names", written(image=np.repeat(names[:1], len(names)), tokens=tokens)
    yield "names outside", written(image=np.char.add("../", names), tokens=tokens)
    yield "numbers as names", written(image=np.arange(len(names)), tokens=tokens)
    yield "a scalar", written(image=names, tokens=np.uint16(3))
    yield "levels", written(image=names, tokens_0=tokens, tokens_1=tokens)
    yield "missing level", written(image=names, tokens_0=tokens, tokens_2=tokens)


def tars(images: Path) -> Iterator[tuple[str, bytes]]:
    picture = (images / "0.png").read_bytes()

    def written(fill: Callable[[tarfile.TarFile], None], rest: bytes = b"") -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path in sorted(images.iterdir()):
                tar.add(path, path.name)
            fill(tar)
        return buffer.getvalue() + rest

    def member(name: str, size: int | None = None, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.size, info.type = len(picture) if size is None else size, kind
        for key, value in fields.items():
            setattr(info, key, value)
        return info

    yield "outside", written(lambda tar: tar.addfile(member("../../0.png"), io.BytesIO(picture)))
    yield "absolute", written(lambda tar: tar.addfile(member("/etc/0.png"), io.BytesIO(picture)))
    yield "a link", written(lambda tar: tar.addfile(member("link.png", 0, tarfile.SYMTYPE, linkname="/etc/passwd")))
    yield "a device", written(lambda tar: tar.addfile(member("zero.png", 0, tarfile.CHRTYPE, devmajor=1, devminor=5)))
    yield "a pipe", written(lambda tar: tar.addfile(member("pipe.png", 0, tarfile.FIFOTYPE)))
    yield "an empty image", written(lambda tar: tar.addfile(member("none.png", 0), io.BytesIO()))
    yield "a long name", written(lambda tar: tar.addfile(member("n" * 9000 + ".png"), io.BytesIO(picture)))
    yield "a size too large", written(lambda tar: None) + member("huge.png", 2**40).tobuf()
    yield "a negative size", written(lambda tar: None) + _with_size(member("less.png"), b"-0000000100\0")
    yield "a bomb inside", written(lambda tar: tar.addfile(member("b.png", len(BOMB)), io.BytesIO(BOMB)))
    comment = {"comment": "c" * 2**20, "size": str(2**50)}
    yield "pax headers", written(lambda tar: tar.addfile(member("p.png", pax_headers=comment), io.BytesIO(picture)))


def _with_size(info: tarfile.TarInfo, size: bytes) -> bytes:
    header = bytearray(info.tobuf())
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def bomb(width: int, height: int) -> bytes:
    """A PNG of any size, a few bytes long."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width // 8 + 1) * min(height, 1000)), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BOMB = bomb(50_000, 50_000)


def images() -> Iterator[tuple[str, bytes]]:
    yield "bomb", BOMB
    yield "cut bomb", bomb(9_000, 9_000)
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    for mode in ("F", "I", "I;16", "1", "P", "CMYK", "LA"):
        buffer = io.BytesIO()
        Image.new(mode, (20, 30)).save(buffer, "TIFF" if mode != "LA" else "PNG")
        yield mode.replace(";", ""), buffer.getvalue()
    for size in ((1, 1), (1, 40_000), (40_000, 1)):
        buffer = io.BytesIO()
        Image.new("RGB", size).save(buffer, "PNG")
        yield f"{size[0]}x{size[1]}", buffer.getvalue()


def states(sound: Path) -> Iterator[tuple[str, bytes]]:
    def written(change: Callable[[dict[str, Any]], Any]) -> bytes:
        state = torch.load(sound, weights_only=True)
        changed = change(state)
        buffer = io.BytesIO()
        torch.save(state if changed is None else changed, buffer)
        return buffer.getvalue()

    def moments(value: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
        def change(state: dict[str, Any]) -> None:
            for entry in state["optimizer"].values():
                for name, tensor in entry.items():
                    if isinstance(tensor, torch.Tensor) and tensor.ndim:
                        entry[name] = value(tensor)

        return change

    yield "short moments", written(moments(lambda tensor: tensor.flatten()[:1]))
    yield "empty moments", written(moments(lambda tensor: tensor[:0]))
    yield "half moments", written(moments(lambda tensor: tensor.half()))
    yield "whole moments", written(moments(lambda tensor: tensor.long()))
    yield "nan moments", written(moments(lambda tensor: tensor * float("nan")))
    yield "no moments", written(moments(lambda tensor: None))
    yield "complex moments", written(moments(lambda tensor: tensor + 1j))
    for name in ("optimizer", "rng", "best", "validation", "step", "seconds", "skipped"):
        yield f"without {name}", written(lambda state, name=name: state.pop(name) and None)
        yield f"{name} as text", written(lambda state, name=name: state.__setitem__(name, "text"))
    yield "another step", written(lambda state: state.__setitem__("step", 10**9))
    yield "a list", written(lambda state: [state])
    yield "short rng", written(lambda state: state.__setitem__("rng", [state["rng"][0][:10]]))
    yield "code", b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR."


def weights(sound: Path) -> Iterator[tuple[str, bytes]]:
    tensors = safetensors.torch.load_file(sound)
    name = next(name for name, tensor in tensors.items() if tensor.ndim > 1)

    def written(tensor: torch.Tensor | None) -> bytes:
        changed = {key: value for key, value in tensors.items() if key != name}
        return safetensors.torch.save(changed | ({name: tensor.contiguous()} if tensor is not None else {}))

    yield "nan", written(torch.full_like(tensors[name], float("nan")))
    yield "infinite", written(torch.full_like(tensors[name], float("inf")))
    yield "other shape", written(tensors[name].flatten())
    yield "a row less", written(tensors[name][1:])
    yield "missing", written(None)
    yield "whole numbers", written(tensors[name].long())
    yield "one more", safetensors.torch.save(tensors | {"more": torch.zeros(3)})


def configs(sound: Path) -> Iterator[tuple[str, bytes]]:
    config = json.loads(sound.read_bytes())

    def written(**changes: Any) -> bytes:
        changed = {**config, **changes}
        return json.dumps({key: value for key, value in changed.items() if value is not ...}).encode()

    for name in ("codebook_size", "code_dim", "hidden", "image_size", "residual_hidden", "channels"):
        for value in (0, -1, 2**20, 2**40, 1.5, "12", None, [12], True):
            yield f"{name} {value}", written(**{name: value})
    for name in ("mean", "std", "model", "quantizer"):
        for value in (..., [], "", [float("nan")] * 3, {}):
            yield f"{name} {value}", written(**{name: value})
    yield "std of 0", written(std=[0.0] * 3)
    yield "unknown", written(unheard_of=1)
    yield "an option unheard of", written(quantizer_options={"unheard_of": 1})
    yield "a grid too large", written(quantizer_options={"grid": [2**20, 2**20]})
    yield "nested", b"[" * 100_000 + b"]" * 100_000
    yield "a number", b"9" * 10_000
