"""Damage: functions of a file's bytes and a random generator."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]
HOSTILE: tuple[Any, ...] = (
    *(None, True, "", "x" * 5000, [], {}, [[]], -1, 0, 1.5, float("nan"), float("inf"), -1e400, 1e20),
    *(10**6, 10**9, 2**31, 2**63, 10**30, "../../etc/passwd", "\x00", [1] * 1000, {"a": {"a": {}}}),
)


def _span(data: bytes, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data)) if data else 0
    return start, min(len(data), start + rng.choice((1, 2, 8, 64, 512, 4096)))


def flip_bit(data: bytes, rng: Random) -> bytes:
    if not data:
        return b"\x01"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def overwrite(data: bytes, rng: Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[stop:]


def zeros(data: bytes, rng: Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + bytes(stop - start) + data[stop:]


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def drop(data: bytes, rng: Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + data[stop:]


def repeat(data: bytes, rng: Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:stop] + data[start:]


def insert(data: bytes, rng: Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[start:]


def append(data: bytes, rng: Random) -> bytes:
    return data + rng.choice((b"\x00", b"\n", b"{}\n", rng.randbytes(100), data))


def swap(data: bytes, rng: Random) -> bytes:
    middle = rng.randrange(len(data) + 1)
    return data[middle:] + data[:middle]


def empty(data: bytes, rng: Random) -> bytes:
    return b""


def noise(data: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.choice((1, 100, 5000)))


BYTES: dict[str, Mutation] = {
    f.__name__: f for f in (flip_bit, overwrite, zeros, cut, drop, repeat, insert, append, swap, empty, noise)
}


# What stands in a file's place


def _gone(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    os.truncate(path, 5 * 2**30)  # of zeros, which take no room


PLACES = {f"a {f.__name__[1:]}": f for f in (_gone, _folder, _pipe, _loop, _huge)}


# Inside JSON, safetensors and zip files: what is damaged is still a file of its kind


def json_value(data: bytes, rng: Random) -> bytes:
    """JSON with one value replaced, taken out or added, or a key there twice."""
    root = {"root": json.loads(data)}
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(root["root"])
    if not places:
        return b"[]"
    node, key = rng.choice(places)
    how = rng.choice(("replace", "replace", "replace", "remove", "add", "twice"))
    if how == "replace":
        node[key] = rng.choice(HOSTILE)
    elif how == "remove":
        del node[key]
    elif how == "add" and isinstance(node, dict):
        node["unheard_of"] = rng.choice(HOSTILE)
    text = json.dumps(root["root"])
    if how == "twice" and isinstance(node, dict):
        text = text.replace(f"{json.dumps(key)}:", f"{json.dumps(key)}: {rng.randrange(9)}, {json.dumps(key)}:", 1)
    return text.encode()


def json_line(data: bytes, rng: Random) -> bytes:
    """JSON Lines with one line damaged so, taken out, or there twice."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    how = rng.choice(("value", "value", "remove", "twice"))
    changed = {"value": [json_value(lines[at], rng) + b"\n"], "remove": [], "twice": [lines[at]] * 2}[how]
    return b"".join([*lines[:at], *changed, *lines[at + 1 :]])


def safetensors_header(data: bytes, rng: Random) -> bytes:
    """safetensors with one value of the header replaced."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json_value(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def npy_header(data: bytes, rng: Random) -> bytes:
    """npz whose checksums are right, with an array that cannot be tokens: of another shape or type."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        chosen = rng.choice(old.namelist())
        for name in old.namelist():
            member = old.read(name)
            if name == chosen:
                (length,) = struct.unpack("<I", member[8:12])
                shape = rng.choice(
                    ("(1,)", "()", "(-1, 4, 4)", "(10, 4, 4)", "(2, 4, 4)", "(1000000000, 4, 4)", "(3.5,)")
                )
                kind = rng.choice(("<f4", "|b1", "<U3", "|O", "<u8", "<c8", "nonsense", "<M8[s]"))
                header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(length)
                member = member[:8] + struct.pack("<I", len(header)) + header + member[12 + length :]
            new.writestr(name, member)
    return changed.getvalue()


def zip_bomb(data: bytes, rng: Random) -> bytes:
    """npz of a few megabytes that claims, and unpacks to, gigabytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, kind in (("image", "<U1000000"), ("tokens", "<u2")):
            header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (2000, 4, 4)}}".encode().ljust(118)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header)
                for _ in range(rng.choice((0, 40))):
                    member.write(bytes(2**20))
    return made.getvalue()
