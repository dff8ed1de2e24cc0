"""Files and folders that are either whole or not there."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from topovq.storage import append, atomic_file, atomic_folder, remove_leftovers, write_atomic


def test_a_file_is_written_in_a_folder_that_is_made(tmp_path):
    write_atomic(tmp_path / "new" / "a.txt", b"one")
    write_atomic(tmp_path / "new" / "a.txt", b"two")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    assert (tmp_path / "new" / "a.txt").read_bytes() == b"two"


def write_half(path: Path, error: BaseException) -> None:
    path.write_text("half")
    raise error


def test_a_file_whose_writing_fails_stays_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="no space"), atomic_file(path) as temporary:
        write_half(temporary, OSError("no space"))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_another_or_leaves_it(tmp_path):
    place = tmp_path / "step"
    for text in ("one", "two"):
        with atomic_folder(place) as temporary:
            (temporary / text).write_text(text)
    with pytest.raises(KeyboardInterrupt), atomic_folder(place) as temporary:
        write_half(temporary / "three", KeyboardInterrupt())
    assert [path.name for path in place.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [place]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"), atomic_file(path) as temporary:
        write_half(temporary, OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append(Path("/dev/full"), b"line\n")


def test_append_adds_to_the_end(tmp_path):
    for line in (b"one\n", b"two\n"):
        append(tmp_path / "a.txt", line)
    assert (tmp_path / "a.txt").read_text() == "one\ntwo\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from topovq.storage import atomic_file, atomic_folder

with atomic_folder(Path(sys.argv[1], "step")) as folder, atomic_file(Path(sys.argv[1], "a.txt")) as file:
    (folder / "x").write_text("half")
    file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path):
    whole = {".hidden", "b.txt", "step-1"}
    (tmp_path / "step-1").mkdir()
    for name in whole - {"step-1"}:
        (tmp_path / name).write_text("")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert len(os.listdir(tmp_path)) == len(whole) + 2
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == whole
