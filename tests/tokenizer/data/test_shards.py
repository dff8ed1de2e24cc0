import io
import logging
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from pictures_on_disk import fill_folder, numbers, png, write_shard, write_tar

from topovq.tokenizer.data import DataError, find_images, open_source, shards, tar_index
from topovq.tokenizer.data.order import order_slice
from topovq.tokenizer.data.shards import expand, expand_braces
from topovq.tokenizer.data.tar_index import scan_tar


@pytest.fixture
def thirty(tmp_path):
    """Pictures 0..23 train, in three shards of different lengths, and 24..29 validate."""
    write_shard(tmp_path / "train-000.tar", range(10))
    write_shard(tmp_path / "train-001.tar", range(10, 12))
    write_shard(tmp_path / "train-002.tar", range(12, 24))
    write_shard(tmp_path / "val-000.tar", range(24, 30))
    return tmp_path


def names(path) -> list[str]:
    return [name.decode() for name in scan_tar(str(path)).names_N]


def damage(path) -> list[str]:
    return scan_tar(str(path)).damage_M.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_a_list_like_a_folder(thirty, workers):
    with open_source("shards", thirty, size=4, workers=workers) as source:
        batches = source.train(10, seed=1)
        shown = [numbers(next(batches)) for _ in range(8)]
        assert shown == [order_slice(24, 1, 10 * i, 10).tolist() for i in range(8)]
        assert numbers(next(source.train(10, seed=1, start=6))) == shown[6]
        assert numbers(torch.cat(list(source.validation(4)))) == [24, 25, 26, 27, 28, 29]


def test_ranks_share_what_one_would_see(thirty):
    with open_source("shards", thirty, size=4, workers=1) as source:
        ranks = [source.train(12, seed=4, start=2, rank=rank, world_size=3) for rank in range(3)]
        for i in range(2, 6):
            rows = [numbers(next(batches)) for batches in ranks]
            assert [k for row in rows for k in row] == order_slice(24, 4, 12 * i, 12).tolist()
            assert [len(row) for row in rows] == [4, 4, 4]


def test_nothing_is_unpacked(thirty, cache):
    before = sorted(thirty.rglob("*"))
    with open_source("shards", thirty, size=4, workers=0) as source:
        next(source.train(24, seed=0))
    assert sorted(thirty.rglob("*")) == before
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".npz"}


def test_patterns():
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{a,b}-{0..1}.tar") == ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    with pytest.raises(DataError, match=r"\{3\.\.1\} in 'a-\{3\.\.1\}\.tar' is an empty range"):
        expand_braces("a-{3..1}.tar")


def test_paths(thirty):
    files = [f"train-00{i}.tar" for i in range(3)]
    assert [os.path.basename(path) for path in expand(str(thirty))] == [*files, "val-000.tar"]
    for pattern in ("train-{000..002}.tar", "train-*.tar"):
        assert [os.path.basename(path) for path in expand(str(thirty / pattern))] == files
    assert expand(str(thirty / files[1])) == [str(thirty / files[1])]


@pytest.mark.parametrize("pattern", ["train-{000..003}.tar", "nothing-*.tar", "gone.tar", "empty"])
def test_shards_that_are_not_there(thirty, pattern):
    (thirty / "empty").mkdir()
    with pytest.raises(DataError, match=r"names no shard: '.*\.tar' was looked for and is not there"):
        open_source("shards", thirty / pattern)


def test_without_a_validation_shard_the_names_decide_whatever_the_sharding(tmp_path):
    def sides(path):
        with open_source("shards", path, size=4, workers=0) as source:
            train = numbers(next(source.train(source.train_images, seed=0)))
            return sorted(train), sorted(numbers(torch.cat(list(source.validation(9)))))

    write_shard(tmp_path / "one" / "all.tar", range(100))
    for i in range(4):
        write_shard(tmp_path / "four" / f"part-{i}.tar", range(25 * i, 25 * (i + 1)))
    train, validation = sides(tmp_path / "one")
    assert len(validation) > 1
    assert sorted(train + validation) == list(range(100))
    assert sides(tmp_path / "four") == (train, validation)
    folder = open_source("folder", fill_folder(tmp_path / "folder", range(100)), size=4, workers=0)
    assert numbers(torch.cat(list(folder.validation(100)))) == validation


def test_members_that_are_a_sample_s_image(tmp_path):
    others = {"a/0.json": b"{}", "a/0.seg.png": png(9), "a/.hidden.png": png(9), "a/png": b"", "._x.jpg": b""}
    path = write_tar(tmp_path / "x.tar", {"a/0.PNG": png(0), **others, "1.jpeg": b"?", "a.b/2.webp": b"?"})
    assert names(path) == ["a/0.PNG", "1.jpeg", "a.b/2.webp"]
    assert damage(path) == []


def test_names_that_shards_share_are_told_apart(tmp_path):
    for shard in ("b", "a"):
        write_shard(tmp_path / f"{shard}.tar", range(2))
    names = [name.decode() for name in find_images(tmp_path).names_N]
    assert names == ["a/000.png", "a/001.png", "b/000.png", "b/001.png"]
    assert [name.decode() for name in find_images(tmp_path / "b.tar").names_N] == ["000.png", "001.png"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_dialects_of_tar(tmp_path, format):
    members = {f"{'d' * 90}/{'n' * 90}{k}.png": png(k) for k in range(3)}
    path = write_tar(tmp_path / "x.tar", members, format)
    assert names(path) == list(members)
    records = find_images(path)
    assert [records.open(i).read() for i in range(3)] == [png(k) for k in range(3)]


def test_a_header_of_the_whole_archive_is_no_damage(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"0.png": png(0)}, tarfile.PAX_FORMAT, pax_headers={"comment": "made by hand"})
    assert names(path) == ["0.png"]
    assert damage(path) == []


def test_archives_one_after_the_other(tmp_path):
    first, second = (write_shard(tmp_path / f"{i}.tar", range(2 * i, 2 * i + 2)) for i in range(2))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    assert names(first) == ["000.png", "001.png", "002.png", "003.png"]
    assert damage(first) == []


def test_a_missing_end_is_told_and_costs_no_member(tmp_path):
    path = write_shard(tmp_path / "x.tar", range(3))
    index = scan_tar(str(path))
    path.write_bytes(path.read_bytes()[: index.offset_N[-1] + index.length_N[-1]])
    assert names(path) == ["000.png", "001.png", "002.png"]
    assert damage(path) == [
        f"what may have been behind byte {path.stat().st_size}: no empty blocks end the tar file there"
    ]


@pytest.mark.parametrize("cut", ["in a member", "in a header"])
def test_a_truncated_tail(thirty, cut, caplog):
    path = thirty / "train-002.tar"
    index = scan_tar(str(path))
    end = index.offset_N[9] + (20 if cut == "in a member" else -100)
    path.write_bytes(path.read_bytes()[:end])
    with caplog.at_level(logging.WARNING, "topovq"), open_source("shards", thirty, size=4, workers=0) as source:
        shown = numbers(next(source.train(21, seed=0)))
        assert sorted(shown) == list(range(21))
        assert source.describe()["skipped"] == 1
    what = "021.png is cut short" if cut == "in a member" else f"412 bytes from {index.offset_N[9] - 512} on have no"
    assert f"skipped {path}: {what}" in caplog.text


def test_a_damaged_header_costs_one_member(tmp_path):
    path = write_shard(tmp_path / "x.tar", range(5))
    data = bytearray(path.read_bytes())
    start = scan_tar(str(path)).offset_N[2] - 512
    data[start : start + 512] = b"\xa5" * 512
    path.write_bytes(data)
    assert names(path) == ["000.png", "001.png", "003.png", "004.png"]
    assert damage(path) == [f"1024 bytes from {start} on have no readable header"]


def test_a_corrupt_member_is_skipped_and_named(tmp_path, caplog):
    members = {f"{k:03}.png": png(k) for k in range(4)} | {"001.png": b"not an image"}
    write_tar(tmp_path / "train-0.tar", members)
    write_shard(tmp_path / "val-0.tar", range(4, 6))
    with open_source("shards", tmp_path, size=4, workers=1) as source:
        assert set(numbers(next(source.train(16, seed=0)))) == {0, 2, 3}
    assert f"skipped {tmp_path / 'train-0.tar'}: 001.png: not an image of a known format" in caplog.text


def test_a_shard_that_is_none_is_named_and_the_others_serve(thirty, caplog):
    (thirty / "train-003.tar").write_bytes(os.urandom(5000))
    (thirty / "train-004.tar").write_bytes(b"")
    assert open_source("shards", thirty).train_images == 24
    assert f"skipped {thirty / 'train-003.tar'}: 5000 bytes from 0 on have no readable header" in caplog.text
    assert f"skipped {thirty / 'train-004.tar'}: unreadable from byte 0 on (empty file)" in caplog.text


def test_no_image_at_all(tmp_path):
    write_tar(tmp_path / "x.tar", {"notes.txt": b"hello"})
    with pytest.raises(DataError, match=r"\(1 shards\) holds no image; members ending in \.avif.* were looked for$"):
        open_source("shards", tmp_path)
    (tmp_path / "x.tar").write_bytes(b"x" * 600)
    with pytest.raises(DataError, match=r"were looked for \(.*x\.tar: 600 bytes from 0 on"):
        open_source("shards", tmp_path)


def test_compressed_shards_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("0.png"), io.BytesIO())
    with pytest.raises(DataError, match=r"x\.tar is compressed \(gzip\); unpack it to a plain \.tar"):
        open_source("shards", tmp_path)


def test_the_index_is_kept_until_the_shard_changes(thirty, monkeypatch):
    scanned = []
    monkeypatch.setattr(tar_index, "scan_tar", lambda path: scanned.append(path) or scan_tar(path))
    first = find_images(thirty)
    assert len(scanned) == 4
    again = find_images(thirty)
    assert len(scanned) == 4
    for array in ("names_N", "offset_N", "length_N", "shard_N"):
        assert getattr(first, array).tolist() == getattr(again, array).tolist()
    write_shard(thirty / "train-001.tar", range(10, 13))
    assert len(find_images(thirty)) == 31
    assert [os.path.basename(path) for path in scanned[4:]] == ["train-001.tar"]


def test_damage_is_told_each_time_although_the_index_is_kept(thirty, caplog):
    path = thirty / "train-000.tar"
    path.write_bytes(path.read_bytes()[:540])
    for times in (1, 2):
        assert open_source("shards", thirty).describe()["skipped"] == 1
        assert caplog.text.count("cut short") == times


def test_a_cache_that_cannot_be_written_is_said_and_done_without(thirty, monkeypatch, caplog):
    monkeypatch.setenv("TOPOVQ_CACHE", str(thirty / "train-000.tar" / "below-a-file"))
    assert open_source("shards", thirty).train_images == 24
    assert "is not kept, it will be made again next time" in caplog.text


def test_few_files_are_open_at_a_time(thirty, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN_FILES", 2)
    records = find_images(thirty)
    for k in [0, 11, 23, 29, 1, 10, 24]:
        assert records.open(k).read() == png(k)
        assert sum(not file.closed for file in records._files.values()) <= 2


def test_records_travel_to_workers_without_their_files(thirty):
    records = find_images(thirty)
    records.open(0)
    copy = pickle.loads(pickle.dumps(records))
    assert copy.open(13).read() == png(13)


def test_shards_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("a", "b"):
        write_shard(tmp_path / folder / "train.tar", range(2))
    found = [name.decode() for name in find_images(f"{tmp_path}/{{a,b}}/train.tar").names_N]
    assert found == ["a/train/000.png", "a/train/001.png", "b/train/000.png", "b/train/001.png"]


def test_two_members_of_one_name_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for k in range(2):
            member = tarfile.TarInfo("same.png")
            member.size = len(png(k))
            tar.addfile(member, io.BytesIO(png(k)))
    with pytest.raises(DataError, match=r"x\.tar has two members of one name: .*same\.png"):
        find_images(tmp_path / "x.tar")


@pytest.mark.parametrize("change", ["cut", "noise", "missing", "longer", "type", "beyond"])
def test_a_damaged_index_is_made_again(thirty, cache, change, caplog):
    find_images(thirty / "val-000.tar")
    (kept,) = (cache / "shards").glob("*.npz")
    whole, arrays = kept.read_bytes(), dict(np.load(kept))
    if change in ("cut", "noise"):
        kept.write_bytes(whole[:-40] if change == "cut" else whole[:100] + bytes(200) + whole[300:])
    else:
        edits = {
            "longer": {"names_N": arrays["names_N"][:-1]},
            "type": {"offset_N": arrays["offset_N"].astype("U8")},
            "beyond": {"length_N": arrays["length_N"] + 2**40},
        }
        np.savez(
            kept,
            **{
                name: array
                for name, array in (arrays | edits.get(change, {})).items()
                if change != "missing" or name != "names_N"
            },
        )
    assert [find_images(thirty / "val-000.tar").open(i).read() for i in range(6)] == [png(k) for k in range(24, 30)]
    assert "is damaged: it is made again" in caplog.text
    caplog.clear()
    find_images(thirty / "val-000.tar")
    assert not caplog.records


def header(name: str, size: int, kind: bytes) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def test_zeros_without_end_take_no_memory(tmp_path, run_with_gauge):
    hole = 1 << 28
    whole = write_shard(tmp_path / "whole.tar", range(2)).read_bytes()
    starts = {
        "between": write_shard(tmp_path / "first.tar", range(2, 4)).read_bytes(),
        "name": header("x", hole, tarfile.GNUTYPE_LONGNAME),
        "pax": header("x", hole, tarfile.XHDTYPE),
        "image": header("zeros.png", 4 * hole, tarfile.REGTYPE),
    }
    for name, start in starts.items():
        with open(tmp_path / f"{name}.tar", "wb") as file:
            file.write(start)
            file.seek(4 * hole if name == "image" else hole, os.SEEK_CUR)
            file.write(whole)
    run_with_gauge(f"""
        import numpy as np
        from topovq.tokenizer.data import find_images
        from topovq.tokenizer.data.loader import reason_not_decoded
        start_gauge()
        for name, images in (("between", 4), ("name", 0), ("pax", 0), ("image", 3)):
            try:
                records = find_images({str(tmp_path)!r} + "/" + name + ".tar")
            except ValueError as error:
                assert images == 0 and name + ".tar" in str(error), (name, error)
                continue
            assert len(records) == images, (name, len(records))
            if name == "image":
                reason = reason_not_decoded(records, 0, 8, "crop", np.empty((8, 8, 3), dtype=np.uint8))
                assert "1,073,741,824 bytes are more than the limit" in reason, reason
        assert growth() < 64, growth()
    """)
