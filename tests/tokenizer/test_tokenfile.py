"""Token files that are damaged, or made to harm: refused in a sentence with the file's name."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from warm import python

from topovq.tokenizer.models import VQVAE
from topovq.tokenizer.thrift import parse
from topovq.tokenizer.tokenfile import model_of, open_writer, read_tokens
from topovq.tokenizer.tokens import decode

NAMES = [f"{i}.png" for i in range(6)]
TOKENS = torch.arange(6 * 64).remainder(16).view(6, 8, 8)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(suffix: str) -> Path:
        with open_writer(tmp_path / f"t{suffix}", [(8, 8)], 16) as writer:
            writer.write(NAMES, [TOKENS])
        return tmp_path / f"t{suffix}"

    return write


def read(path: Path) -> tuple[list[str], torch.Tensor]:
    batches = list(read_tokens(path, 4))
    return [name for names, _ in batches for name in names], torch.cat([levels[0] for _, levels in batches])


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_damaged_byte_changes_nothing_or_is_refused(written: Callable[[str], Path], suffix: str) -> None:
    path = written(suffix)
    whole, outcomes = path.read_bytes(), []
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        outcomes.append(outcome(path))
    assert set(outcomes) <= {"right", "refused"}
    assert outcomes.count("refused") > 0.5 * len(outcomes)


def outcome(path: Path) -> str:
    try:
        names, tokens = read(path)
    except ValueError as error:
        return "refused" if str(path) in str(error) else str(error)
    return "right" if names == NAMES and torch.equal(tokens, TOKENS) else "other tokens"


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_file_says_which_model_wrote_it(tmp_path: Path, suffix: str) -> None:
    for name, model in (("mine", "1234abcd"), ("nobodys", None)):
        with open_writer(tmp_path / (name + suffix), [(8, 8)], 16, model) as writer:
            writer.write(NAMES, [TOKENS])
        assert model_of(tmp_path / (name + suffix)) == model
    (tmp_path / f"bad{suffix}").write_text("x" * 100)
    with pytest.raises(ValueError, match=rf"bad\{suffix} is damaged or no"):
        model_of(tmp_path / f"bad{suffix}")


# npz


def as_npz(path: Path, **arrays: np.ndarray) -> None:
    np.savez_compressed(path, **{"image": np.array(NAMES), "tokens": TOKENS.numpy().astype(np.uint16), **arrays})


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"tokens": TOKENS.numpy() + 0.25}, "has tokens of type float64"),
        ({"tokens": TOKENS.numpy() > 3}, "has tokens of type bool"),
        ({"tokens": TOKENS.numpy().astype("U2")}, "has tokens of type <U2"),
        ({"tokens": TOKENS.numpy()[:5]}, "rows of different numbers: 6 of image, 5 of tokens"),
        ({"tokens": np.concatenate([TOKENS.numpy()] * 2)}, "rows of different numbers: 6 of image, 12 of tokens"),
        ({"tokens": np.asfortranarray(TOKENS.numpy())}, "which no token file has"),
        ({"tokens": np.int64(3)}, "which no token file has"),
        ({"image": np.arange(6)}, "has image of type int64"),
        ({"image": np.array(NAMES).astype(object)}, "has image of type object"),
        ({"image": np.array(NAMES).astype("U5000")}, "names of 5,000 characters"),
        ({"tokens_1": TOKENS.numpy()}, r"is not a token file: it holds image\.npy, tokens\.npy, tokens_1\.npy"),
    ],
)
def test_an_npz_that_holds_something_else_is_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    as_npz(tmp_path / "t.npz", **arrays)
    with pytest.raises(ValueError, match=rf"t\.npz {said}|t\.npz .*{said}"):
        read(tmp_path / "t.npz")


def write_forged(path: Path, shape: tuple[int, ...], zeros: int) -> None:
    """An npz whose tokens say that they have `shape`, and are so many bytes."""
    image = io.BytesIO()
    np.save(image, np.array(NAMES[: shape[0]]))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", image.getvalue())
        with archive.open("tokens.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_2_0(member, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for _ in range(zeros >> 20):
                member.write(bytes(1 << 20))


def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path, run_with_gauge: Callable[[str], None]) -> None:
    write_forged(tmp_path / "says.npz", (6, 40_000, 40_000), 1 << 20)
    write_forged(tmp_path / "is.npz", (1, 40_960, 1024), 40 << 20)
    write_forged(tmp_path / "rows.npz", (6, 10, 1 << 19), 30 << 20)  # 5 million an image are not too many
    run_with_gauge(f"""
        from pathlib import Path
        from topovq.tokenizer.tokenfile import read_tokens
        folder = Path({str(tmp_path)!r})
        start_gauge()
        said_of = {{"says": "says that tokens has 9,600,000,000 bytes", "is": "an image has 41,943,040 tokens"}}
        for name, said in said_of.items():
            try:
                list(read_tokens(folder / (name + ".npz"), 256))
            except ValueError as error:
                assert said in str(error), error
            else:
                raise AssertionError(name)
        assert growth() < 64, growth()
        assert sum(len(names) for names, _ in read_tokens(folder / "rows.npz", 256)) == 6
    """)


# Parquet


def as_parquet(path: Path, rows: Any = None, kind: Any = None, shape: Any = (8, 8), **columns: Any) -> None:
    rows = TOKENS.view(6, -1).tolist() if rows is None else rows
    arrays = {"image": pyarrow.array(NAMES), "tokens": pyarrow.array(rows, pyarrow.list_(kind or pyarrow.uint16()))}
    table = pyarrow.table({name: array for name, array in {**arrays, **columns}.items() if array is not None})
    shapes = {"topovq": json.dumps({"shapes": {"tokens": shape}})}
    parquet.write_table(table.replace_schema_metadata(shapes), path)


ROWS: list[Any] = TOKENS.view(6, -1).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": [ROWS[0][:60], ROWS[1] + ROWS[1][:4], *ROWS[2:]]}, "images whose tokens are not the 64"),
        ({"rows": [[*ROWS[0][:-1], None], *ROWS[1:]]}, "images whose tokens are not the 64"),
        ({"rows": [None, *ROWS[1:]]}, "has 321 values of tokens; its shape says 384"),
        ({"rows": [*ROWS[:5], [0] * 10**6]}, "has 1,000,320 values of tokens; its shape says 384"),
        ({"kind": pyarrow.float32()}, "has tokens of type list<.*float>; expected lists of whole numbers"),
        ({"kind": pyarrow.bool_(), "rows": [[v > 3 for v in row] for row in ROWS]}, "has tokens of type list<.*bool>"),
        (
            {"kind": pyarrow.string(), "rows": [[str(v) for v in row] for row in ROWS]},
            "has tokens of type list<.*string>",
        ),
        ({"image": pyarrow.array(range(6))}, "has images of type int64; expected names"),
        ({"image": pyarrow.array([None, *NAMES[1:]])}, "has an image without a name"),
        ({"image": None}, "has the columns tokens; expected image, tokens"),
        ({"more": pyarrow.array(range(6))}, "has the columns image, tokens, more"),
        ({"shape": [8, 9]}, "has 384 values of tokens; its shape says 432"),
        ({"shape": [-1]}, "its metadata names the shapes"),
        ({"shape": [8.0, 8]}, "its metadata names the shapes"),
        ({"shape": "x"}, "its metadata names the shapes"),
    ],
)
def test_a_parquet_file_that_holds_something_else_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    as_parquet(tmp_path / "t.parquet", **options)
    with pytest.raises(ValueError, match=rf"t\.parquet .*{said}"):
        read(tmp_path / "t.parquet")


def test_pages_have_checksums_and_files_without_them_are_read(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = written(".parquet")
    column = parquet.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size - 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        parquet.read_table(path, page_checksum_verification=True)
    with pytest.raises(ValueError, match=r"t\.parquet is damaged: it is not what its digest says"):
        read(path)
    as_parquet(tmp_path / "old.parquet")
    assert torch.equal(read(tmp_path / "old.parquet")[1], TOKENS)


@pytest.mark.parametrize(
    "kind", [pyarrow.list_(pyarrow.int32(), 64), pyarrow.large_list(pyarrow.int64())], ids=["fixed", "large"]
)
def test_other_kinds_of_lists_are_read(tmp_path: Path, kind: Any) -> None:
    """Other libraries write tokens, all of them as many, as lists of a fixed size."""
    as_parquet(tmp_path / "t.parquet", tokens=pyarrow.array(ROWS, kind))
    assert parquet.read_schema(tmp_path / "t.parquet").field("tokens").type == kind
    assert torch.equal(read(tmp_path / "t.parquet")[1], TOKENS)
    as_parquet(tmp_path / "bad.parquet", tokens=pyarrow.array([None, *ROWS[1:]], kind))
    with pytest.raises(ValueError, match=r"bad\.parquet has"):
        read(tmp_path / "bad.parquet")


def test_a_footer_is_read_as_arrow_reads_it(tmp_path: Path) -> None:
    as_parquet(tmp_path / "t.parquet")
    data, told = (tmp_path / "t.parquet").read_bytes(), parquet.ParquetFile(tmp_path / "t.parquet").metadata
    footer = parse(data[-8 - int.from_bytes(data[-8:-4], "little") : -8])
    assert footer[3] == told.num_rows == 6
    (group,) = footer[4]
    columns = [told.row_group(0).column(place) for place in range(2)]
    assert [column[3][5] for column in group[1]] == [column.num_values for column in columns] == [6, 384]
    for bad in (b"", b"\x19", b"\x1c" * 100, b"\x15" + b"\xff" * 20, b"\x1f", b"\x19\xfc" + b"\xff" * 8 + b"\x7f"):
        with pytest.raises(ValueError, match="its footer"):
            parse(bad)


# What is made of them


def test_two_images_of_one_name_are_not_written_over_each_other(tmp_path: Path) -> None:
    VQVAE(image_size=32, hidden=16, residual_hidden=8, codebook_size=16, code_dim=8).save_pretrained(tmp_path / "run")
    for names in (["a.png", "b.png", "a.png"], ["a.jpg", "b.png", "a.jpg.png"]):
        with open_writer(tmp_path / "t.npz", [(8, 8)], 16) as writer:
            writer.write(names, [TOKENS[:3]])
        with pytest.raises(
            ValueError, match=rf"two images for .*{names[0]}.*the second, '{names[2]}', would overwrite"
        ):
            decode(tmp_path / "run", tmp_path / "t.npz", tmp_path / "out", device="cpu")


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from topovq.tokenizer.tokenfile import open_writer
with open_writer(Path(sys.argv[1]), [(8, 8)], 16) as writer:
    writer.write(["a"], [torch.zeros(1, 8, 8, dtype=torch.int64)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next(written: Callable[[str], Path], tmp_path: Path) -> None:
    done = python("-c", KILLED, tmp_path / "other.parquet")
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".other.parquet.*.tmp"))) == 1
    written(".npz")
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_named_pipe_is_not_waited_at(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    for use in (lambda path: read_tokens(path, 1), model_of):
        with pytest.raises(FileNotFoundError, match=f"no token file at .*pipe{suffix}"):
            use(tmp_path / f"pipe{suffix}")


def test_an_archive_whose_directory_starts_before_it_is_named(written: Callable[[str], Path]) -> None:
    path = written(".npz")
    whole = path.read_bytes()
    path.write_bytes(whole[len(whole) // 2 :] + whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"t\.npz is damaged"):
        read(path)


READ = """
import sys
from pathlib import Path
import pyarrow
from topovq.tokenizer.tokenfile import read_tokens
print(sum(len(names) for names, _ in read_tokens(Path(sys.argv[1]), 256)))
print(pyarrow.default_memory_pool().max_memory() / 2**20)
"""


def test_reading_tokens_keeps_none_of_them_in_memory(tmp_path: Path) -> None:
    """20,000 images of 1,024 tokens of 16 bits: 39 MiB on disk, and Arrow has a part of it at a time."""
    random = torch.Generator().manual_seed(0)
    with open_writer(tmp_path / "t.parquet", [(32, 32)], 65536) as writer:
        for first in range(0, 20_000, 1000):
            tokens = torch.randint(65536, (1000, 32, 32), generator=random)
            writer.write([f"{first + i}.png" for i in range(1000)], [tokens])
    done = python("-c", READ, tmp_path / "t.parquet")
    assert done.returncode == 0, done.stderr
    images, most = done.stdout.split()
    assert int(images) == 20_000
    assert float(most) < 20
