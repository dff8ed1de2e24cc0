"""Each training image once, and the classes of images."""

import fake_cifar10
import pytest
import torch
from pictures_on_disk import fill_folder, numbers, write_tar
from pictures_on_disk import png as png_of

from topovq.tokenizer.data import DataError, open_source
from topovq.tokenizer.data.cifar10 import CLASSES


def test_images_of_folders_once_with_their_classes(tmp_path):
    fill_folder(tmp_path / "train" / "cat", range(3))
    fill_folder(tmp_path / "train" / "dog", range(3, 6))
    fill_folder(tmp_path / "val" / "dog", range(6, 7))
    (tmp_path / "train" / "cat" / "001.png").write_bytes(b"no image")
    with open_source("folder", tmp_path, size=4, workers=0, flip=True) as source:
        read = [k for batch in source.each(2) for k in numbers(batch)]
        assert read == [0, 2, 3, 4, 5]  # mirrored or shuffled it would not be the same image twice
        assert len(list(source.validation(2))) == 1
        labels = source.labels()
    assert labels.names == ["cat", "dog"]
    assert labels.train_N.tolist() == [0, 0, 1, 1, 1]
    assert labels.validation_M.tolist() == [1]


def test_members_of_shards_have_classes_by_their_folders(tmp_path):
    members = {f"{name}/{k}.png": png_of(k) for k, name in enumerate(("a", "a", "b"))}
    write_tar(tmp_path / "train-0.tar", members)
    write_tar(tmp_path / "val-0.tar", {"b/9.png": png_of(9)})
    with open_source("shards", tmp_path, size=4, workers=0) as source:
        assert [k for batch in source.each(8) for k in numbers(batch)] == [0, 1, 2]
        assert source.labels().train_N.tolist() == [0, 0, 1]


def test_the_labels_of_cifar10(tmp_path, monkeypatch):
    path = fake_cifar10.accept(monkeypatch, fake_cifar10.write_package(tmp_path))
    images, labels = map(torch.from_numpy, fake_cifar10.images_and_labels())
    with open_source("cifar10", path) as source:
        found = source.labels()
        each = torch.cat(list(source.each(7)))
    assert found.names == list(CLASSES)
    assert len(each) == len(found.train_N) == source.train_images
    for image, label in zip(each[:20], found.train_N[:20]):
        same = (images == image).flatten(1).all(1).nonzero()[:, 0]
        assert label in labels[same]


def test_where_there_are_no_labels_it_is_said(tmp_path):
    with open_source("photos") as source:
        with pytest.raises(DataError, match="images of photos have no labels"):
            source.labels()
        with pytest.raises(ValueError, match="draws its images endlessly"):
            source.each(4)
    fill_folder(tmp_path / "train", range(3))
    with (
        open_source("folder", tmp_path, size=4, workers=0) as source,
        pytest.raises(DataError, match=r"the image 'train/\d+.png' has no label"),
    ):
        source.labels()
