"""FD-VGG by hand where the answer is known, and on a network of random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.prior.samples import CONVOLUTIONS, VGG, Moments, frechet

CHANNELS = [3, 4, 4, 4, 4, 4, 4, 4, 6, 6, 6, 6, 6, 6]


def test_the_distance_of_gaussians_that_share_axes() -> None:
    ours = Moments(torch.tensor([1.0, 2.0]).double(), torch.diag(torch.tensor([4.0, 9.0])).double(), 5)
    theirs = Moments(torch.tensor([1.0, 5.0]).double(), torch.diag(torch.tensor([16.0, 1.0])).double(), 5)
    assert frechet(ours, theirs) == pytest.approx(3**2 + (4 - 2) ** 2 + (3 - 1) ** 2)
    assert frechet(ours, ours) == pytest.approx(0, abs=1e-9)


def test_the_same_set_is_nearer_than_another(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for number in range(CONVOLUTIONS):
        shape = (CHANNELS[number + 1], CHANNELS[number], 3, 3)
        weights[f"conv{number}.weight"] = (torch.randn(shape, generator=generator) * 0.3).half()
        weights[f"conv{number}.bias"] = torch.randn(shape[0], generator=generator).half() * 0.1
    save_file(weights, tmp_path / "vgg.safetensors")
    vgg = VGG(tmp_path / "vgg.safetensors")
    images = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8, generator=generator)
    assert vgg.features(images).shape == (60, 6)
    assert torch.allclose(vgg.moments(images, 7).mean_F, vgg.moments(images).mean_F)
    dark = vgg.moments(images // 4)
    assert frechet(vgg.moments(images[:30]), vgg.moments(images[30:])) < frechet(vgg.moments(images), dark) / 2
    with pytest.raises(FileNotFoundError, match="no weights of VGG16"):
        VGG(tmp_path / "none.safetensors")
