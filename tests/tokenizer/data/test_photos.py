import numpy as np
import pytest
import torch

from topovq.tokenizer.data import open_source, photo_crops, photograph
from topovq.tokenizer.data.photos import HELD_OUT, NORMALIZATION, SCALES, TRAINING, _crops, _pyramid


def test_normalization_is_that_of_the_training_photographs():
    pixels = [photograph(name).reshape(-1, 3).astype(np.float64) for name in TRAINING]
    mean_3 = np.mean([p.mean(axis=0) for p in pixels], axis=0)
    std_3 = np.sqrt(np.mean([(p**2).mean(axis=0) for p in pixels], axis=0) - mean_3**2)
    np.testing.assert_allclose(NORMALIZATION, [mean_3, std_3], atol=0.005)


def test_photographs_are_in_color_and_held_out_ones_do_not_train():
    assert not set(TRAINING) & set(HELD_OUT)
    for name in TRAINING + HELD_OUT:
        pixels_HWC = photograph(name)
        assert pixels_HWC.dtype == np.uint8
        assert min(pixels_HWC.shape[:2]) >= 300
        assert (pixels_HWC[..., 0] != pixels_HWC[..., 2]).mean() > 0.4


def crop(*words: int) -> torch.Tensor:
    return _crops(TRAINING, 32, np.array(words, dtype=np.uint64), range(1))[0]


def test_words_choose_photograph_scale_place_and_mirroring():
    window_3SS = torch.from_numpy(photograph(TRAINING[1])[5:37, 7:39].copy()).permute(2, 0, 1)
    assert torch.equal(crop(1, 0, 5, 7, 0), window_3SS)
    assert torch.equal(crop(1, 0, 5, 7, 1), window_3SS.flip(2))
    height, width = photograph(TRAINING[1]).shape[:2]
    assert torch.equal(crop(1 + len(TRAINING), len(SCALES), 5 + height - 31, 7 + width - 31, 2), window_3SS)
    half = torch.from_numpy(_pyramid(TRAINING[1], 32)[2])
    assert half.shape[1:] == (height // 2, round(width / 2))
    assert torch.equal(crop(1, 2, 0, 0, 0), half[:, :32, :32])


def test_scales_stop_where_the_crop_would_not_fit():
    height, width = photograph(TRAINING[1]).shape[:2]
    assert [level.shape[1] for level in _pyramid(TRAINING[1], 200)] == [height, round(height / 2**0.5)]
    assert _pyramid(TRAINING[1], 600)[0].shape == (3, 600, round(width * 600 / height))


def test_every_photograph_and_scale_is_drawn():
    crops = photo_crops(2000, size=8, seed=1)
    assert crops.shape == (2000, 3, 8, 8)
    means = crops.float().mean((0, 2, 3))
    assert torch.allclose(means, torch.tensor(NORMALIZATION[0]), atol=6)


def test_batches_and_validation_differ_and_repeat():
    source = open_source("photos", size=16)
    batches = source.train(8, seed=0)
    first, second = next(batches), next(batches)
    assert not torch.equal(first, second)
    assert torch.equal(next(source.train(8, seed=0, start=1)), second)
    assert not torch.equal(next(source.train(8, seed=1)), first)
    validation = torch.cat(list(source.validation(100)))
    assert validation.shape == (512, 3, 16, 16)
    assert torch.equal(validation, torch.cat(list(open_source("photos", size=16).validation(512))))
    assert torch.equal(validation[:300], photo_crops(512, 16, held_out=True)[:300])


def is_cut_from(crop_3SS: np.ndarray, level_3HW: np.ndarray) -> bool:
    corner = (level_3HW[:, :-31, :-31] == crop_3SS[:, :1, :1]).all(axis=0)
    return any((level_3HW[:, y : y + 32, x : x + 32] == crop_3SS).all() for y, x in zip(*corner.nonzero()))


def test_held_out_crops_are_cut_from_held_out_photographs():
    levels = [level for name in HELD_OUT for level in _pyramid(name, 32)]
    for crop_3SS in photo_crops(6, held_out=True).numpy():
        assert any(is_cut_from(c, level) for c in (crop_3SS, crop_3SS[:, :, ::-1]) for level in levels)


def test_a_path_is_refused():
    with pytest.raises(ValueError, match=r"'my/images'.*give their folder instead"):
        open_source("photos", "my/images")


def test_it_has_no_rows():
    source = open_source("photos")
    assert source.resident() is None
    with pytest.raises(ValueError, match="have no indices"):
        source.indices(0, 8, 0)
