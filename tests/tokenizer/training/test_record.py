"""Records: what is written is what is read, also after a crash."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from topovq.tokenizer.training.record import Record, environment, finite, read_record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    record = Record(tmp_path / "record.jsonl")
    record.start(seed=1)
    for step in (10, 20, 30):
        record.append("validation", step=step, loss=1 / step)
    return record


def test_a_record_is_one_json_object_a_line(record: Record) -> None:
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert [len(line.pop("crc32")) for line in lines] == [8] * 4
    assert lines[0] == {"event": "config", "seed": 1}
    assert lines[2] == {"event": "validation", "step": 20, "loss": 0.05}
    assert read_record(record.path) == lines


def test_a_record_that_cannot_be_started_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a full disk would leave an empty file, which the same command with --resume could not read."""

    def write_half(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match=r"No space left on device: '.*record\.jsonl'"):
        Record(tmp_path / "record.jsonl").start(seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_none_becomes_null(record: Record) -> None:
    record.append("validation", step=40, loss=float("nan"))
    assert json.loads(record.path.read_text().splitlines()[-1])["loss"] is None


def test_numbers_that_are_none_become_null_at_any_depth() -> None:
    figures = {"loss": float("nan"), "more": {"psnr": float("inf"), "usage": [0.5, float("nan")]}, "images": 3}
    assert finite(figures) == {"loss": None, "more": {"psnr": None, "usage": [0.5, None]}, "images": 3}


def test_a_half_written_last_line_is_left_out(record: Record) -> None:
    with open(record.path, "a") as file:
        file.write('{"event": "validation", "ste')
    assert [line.get("step") for line in read_record(record.path)] == [None, 10, 20, 30]


def test_going_back_drops_what_came_after_and_the_half_written_line(record: Record) -> None:
    record.append("final", step=30, steps=30, best_loss=0.05, seconds=1.5)
    with open(record.path, "a") as file:
        file.write('{"event": "val')
    record.rewind(20, seed=1, steps=60)
    record.append("validation", step=30, loss=0.5)
    assert read_record(record.path) == [
        {"event": "config", "seed": 1, "steps": 60},
        {"event": "validation", "step": 10, "loss": 0.1},
        {"event": "validation", "step": 20, "loss": 0.05},
        {"event": "validation", "step": 30, "loss": 0.5},
    ]
    assert [path.name for path in record.path.parent.iterdir()] == ["record.jsonl"]


def test_a_damaged_line_in_the_middle_is_named(record: Record) -> None:
    lines = record.path.read_text().splitlines()
    record.path.write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"record\.jsonl, line 2 is not JSON"):
        read_record(record.path)


def test_every_flipped_bit_of_a_line_is_found(record: Record) -> None:
    whole = record.path.read_bytes()
    for place in range(len(whole) - 1):  # without its line end the last line is one that was never finished
        damaged = bytearray(whole)
        damaged[place] ^= 2
        record.path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"record\.jsonl"):
            read_record(record.path)
    record.path.write_bytes(whole)
    assert len(read_record(record.path)) == 4


def test_a_record_from_before_checksums_is_read(record: Record) -> None:
    lines = read_record(record.path)
    assert not any("crc32" in line for line in lines)
    record.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_record(record.path) == lines
    record.append("validation", step=40, loss=0.1)
    with pytest.raises(ValueError, match="some of its lines have a crc32, and some have none"):
        read_record(record.path)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"event": "validation", "step": 1, "loss": 2}\n')
    with pytest.raises(ValueError, match="first line must be a 'config' event"):
        read_record(tmp_path / "other.jsonl")
    with pytest.raises(FileNotFoundError, match="there is no record at"):
        read_record(tmp_path / "missing.jsonl")


def test_the_environment_names_versions_and_hardware() -> None:
    facts = environment(torch.device("cpu"), 2)
    assert facts["version_torch"].split("+")[0] == torch.__version__.split("+")[0]  # wheels differ in what follows
    assert "cores" in facts["hardware"]
    assert facts["world_size"] == 2
    assert facts["version_cuda"] is None
    json.dumps(facts)


def test_what_is_no_file_or_far_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no record at .*pipe\.jsonl"):
        read_record(tmp_path / "pipe.jsonl")
    (tmp_path / "huge.jsonl").touch()
    os.truncate(tmp_path / "huge.jsonl", 5 * 2**30)
    with pytest.raises(ValueError, match=r"huge\.jsonl has 5,368,709,120 bytes"):
        read_record(tmp_path / "huge.jsonl")
