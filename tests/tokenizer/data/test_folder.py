import io
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from pictures_on_disk import fill_folder, numbers, picture, png

import topovq.tokenizer.data.decode
from topovq.tokenizer.data import DataError, find_images, open_source
from topovq.tokenizer.data.order import epoch_order, order_slice


def take(batches, count: int) -> list[list[int]]:
    return [numbers(next(batches)) for _ in range(count)]


def flat(shown: list[list[int]]) -> list[int]:
    return [k for batch in shown for k in batch]


@pytest.fixture
def thirty(tmp_path):
    """Pictures 0..23 train and 24..29 validate."""
    fill_folder(tmp_path / "train", range(24))
    fill_folder(tmp_path / "val", range(24, 30))
    return tmp_path


def test_an_epoch_shows_each_image_once_and_batches_cross_its_border(thirty):
    with open_source("folder", thirty, size=4, workers=0) as source:
        shown = flat(take(source.train(10, seed=3), 12))
    for epoch in range(5):
        assert shown[24 * epoch : 24 * (epoch + 1)] == epoch_order(24, 3, epoch).tolist()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_depend_neither_on_workers_nor_on_start(thirty, workers):
    with open_source("folder", thirty, size=4, workers=workers) as source:
        whole = take(source.train(10, seed=1), 12)
        assert whole == [order_slice(24, 1, 10 * i, 10).tolist() for i in range(12)]
        assert take(source.train(10, seed=1, start=5), 3) == whole[5:8]
        assert numbers(torch.cat(list(source.validation(4)))) == [24, 25, 26, 27, 28, 29]


def test_batches_stay_as_they_were_handed_out(thirty):
    with open_source("folder", thirty, size=4, workers=1) as source:
        batches = source.train(5, seed=1)
        kept = [next(batches) for _ in range(10)]
    assert [numbers(batch) for batch in kept] == [order_slice(24, 1, 5 * i, 5).tolist() for i in range(10)]


def test_memory_of_batches_let_go_is_used_again(thirty):
    with open_source("folder", thirty, size=4, workers=1) as source:
        batches = source.train(5, seed=1)
        assert len({next(batches).data_ptr() for _ in range(20)}) < 6


def test_a_part_of_a_batch_keeps_its_memory(thirty):
    with open_source("folder", thirty, size=4, workers=1) as source:
        batches = source.train(5, seed=1)
        corner = next(batches)[2, :, :2, :2]
        before = corner.clone()
        take(batches, 20)
    assert torch.equal(corner, before)


def test_flips_are_drawn_by_seed_and_batch(tmp_path):
    image = picture(1, (8, 8))
    image.paste((200, 0, 0), (0, 0, 4, 8))
    for name in ("train/a.png", "val/b.png"):
        (tmp_path / name).parent.mkdir()
        image.save(tmp_path / name)
    with open_source("folder", tmp_path, size=8, workers=0, flip=True) as source:
        batches = source.train(64, seed=0)
        mirrored = [next(batches)[:, 0, 0, 7] == 200 for _ in range(2)]
        assert all(16 < m.sum() < 48 for m in mirrored)
        assert not torch.equal(*mirrored)
        second = torch.cat([next(source.train(64, seed=0, start=1, rank=r, world_size=2)) for r in range(2)])
        assert torch.equal(second[:, 0, 0, 7] == 200, mirrored[1])
        assert next(source.validation(1))[0, 0, 0].tolist() == [200] * 4 + [1] * 4
    with open_source("folder", tmp_path, size=8, workers=0) as source:
        assert (next(source.train(64, seed=0))[:, 0, 0, 0] == 200).all()


def test_what_is_listed(tmp_path):
    fill_folder(tmp_path / "deep" / "er", range(2))
    (tmp_path / "UPPER.PNG").write_bytes(png(2))
    (tmp_path / "notes.txt").write_text("no image")
    fill_folder(tmp_path / ".thumbnails", range(3, 4))
    (tmp_path / ".hidden.png").write_bytes(png(4))
    (tmp_path / "deep" / "link").symlink_to(tmp_path)  # back to the top: must not be walked for ever
    elsewhere = fill_folder(tmp_path.parent / f"{tmp_path.name}-elsewhere", range(5, 6))
    (tmp_path / "linked").symlink_to(elsewhere)
    names = [name.decode() for name in find_images(tmp_path).names_N]
    assert names == ["UPPER.PNG", "deep/er/000.png", "deep/er/001.png", "linked/005.png"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, caplog):
    fill_folder(tmp_path, range(3))
    fill_folder(tmp_path / "secret", range(3, 4))
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "secret":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # permissions themselves would not stop a test run by root
    source = open_source("folder", tmp_path)
    assert (source.describe()["skipped"], source.train_images) == (1, 2)
    assert f"skipped [Errno 13] Permission denied: '{tmp_path / 'secret'}'" in caplog.text


def test_one_file_is_found_too(tmp_path):
    fill_folder(tmp_path, range(1))
    records = find_images(tmp_path / "000.png")
    assert [records.name(0), len(records)] == [str(tmp_path / "000.png"), 1]


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_beside_the_training_images(tmp_path, name):
    fill_folder(tmp_path / "cats", range(5))
    fill_folder(tmp_path / name, range(5, 7))
    with open_source("folder", tmp_path, size=4, workers=0) as source:
        assert sorted(take(source.train(5, seed=0), 1)[0]) == [0, 1, 2, 3, 4]
        assert numbers(next(source.validation(8))) == [5, 6]


def test_a_test_folder_is_left_alone_where_there_is_a_training_folder(thirty):
    fill_folder(thirty / "test", range(30, 40))
    assert open_source("folder", thirty).train_images == 24


def sides(path) -> tuple[set[int], set[int]]:
    with open_source("folder", path, size=4, workers=0) as source:
        train = take(source.train(source.train_images, seed=0), 1)[0]
        return set(train), set(numbers(torch.cat(list(source.validation(16)))))


def test_a_split_by_name_stays_when_images_are_added(tmp_path):
    train, validation = sides(fill_folder(tmp_path, range(150)))
    assert not train & validation
    assert train | validation == set(range(150))
    assert 2 <= len(validation) <= 16
    more_train, more_validation = sides(fill_folder(tmp_path, range(250)))
    assert train <= more_train
    assert validation <= more_validation


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_split_by_name_leaves_something_on_each_side(tmp_path, count):
    train, validation = sides(fill_folder(tmp_path, range(count)))
    assert len(train) == count - 1
    assert len(validation) == 1


def spoil(thirty, k: int) -> str:
    path = thirty / ("train" if k < 24 else "val") / f"{k:03}.png"
    path.write_bytes(path.read_bytes()[:40])
    return str(path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_named_counted_and_replaced_by_the_next_good_one(thirty, workers, caplog):
    bad = {4, 17}
    paths = [spoil(thirty, k) for k in bad]
    expected = []
    for position in range(60):
        while (k := int(order_slice(24, 2, position, 1)[0])) in bad:
            position += 1
        expected.append(k)
    with caplog.at_level(logging.WARNING, "topovq"), open_source("folder", thirty, size=4, workers=workers) as source:
        assert flat(take(source.train(10, seed=2), 6)) == expected
        assert take(source.train(10, seed=2, start=3), 2) == [expected[30:40], expected[40:50]]
        assert source.describe()["skipped"] == 2
    for path in paths:
        assert caplog.text.count(f"skipped {path}: ") == 1


@pytest.mark.parametrize("kind", ["empty", "text", "directory of the wrong name", "unreadable"])
def test_kinds_of_bad_files(tmp_path, kind, caplog):
    fill_folder(tmp_path / "train", range(3))
    fill_folder(tmp_path / "val", range(3, 5))
    path = tmp_path / "val" / "000.jpg"
    if kind == "unreadable":
        path.symlink_to(tmp_path / "gone.jpg")
    elif kind != "directory of the wrong name":
        path.write_bytes(b"" if kind == "empty" else b"Dear diary,")
    else:
        path.mkdir()
    with open_source("folder", tmp_path, size=4, workers=0) as source:
        assert numbers(torch.cat(list(source.validation(1)))) == [3, 4]
        assert source.describe()["skipped"] == (0 if kind.startswith("directory") else 1)


def test_a_named_pipe_is_skipped_and_not_waited_at(thirty, caplog):
    os.mkfifo(thirty / "val" / "pipe.png")
    (thirty / "val" / "link.png").symlink_to(thirty / "val" / "pipe.png")
    with open_source("folder", thirty, size=4, workers=0) as source:
        assert [len(batch) for batch in source.validation(100)] == [6]
    assert caplog.text.count("not a regular file") == 2
    os.mkfifo(thirty / "pipe.tar")
    with pytest.raises(DataError, match=r"pipe\.tar' is not a regular file"):
        find_images(thirty / "*.tar")


def test_a_file_of_gigabytes_is_skipped_and_not_read(thirty, caplog):
    (thirty / "val" / "huge.webp").write_bytes(b"RIFF")
    os.truncate(thirty / "val" / "huge.webp", 5 * 2**30)
    with open_source("folder", thirty, size=4, workers=0) as source:
        assert [len(batch) for batch in source.validation(100)] == [6]
    assert "huge.webp: OSError: 5,368,709,120 bytes are more than an image has" in caplog.text


def test_an_oversized_image_is_skipped(thirty, monkeypatch, caplog):
    picture(200, (20, 20)).save(thirty / "val" / "large.png")
    monkeypatch.setattr(topovq.tokenizer.data.decode, "MAX_PIXELS", 399)
    with open_source("folder", thirty, size=4, workers=0) as source:
        assert 200 not in numbers(torch.cat(list(source.validation(16))))
    assert "large.png: ValueError: 20x20 pixels are more than the limit of 399" in caplog.text


def test_a_gap_in_validation_is_closed(thirty):
    spoil(thirty, 25)
    with open_source("folder", thirty, size=4, workers=1) as source:
        assert [numbers(batch) for batch in source.validation(2)] == [[24, 26], [27, 28], [29]]


@pytest.mark.parametrize("workers", [0, 2])
def test_only_bad_images_are_an_error(thirty, workers):
    for k in range(30):
        spoil(thirty, k)
    with open_source("folder", thirty, size=4, workers=workers) as source:
        with pytest.raises(
            DataError, match=r"none of the 24 images of .* can be decoded; the first is .*000\.png: not an image"
        ):
            next(source.train(8, seed=0))
        with pytest.raises(DataError, match="none of the 6 images"):
            next(source.validation(4))


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder '.*/nowhere'"):
        open_source("folder", tmp_path / "nowhere")
    (tmp_path / "read.me").write_text("")
    with pytest.raises(DataError, match=r"holds no image; files ending in .* were looked for at any depth"):
        open_source("folder", tmp_path)
    fill_folder(tmp_path, range(1))
    with pytest.raises(DataError, match="holds a single image; at least 2 are needed"):
        open_source("folder", tmp_path)
    fill_folder(tmp_path / "only" / "val", range(3))
    with pytest.raises(DataError, match=r"holds validation images only \(3\)"):
        open_source("folder", tmp_path / "only")


def test_the_global_random_state_is_left_alone(thirty):
    state = torch.get_rng_state()
    with open_source("folder", thirty, size=4, workers=1) as source:
        next(source.train(4, seed=0))
        next(source.validation(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_close_stops_the_workers(thirty):
    before = set(multiprocessing.active_children())
    source = open_source("folder", thirty, size=4, workers=2)
    batches = source.train(4, seed=0)
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    source.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_workers_outlive_a_signal_to_all(thirty, name):
    """Ctrl-C and a batch system's SIGTERM reach the workers too, while training wants batches until it has ended."""
    before = set(multiprocessing.active_children())
    with open_source("folder", thirty, size=4, workers=2) as source:
        batches = source.train(4, seed=0)
        shown = take(batches, 1)
        workers = set(multiprocessing.active_children()) - before
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
        shown += take(batches, 10)
    assert shown == [order_slice(24, 0, 4 * i, 4).tolist() for i in range(11)]


def test_a_parent_ends_its_workers(thirty):
    before = set(multiprocessing.active_children())
    with open_source("folder", thirty, size=4, workers=1) as source:
        batches = source.train(4, seed=0)
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - before
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0


OPEN_AND_STAY = """
import multiprocessing, sys, time
from topovq.tokenizer.data import open_source

batches = open_source("folder", sys.argv[1], size=4, workers=2).train(6, seed=9)
next(batches)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
if sys.argv[2] == "stay":
    time.sleep(60)
"""


@pytest.mark.parametrize("ends", ["by kill -9", "without closing"])
def test_no_worker_outlives_its_parent(thirty, ends):
    then = "stay" if ends == "by kill -9" else "leave"
    command = [sys.executable, "-c", OPEN_AND_STAY, thirty, then]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        if then == "stay":
            parent.kill()
        assert parent.wait(30) == (-signal.SIGKILL if then == "stay" else 0)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SPAWN = """
import json, multiprocessing, sys
from topovq.tokenizer.data import open_source

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with open_source("folder", sys.argv[1], size=4, workers=1) as source:
        batches = source.train(6, seed=9)
        print(json.dumps([next(batches)[:, 0, 0, 0].tolist() for _ in range(5)]))
"""


def test_workers_can_be_spawned(thirty, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, script, thirty], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [order_slice(24, 9, 6 * i, 6).tolist() for i in range(5)]


def test_jpeg_of_an_endless_scan_of_sizes(tmp_path):
    """Files of every shape end as squares of the size asked for."""
    for k, shape in enumerate([(40, 30), (30, 40), (7, 90), (64, 64)]):
        file = io.BytesIO()
        picture(k, shape).save(file, "JPEG", quality=100, subsampling=0)
        (tmp_path / f"{k}.jpg").write_bytes(file.getvalue())
    with open_source("folder", tmp_path, size=16, workers=0) as source:
        batch = next(source.train(3, seed=0))
    assert batch.shape == (3, 3, 16, 16)
    assert (batch[:, 2].int() - 7).abs().max() <= 2
