"""What training relies on, for every kind of source."""

import doctest
import json
from itertools import islice

import fake_cifar10
import pytest
import torch
from pictures_on_disk import fill_folder, write_shard

import topovq.tokenizer.data
from topovq.tokenizer.data import SOURCES, loader, open_source


@pytest.fixture(params=["photos", "cifar10", "folder", "shards"])
def source(request, tmp_path, monkeypatch):
    path = None
    if request.param == "cifar10":
        path = fake_cifar10.accept(monkeypatch, fake_cifar10.write_package(tmp_path))
    elif request.param == "folder":
        path = fill_folder(tmp_path, range(40))
    elif request.param == "shards":
        path = write_shard(tmp_path / "x.tar", range(40)).parent
    with open_source(request.param, path, workers=1) as opened:
        yield opened


def is_dense(batch: torch.Tensor) -> bool:
    """Whether a copy to a device is one block of memory."""
    return batch.is_contiguous() or batch.is_contiguous(memory_format=torch.channels_last)


def test_batches(source):
    batches = list(islice(source.train(12, seed=1), 3))
    for batch in batches:
        assert batch.shape == (12, 3, source.size, source.size)
        assert batch.dtype == torch.uint8
        assert is_dense(batch)
        assert batch.device.type == "cpu"
    assert torch.equal(next(source.train(12, seed=1, start=2)), batches[2])
    assert not torch.equal(next(source.train(12, seed=2)), batches[0])
    for world_size in (2, 3):
        ranks = [next(source.train(12, seed=1, start=1, rank=r, world_size=world_size)) for r in range(world_size)]
        assert {len(batch) for batch in ranks} == {12 // world_size}
        assert torch.equal(torch.cat(ranks), batches[1])


def test_validation(source):
    batches = list(source.validation(8))
    whole = torch.cat(batches)
    assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
    assert len(whole) == source.describe()["validation_images"] > 0
    assert whole.dtype == torch.uint8
    assert all(is_dense(batch) for batch in batches)
    for world_size in (2, 4):
        parts = [list(source.validation(8, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert torch.equal(torch.cat([batch for part in parts for batch in part]), whole)
        assert max(len(batch) for part in parts for batch in part) <= 8 // world_size


def test_more_ranks_than_validation_images(tmp_path):
    with open_source("folder", fill_folder(tmp_path, range(3)), workers=0) as source:
        batches = [len(list(source.validation(4, rank=rank, world_size=4))) for rank in range(4)]
    assert sorted(batches) == [0, 0, 0, 1]


def test_facts_are_fit_for_json(source):
    facts = json.loads(json.dumps(source.describe()))
    assert facts["name"] == source.name
    assert facts["size"] == source.size
    assert len(source.mean) == len(source.std) == 3
    assert source.parts == ()


def test_rows_of_a_resident_set(source):
    images = source.resident()
    assert (images is None) == (source.name == "photos")  # drawn endlessly
    if images is not None:
        assert torch.equal(images[source.indices(1, 12, 1)], next(source.train(12, seed=1, start=1)))
        assert source.resident() is images
        index = source.indices(3, 12, 1)
        assert index.dtype == torch.int64
        assert index.shape == (12,)
        assert 0 <= int(index.min()) <= int(index.max()) < source.train_images


def test_what_does_not_stay_resident(tmp_path, monkeypatch):
    folder = fill_folder(tmp_path, range(10))
    with open_source("folder", folder, workers=0, flip=True) as mirrored:
        assert mirrored.resident() is None
    with open_source("folder", folder, workers=0) as source:
        images = source.train_images + source.describe()["validation_images"]
        monkeypatch.setattr(loader, "RESIDENT", images * 3 * source.size**2 - 1)
        assert source.resident() is None
        monkeypatch.setattr(loader, "RESIDENT", images * 3 * source.size**2)
        assert len(source.resident()) == source.train_images
    fill_folder(tmp_path / "two" / "val", range(2))
    (fill_folder(tmp_path / "two" / "train", range(4)) / "002.png").write_bytes(b"no image")
    with open_source("folder", tmp_path / "two", workers=0) as damaged:
        assert damaged.train_images == 4
        assert damaged.resident() is None
        assert damaged.resident() is None  # not decoded again to see


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "batch_size=10 must be a positive multiple of world_size=4"),
        ({"batch_size": 0}, "batch_size=0 must be a positive multiple"),
        ({"rank": 2, "world_size": 2}, r"rank=2 must be in 0\.\.world_size-1 with world_size=2"),
        ({"world_size": 0}, "world_size=0 at least 1"),
        ({"start": -1}, "start=-1 must be 0 or more"),
        ({"seed": -3}, "seed=-3 must be 0 or more"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        open_source("photos").train(**{"batch_size": 8, "seed": 0, **arguments})


def test_parts_where_there_are_none():
    with pytest.raises(ValueError, match="part='cats' given, but photos has no parts"):
        open_source("photos").validation(8, part="cats")


def test_the_example_of_the_documentation():
    assert doctest.testmod(topovq.tokenizer.data) == (0, 3)


def test_a_mistyped_name_lists_the_valid_ones():
    with pytest.raises(
        ValueError, match=r"unknown data source 'cifar' .*; valid: photos, cifar10, folder, shards, imagenet"
    ):
        open_source("cifar")
    with pytest.raises(ValueError, match=r"did you mean 'photos'\?"):
        open_source("photo")


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"photos", "cifar10"}))
def test_a_path_is_needed(name):
    with pytest.raises(ValueError, match=f"the data source '{name}' needs a path"):
        open_source(name)


@pytest.mark.parametrize(
    ("option", "message"), [({"size": 0}, "size 0 cannot be"), ({"workers": -1}, "workers=-1 must be")]
)
def test_options_are_checked(tmp_path, option, message):
    fill_folder(tmp_path, range(2))
    with pytest.raises(ValueError, match=message):
        open_source("folder", tmp_path, **option)


def test_workers_by_default(tmp_path, monkeypatch):
    fill_folder(tmp_path, range(2))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    assert open_source("folder", tmp_path).workers == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert open_source("folder", tmp_path).workers == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "40")
    assert open_source("folder", tmp_path).workers == 1
