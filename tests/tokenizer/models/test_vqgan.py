"""VQGAN's networks: sizes by hand, one block by hand, and what training does with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_runs import make_run
from torch import nn

from topovq.tokenizer.models import VQGAN
from topovq.tokenizer.models.vqgan import Attention, Norm, Residual
from topovq.tokenizer.tokens import decode, encode
from topovq.tokenizer.training import info, load_run
from topovq.tokenizer.training.step import working_copy
from topovq.view.report import write_report

SMALL = {"image_size": 32, "hidden": 8, "codebook_size": 16, "code_dim": 4}


@pytest.mark.parametrize(
    ("options", "side"),
    [({"stride": 8}, 4), ({"stride": 16}, 2), ({"stride": 8, "light": False, "residual_layers": 2}, 4)],
)
def test_the_stride_and_the_code_dimension_are_free(options: dict, side: int) -> None:
    torch.manual_seed(0)
    model = VQGAN(**SMALL, **options).eval()
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    output = model(x)
    assert output.tokens.shape == (2, side, side)
    assert output.reconstruction.shape == x.shape
    assert model.quantizers[0].codebook.shape == (16, 4)
    assert torch.equal(model.decode(model.encode(x)), model.to_pixels(output.reconstruction))
    blocks = sum(isinstance(module, Residual) for module in model.encoder.modules())
    levels = {8: 3, 16: 4}[options["stride"]]  # without that of the image
    assert blocks == 1 + (2 * (levels + 1) if options.get("light") is False else levels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 6}, r"stride=6 must be one of 4, 8, 16, 32"),
        ({"hidden": 7}, r"hidden=7 must be an even number"),
        ({"residual_layers": 0}, r"residual_layers=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VQGAN(**{**SMALL, **options})


def test_attention_by_hand() -> None:
    torch.manual_seed(0)
    layer, x = Attention(6, 2), torch.randn(2, 6, 3, 2)
    q, k, v = layer.qkv(layer.norm(x)).reshape(2, 3, 6, 6).unbind(1)  # [B, C, places] each
    weights = (torch.einsum("bci,bcj->bij", q, k) / 6**0.5).softmax(-1)
    attended = torch.einsum("bij,bcj->bci", weights, v).reshape(x.shape)
    torch.testing.assert_close(layer(x), x + layer.out(attended))


def test_the_norm_keeps_half_precision_and_the_values() -> None:
    x = torch.randn(2, 8, 4, 4) * 3 + 100  # in bf16, sums of squares of this would be lost
    norm = Norm(8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        half = norm(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), F.group_norm(x.bfloat16().float(), 2), atol=0.03, rtol=0.03)
    assert [Norm(width, hidden).num_groups for width, hidden in ((512, 128), (32, 64), (64, 16), (6, 4))] == [
        32,
        32,
        16,
        2,
    ]


def test_a_map_of_one_token_tells_images_apart() -> None:
    torch.manual_seed(0)
    model = VQGAN(**{**SMALL, "stride": 32})
    (z,) = model.features(torch.randn(8, 3, 32, 32))
    assert z.shape == (8, 4, 1, 1)
    assert z.std(0).min() > 1e-3


def test_the_copy_that_works_in_half_precision_shares_what_stays_in_float32() -> None:
    """The optimizer writes bf16 values to every parameter of the copy that is not the model's own."""
    model = VQGAN(**SMALL)
    copied = working_copy(model)
    assert len(list(copied.parameters())) == len(list(model.parameters()))
    for ours, theirs in zip(model.parameters(), copied.parameters()):
        assert theirs is ours or theirs.dtype == torch.bfloat16
    norms = [module for module in copied.modules() if isinstance(module, nn.GroupNorm)]
    assert norms
    assert all(norm.weight.dtype == torch.float32 for norm in norms)


def test_a_run_is_trained_resumed_reported_and_gives_tokens(tmp_path: Path) -> None:
    chosen = {"model": "vqgan", "model_options": {"hidden": 8}, "quantizer_options": {"metric": "cosine"}}
    folder = make_run(tmp_path / "run", **chosen)
    make_run(folder, steps=6, resume=True, **chosen)
    assert info(folder)["step"] == 6
    model = load_run(folder)
    assert isinstance(model, VQGAN)
    assert "vqgan" in write_report([folder], tmp_path / "report.html").read_text()
    (tmp_path / "images").mkdir()
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(tmp_path / "images" / "gray.png")
    encode(folder, tmp_path / "images", tmp_path / "tokens.npz", device="cpu")
    decode(folder, tmp_path / "tokens.npz", tmp_path / "decoded", device="cpu")
    with Image.open(tmp_path / "decoded" / "gray.png") as image:
        assert image.size == (32, 32)
