"""Thrift's compact protocol, in which the footer of a Parquet file is written, as plain values.

Arrow tells how many values a column has only to those who trust the footer: on a damaged one it ends the process.
"""

from __future__ import annotations

from typing import Any

TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
DEPTH = 16  # structs inside structs; a footer has seven


def parse(data: bytes) -> dict[int, Any]:
    """The struct at the start of `data`: its fields by number. IndexError or ValueError where there is none."""
    return _Reader(data).struct(0)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, size: int) -> bytes:
        taken = self.data[self.place : self.place + size]
        if len(taken) < size:
            raise ValueError("its footer ends too early")
        self.place += size
        return taken

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("its footer has a number without end")

    def signed(self) -> int:
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while (head := self.take(1)[0]) != 0:
            number = number + (head >> 4) if head >> 4 else self.signed()
            kind = head & 15
            fields[number] = kind == TRUE if kind in (TRUE, FALSE) else self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError("its footer is nested too deep")
        if kind in (TRUE, FALSE, BYTE):
            return self.take(1)[0]
        if kind < DOUBLE:
            return self.signed()
        if kind == DOUBLE:
            return self.take(8)
        if kind == BINARY:
            return self.take(self.unsigned())
        if kind in (LIST, SET):
            head = self.take(1)[0]
            return [self.value(head & 15, depth + 1) for _ in range(head >> 4 if head >> 4 < 15 else self.unsigned())]
        if kind == MAP:
            size = self.unsigned()
            kinds = self.take(1)[0] if size else 0
            return [(self.value(kinds >> 4, depth + 1), self.value(kinds & 15, depth + 1)) for _ in range(size)]
        if kind == STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"its footer has a value of type {kind}")
