"""Images in Parquet files, as encoded bytes."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from topovq.tokenizer.data import IMAGES_A_PART, DataError, find_images, parquet_images, parts_of
from topovq.tokenizer.data.folder import FileRecords
from topovq.tokenizer.models import VQVAE
from topovq.tokenizer.tokenfile import read_tokens
from topovq.tokenizer.tokens import encode


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (value, 0, 255 - value)).save(file, "PNG")
    return file.getvalue()


def read(path: Path) -> tuple[list[str], list[bytes]]:
    records = find_images(path)
    return [name.decode() for name in records.names_N], [records.open(i).read() for i in range(len(records))]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"image": [{"bytes": png(i), "path": f"p{i}.png"} for i in range(5)]}, [f"p{i}.png" for i in range(5)]),
        ({"jpg": [png(i) for i in range(5)], "key": list("abcde"), "label": range(5)}, list("abcde")),
        ({"bytes": [png(i) for i in range(5)], "id": range(5)}, [f"t/{i:08d}" for i in range(5)]),
    ],
    ids=["datasets", "key", "numbers"],
)
def test_names_and_bytes_of_the_forms_there_are(tmp_path: Path, columns: dict[str, Any], names: list[str]) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
    assert read(tmp_path / "t.parquet") == (names, [png(i) for i in range(5)])


def test_files_are_parts_and_names_are_told_apart(tmp_path: Path) -> None:
    for file, rows in (("a", 3), ("b", 2)):
        columns = {"image": [png(10 * len(file) + i) for i in range(rows)], "name": [f"{i}.png" for i in range(rows)]}
        parquet.write_table(pa.table(columns), tmp_path / f"{file}.parquet", row_group_size=2)
    records = find_images(tmp_path)
    assert [name.decode() for name in records.names_N] == ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png"]
    assert parts_of(records) == [range(3), range(3, 5)]
    second = pickle.loads(pickle.dumps(records.take(range(3, 5))))
    assert [name.decode() for name in second.names_N] == ["b/0.png", "b/1.png"]
    assert [second.open(i).read() for i in (1, 0)] == [records.open(i).read() for i in (4, 3)] == [png(11), png(10)]
    many = FileRecords("", np.array([b"x"] * (IMAGES_A_PART + 1)))
    assert parts_of(many) == [range(IMAGES_A_PART // 2), range(IMAGES_A_PART // 2, IMAGES_A_PART + 1)]


def test_tokens_are_those_of_the_same_images_in_a_folder(tmp_path: Path) -> None:
    """What cannot be read is named; a token file beside images is no table of images."""
    torch.manual_seed(0)
    VQVAE(image_size=16, hidden=16, residual_hidden=8, codebook_size=16, code_dim=8).save_pretrained(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    for i in range(4):
        (tmp_path / "folder" / f"{i}.png").write_bytes(png(60 * i))
    columns = {
        "image": [*(png(60 * i) for i in range(4)), b"no image", None],
        "name": [*(f"{i}.png" for i in range(6))],
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    options = {"device": "cpu", "workers": 0}
    encode(tmp_path / "run", tmp_path / "folder", tmp_path / "folder" / "tokens.parquet", **options)
    done = encode(tmp_path / "run", tmp_path / "t.parquet", tmp_path / "tokens.parquet", **options)
    assert done.images == 4
    assert list(done.skipped) == ["4.png", "5.png"]
    assert "the row has no image" in done.skipped["5.png"]
    ((names, (tokens,)),) = read_tokens(tmp_path / "folder" / "tokens.parquet", 9)
    ((again, (others,)),) = read_tokens(tmp_path / "tokens.parquet", 9)
    assert names == again
    assert torch.equal(tokens, others)
    assert isinstance(find_images(tmp_path / "folder"), FileRecords)


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"image": ["a", "b"], "x": [1, 2]}), table)
    with pytest.raises(
        DataError, match=r"t\.parquet has no column of images among image, x; one of bytes called image"
    ):
        find_images(table)
    parquet.write_table(pa.table({"image": [png(1)] * 3}), table)
    whole = table.read_bytes()
    table.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"t\.parquet is damaged or no Parquet file: [^.\n]+$"):
        find_images(table)
    parquet.write_table(pa.table({"image": pa.array([], pa.binary())}), table)
    with pytest.raises(DataError, match="holds no image: there are no rows"):
        find_images(table)
    table.write_bytes(whole)
    monkeypatch.setattr(parquet_images, "MOST_BYTES", 10)
    with pytest.raises(DataError, match=r"has a row group of \d+ bytes; at most 10 are read at once"):
        find_images(table)
