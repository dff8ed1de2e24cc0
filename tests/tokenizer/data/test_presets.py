import pytest
import torch
from pictures_on_disk import fill_folder, numbers, picture, png, write_shard, write_tar

from topovq.tokenizer.data import DataError, open_source


def write_faces(path, humans: range, cats: range):
    members = {f"human-{k}.png": png(k) for k in humans} | {f"cat-{k}.png": png(k) for k in cats}
    return write_tar(path, members)


def validation(source, part: str | None = None) -> list[int]:
    return numbers(torch.cat(list(source.validation(4, part=part))))


def test_imagenet_from_a_folder_or_from_shards(tmp_path):
    fill_folder(tmp_path / "folder" / "train" / "n01", range(4))
    fill_folder(tmp_path / "folder" / "val" / "n01", range(4, 6))
    write_shard(tmp_path / "shards" / "train-0.tar", range(4))
    write_shard(tmp_path / "shards" / "val-0.tar", range(4, 6))
    for path in ("folder", "shards", "shards/{train,val}-0.tar"):
        with open_source("imagenet", tmp_path / path, workers=0) as source:
            assert (source.name, source.size, source.parts) == ("imagenet", 256, ())
            batch = next(source.train(4, seed=0))
            assert batch.shape == (4, 3, 256, 256)
            assert sorted(numbers(batch)) == [0, 1, 2, 3]
            assert validation(source) == [4, 5]
            assert source.mean == pytest.approx((0.485 * 255, 0.456 * 255, 0.406 * 255))
            assert source.std == pytest.approx((0.229 * 255, 0.224 * 255, 0.225 * 255))


def test_imagenet_resizes_both_sides(tmp_path):
    """As the paper's experiments did: nothing is cut off."""
    image = picture(0, (60, 20))
    image.paste((200, 255, 7), (0, 0, 15, 20))
    for name in ("a.png", "b.png"):
        image.save(tmp_path / name)
    with open_source("imagenet", tmp_path, size=8, workers=0) as source:
        red_S = next(source.train(1, seed=0))[0, 0, 0]
    assert red_S[0] == 200
    assert red_S[3:].tolist() == [0] * 5


def test_faces_from_one_set_of_shards(tmp_path):
    write_faces(tmp_path / "train-0.tar", range(3), range(3, 8))
    write_faces(tmp_path / "val-0.tar", range(8, 10), range(10, 15))
    with open_source("faces", tmp_path, size=4, workers=0) as source:
        assert source.parts == ("celebahq", "afhq")
        assert source.train_images == 8
        assert validation(source, "celebahq") == [8, 9]
        assert validation(source, "afhq") == [10, 11, 12, 13, 14]
        assert validation(source) == list(range(8, 15))
        assert source.describe()["validation_parts"] == {"celebahq": 2, "afhq": 5}
        assert (source.mean, source.std) == ((127.5,) * 3, (127.5,) * 3)


@pytest.mark.parametrize("form", ["sequence", "string"])
def test_faces_from_two_paths(tmp_path, form):
    fill_folder(tmp_path / "celeba_hq" / "train", range(3))
    fill_folder(tmp_path / "celeba_hq" / "val", range(3, 5))
    write_shard(tmp_path / "afhq" / "train-0.tar", range(5, 9))
    write_shard(tmp_path / "afhq" / "val-0.tar", range(9, 12))
    paths = [tmp_path / "celeba_hq", tmp_path / "afhq"]
    with open_source("faces", paths if form == "sequence" else "::".join(map(str, paths)), size=4, workers=1) as source:
        assert sorted(numbers(next(source.train(7, seed=0)))) == [0, 1, 2, 5, 6, 7, 8]
        assert validation(source, "celebahq") == [3, 4]
        assert validation(source, "afhq") == [9, 10, 11]
        assert validation(source) == [3, 4, 9, 10, 11]
        assert source.size == 4
        assert source.describe()["path"] == f"{paths[0]}::{paths[1]}"


def test_damage_of_both_paths_is_counted(tmp_path):
    first = write_shard(tmp_path / "a" / "x.tar", range(9))
    second = write_shard(tmp_path / "b" / "x.tar", range(9))
    for path in (first, second):
        path.write_bytes(path.read_bytes()[: 3 * 1024 + 540])
    assert open_source("faces", [first.parent, second.parent]).describe()["skipped"] == 2


def test_faces_of_neither_set(tmp_path):
    write_shard(tmp_path / "x.tar", range(3))
    with pytest.raises(DataError, match=r"'000\.png' in .* belongs to neither set of faces; human-\*, cat-\*, dog-\*"):
        open_source("faces", tmp_path)


def test_three_paths(tmp_path):
    with pytest.raises(ValueError, match=r"one path, or two \(CelebA-HQ's and AFHQ's\); got 3"):
        open_source("faces", ["a", "b", "c"])


def test_an_unknown_part(tmp_path):
    write_faces(tmp_path / "x.tar", range(3), range(3, 8))
    with pytest.raises(ValueError, match="part='cats' is none of celebahq, afhq"):
        open_source("faces", tmp_path).validation(4, part="cats")
