"""Files and folders that are either whole or not there."""

import errno
import os
from pathlib import Path

import pytest
from warm import python

from topovq.storage import (
    DamagedFile,
    append,
    atomic_file,
    atomic_folder,
    manifest,
    read_manifest,
    remove_abandoned,
    remove_leftovers,
    sha256,
    write_atomic,
    write_files,
)


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


def test_an_error_names_the_file_and_not_the_one_beside_it(tmp_path):
    path = tmp_path / ("x" * 300)  # too long, as the name beside it is
    with pytest.raises(OSError, match="too long") as raised, atomic_file(path) as temporary:
        temporary.write_bytes(b"")
    assert raised.value.filename == str(path)


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
    python("-c", KILLED, tmp_path)
    assert len(os.listdir(tmp_path)) == len(whole) + 2
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == whole


def test_what_others_are_writing_is_left_alone(tmp_path: Path):
    python("-c", KILLED, tmp_path)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / ".tokens.npz.0ffee0-99999999.tmp").write_text("")  # of a process of another machine
    with atomic_file(tmp_path / "mine.txt") as temporary:
        temporary.write_text("")
        remove_abandoned(tmp_path)
        assert temporary.exists()
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {"b.txt", "mine.txt", ".tokens.npz.0ffee0-99999999.tmp"}


# Manifests


def save(folder: Path) -> Path:
    write_files(folder, {"a.txt": b"one", "b.txt": b"two"})
    return folder


def test_files_are_compared_with_their_manifest(tmp_path):
    save(tmp_path)
    assert read_manifest(tmp_path, ["a.txt", "b.txt"])["sha256"]["a.txt"] == sha256(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"onf")
    assert read_manifest(tmp_path, ["b.txt"])
    with pytest.raises(DamagedFile, match=r"a\.txt is damaged or was changed: its SHA-256, \w{12}\.\.\., is not"):
        read_manifest(tmp_path, ["a.txt", "b.txt"])
    os.truncate(tmp_path / "a.txt", 1 << 40)  # of zeros: nobody waits until they are read
    with pytest.raises(DamagedFile, match=r"a\.txt is damaged .* 1,099,511,627,776 bytes are not the 3 in"):
        read_manifest(tmp_path, ["a.txt", "b.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DamagedFile, match=r"a\.txt is missing"):
        read_manifest(tmp_path, ["a.txt"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON file"),
        ("[1]", "expected a JSON object"),
        ('{"sha256": 1}', "not what its own SHA-256 says"),
        ('{"sha256": {"a.txt": ""}, "bytes": 3}', "not what its own SHA-256 says"),
        (manifest({"b.txt": b""}).decode(), "must have the SHA-256 of a.txt"),
        (manifest({"a.txt": b"one"}).decode().replace(": 3", ": 4"), "not what its own SHA-256 says"),
        ('{"sha256": {}, "sha256": {}}', "'sha256' is there twice"),
        ("[" * 100_000, "no JSON file"),
        (" " * (1 << 21), "has 2,097,152 bytes"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, text, said):
    (save(tmp_path) / "manifest.json").write_text(text)
    with pytest.raises(DamagedFile, match=rf"manifest\.json.*{said}"):
        read_manifest(tmp_path, ["a.txt"])


def test_a_folder_without_manifest_is_taken(tmp_path):
    (save(tmp_path) / "manifest.json").unlink()
    assert read_manifest(tmp_path, ["a.txt"]) == {}


def test_a_write_that_is_cut_off_leaves_no_wrong_manifest(tmp_path, monkeypatch):
    save(tmp_path)
    monkeypatch.setattr("topovq.storage.write_atomic", lambda path, data: write_half(path, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
