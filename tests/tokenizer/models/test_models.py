"""Shapes and parameter counts by hand, then what encode, decode and forward owe each other."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from topovq.tokenizer.models import MODELS, QUANTIZERS, VQVAE, VQVAE2, Output, as_levels, load_pretrained
from topovq.tokenizer.models.blocks import Residual, dense_gradient

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 16, "code_dim": 8}
SMALL_OF = dict.fromkeys(MODELS, SMALL)
SMALL_OF["vqgan"] = {name: value for name, value in SMALL.items() if name != "residual_hidden"} | {"stride": 4}


def conv(inputs: int, outputs: int, side: int) -> int:
    return inputs * outputs * side * side + outputs


RESIDUALS = 2 * (conv(128, 32, 3) + conv(32, 128, 1))


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def images(count: int, size: int, channels: int = 3) -> torch.Tensor:
    coarse = torch.rand(count, channels, size // 4, size // 4) * 255
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").to(torch.uint8)


def test_vqvae_has_the_papers_sizes() -> None:
    model = VQVAE()
    encoder = conv(3, 64, 4) + conv(64, 128, 4) + conv(128, 128, 3) + RESIDUALS + conv(128, 64, 1)
    decoder = conv(64, 128, 3) + RESIDUALS + conv(128, 64, 4) + conv(64, 3, 4)
    assert encoder == 372_416
    assert decoder == 290_307
    assert parameters(model) == encoder + decoder == 662_723
    assert model.token_shapes == [(8, 8)]
    assert model.quantizers[0].codebook.shape == (512, 64)


def test_vqvae2_has_the_papers_sizes() -> None:
    model = VQVAE2()
    bottom = conv(3, 64, 4) + conv(64, 128, 4) + conv(128, 128, 3) + RESIDUALS
    top = conv(128, 64, 4) + conv(64, 128, 3) + RESIDUALS
    to_codes = conv(128, 64, 1) + conv(128 + 64, 64, 1)
    condition = conv(64, 128, 3) + RESIDUALS + conv(128, 64, 4)
    decoder = conv(64, 64, 4) + conv(128, 128, 3) + RESIDUALS + conv(128, 64, 4) + conv(64, 3, 4)
    assert parameters(model) == bottom + top + to_codes + condition + decoder == 1_388_867
    assert [tuple(q.codebook.shape) for q in model.quantizers] == [(512, 64), (512, 64)]
    with torch.no_grad():
        top_tokens, bottom_tokens = model.eval()(torch.zeros(1, 3, 256, 256)).tokens
    assert (top_tokens.shape, bottom_tokens.shape) == ((1, 32, 32), (1, 64, 64))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (VQVAE(**SMALL, stride=2), [(8, 8)]),
        (VQVAE(**SMALL, stride=8), [(2, 2)]),
        (VQVAE(**SMALL, channels=1, mean=[0.0], std=[255.0]), [(4, 4)]),
        (VQVAE2(**SMALL, strides=(2, 4)), [(2, 2), (8, 8)]),
        (VQVAE2(**SMALL, strides=(4, 2, 2)), [(1, 1), (2, 2), (4, 4)]),
    ],
)
def test_sizes_are_free(model: VQVAE | VQVAE2, shapes: list[tuple[int, int]]) -> None:
    assert model.token_shapes == shapes
    x = images(2, 16, model.channels)
    output = model.eval()(x)
    assert output.reconstruction.shape == x.shape
    assert model.decode(model.encode(x)).shape == x.shape


def test_the_lower_level_is_the_convolution_of_joined_maps() -> None:
    """Which is done in two parts: the image's before the codes above are known, then theirs."""
    torch.manual_seed(0)
    model = VQVAE2(**SMALL, strides=(2, 2, 2)).double()
    x, above = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(2, 8, 4, 4, dtype=torch.float64)
    bottom = model.encoders[0](x)
    middle = model.encoders[1](bottom)
    _, feature, _ = model.features(x)
    whole = model.to_codes[1](torch.cat([model.condition[1](above[..., :2, :2]), middle], 1))
    torch.testing.assert_close(model.descend(1, feature, above[..., :2, :2]), whole)
    feature = model.features(x)[2]
    whole = model.to_codes[0](torch.cat([model.condition[0](above), bottom], 1))
    torch.testing.assert_close(model.descend(2, feature, above), whole)


@pytest.mark.parametrize("given_last", [True, False], ids=["gradient last", "gradient first"])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_a_slice_of_a_gradient_is_made_dense(last: bool, given_last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout).requires_grad_()
    seen = []
    y = x * 1
    y.register_hook(seen.append)
    given = torch.channels_last if given_last else torch.contiguous_format
    weights = torch.randn(2, 7, 4, 5).contiguous(memory_format=given)
    (torch.cat([dense_gradient(y), torch.zeros(2, 4, 4, 5)], 1) * weights).sum().backward()
    (grad,) = seen
    assert grad.is_contiguous(memory_format=layout)
    assert torch.equal(grad, weights[:, :3])
    assert dense_gradient(x.detach()).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("cls", [VQVAE, VQVAE2])
def test_decode_of_encode_is_what_forward_reconstructs(cls: type[VQVAE] | type[VQVAE2], kind: str) -> None:
    torch.manual_seed(0)
    model = cls(**SMALL, quantizer=kind).eval()
    x = images(3, 16)
    output = model(x)
    tokens = model.encode(x)
    for ours, theirs in zip(as_levels(tokens), as_levels(output.tokens), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)
    pixels = model.decode(tokens)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, model.to_pixels(output.reconstruction))


def test_the_loss_is_the_error_per_element_and_a_quarter_of_the_commitment() -> None:
    torch.manual_seed(0)
    model = VQVAE(**SMALL, mean=[100.0] * 3, std=[50.0] * 3).eval()
    x = images(2, 16)
    normalized = (x.double() - 100) / 50
    output: Output = model(x)
    z = model.to_codes(model.encoder(normalized.float()))
    codes = model.quantizers[0].get_output_from_indices(output.tokens)
    reconstruction_loss = (output.reconstruction.double() - normalized).square().mean()
    torch.testing.assert_close(output.reconstruction_loss.double(), reconstruction_loss, rtol=1e-5, atol=0)
    commitment = (z - codes).square().mean()
    torch.testing.assert_close(output.loss, output.reconstruction_loss + 0.25 * commitment, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_one_batch_is_learned(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind](**SMALL_OF[kind]).train()
    x = images(4, 16)
    rate, steps = (1e-3, 80) if kind == "vqgan" else (3e-3, 300)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0)
    losses = []
    for _ in range(steps):
        output = model(x)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        losses.append(float(output.reconstruction_loss.detach()))
    assert losses[-1] < 0.15 * losses[0]


def test_both_residual_blocks_by_hand() -> None:
    x = torch.randn(2, 4, 3, 3)
    for kind in ("plain", "activated"):
        block = Residual(4, 2, kind)
        first, second = block.body[1], block.body[3]
        inner = F.conv2d(x.relu(), first.weight, first.bias, padding=1).relu()
        skip = x if kind == "plain" else x.relu()
        torch.testing.assert_close(block(x), skip + F.conv2d(inner, second.weight, second.bias))
        assert (first.bias is None) == (second.bias is None) == (kind == "activated")
    model = VQVAE2(**SMALL, residual="activated")
    assert model.config["residual"] == "activated"
    assert not any("body" in name and name.endswith("bias") for name, _ in model.named_parameters())


def test_encoding_in_training_mode_leaves_the_codes_alone() -> None:
    model = VQVAE(**SMALL).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.encode(images(2, 16))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_model_comes_back(kind: str, tmp_path) -> None:
    torch.manual_seed(0)
    options = {
        "neighborhood": "gaussian",
        "grid": [2, 8],
        "schedule": {"kind": "linear", "start": 2.0, "end": 0.5, "steps": 9},
    }
    model = MODELS[kind](**SMALL_OF[kind], quantizer_options=options, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
    model.train()(images(2, 16))
    model.to(memory_format=torch.channels_last).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not list(tmp_path.glob("*.bin"))
    assert json.loads((tmp_path / "config.json").read_text())["mean"] == [1.0, 2.0, 3.0]
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert not again.training
    assert again.config == model.config
    assert again.quantizers[0].grid.shape == (2, 8)
    x = images(2, 16)
    assert torch.equal(again.decode(again.encode(x)), model.decode(model.encode(x)))


def test_a_neighbor_term_keeps_its_meaning_in_a_saved_model(tmp_path) -> None:
    """It is summed over dimensions; in models that were saved before they named that, it is averaged."""
    VQVAE(**SMALL, quantizer="som-vae", quantizer_options={"neighbor_weight": 0.1}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantizer_options"] == {"neighbor_weight": 0.1, "neighbor_reduction": "sum"}
    assert load_pretrained(tmp_path).quantizers[0].neighbor_reduction == "sum"
    (tmp_path / "manifest.json").unlink()
    for options in ({"neighbor_weight": 0.1}, None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantizer_options": options}))
        assert load_pretrained(tmp_path).quantizers[0].neighbor_reduction == "mean"


@pytest.mark.parametrize("options", [{}, {"heads": 2, "codebook_dim": 4}, {"num_quantizers": 1}, {"num_quantizers": 3}])
@pytest.mark.parametrize("kind", MODELS)
def test_the_shapes_of_tokens_are_those_that_encoding_gives(kind: str, options: dict) -> None:
    quantizer = "residual" if "num_quantizers" in options else "kohonen"
    model = MODELS[kind](**SMALL_OF[kind], quantizer=quantizer, quantizer_options=options)
    assert [tuple(level.shape[1:]) for level in as_levels(model.encode(images(1, 16)))] == model.token_shapes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VQVAE(quantizer="kohonnen"), "did you mean 'kohonen'.*ema"),
        (lambda: VQVAE(quantizer_options={"tua": 1}), "did you mean 'tau'.*neighborhood"),
        (lambda: VQVAE(quantizer_options={"dim": 3}), "'dim' is set by the model"),
        (lambda: VQVAE(image_size=30), "30.*multiple.*4"),
        (lambda: VQVAE(residual="relu"), "residual='relu' is unknown.*'plain', 'activated'"),
        (lambda: VQVAE(stride=3), "stride=3.*power of two"),
        (lambda: VQVAE(mean=[1.0]), "1 entries.*3 channels"),
        (lambda: VQVAE(std=[1.0, 0.0, 1.0]), "must be positive"),
        (lambda: VQVAE2(strides=(4,)), "at least two levels"),
        (lambda: VQVAE(**SMALL)(torch.zeros(1, 1, 16, 16)), r"\(1, 1, 16, 16\).*\[B, 3, H, W\]"),
        (lambda: VQVAE(**SMALL)(torch.zeros(1, 3, 18, 16)), "18x16.*multiple of 4"),
        (lambda: VQVAE2(**SMALL).decode(torch.zeros(1, 4, 4, dtype=torch.int64)), "1 levels.*has 2"),
    ],
)
def test_bad_input_is_refused_with_what_would_be_right(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_integers_that_are_not_pixels_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.int64.*uint8"):
        VQVAE(**SMALL)(torch.zeros(1, 3, 16, 16, dtype=torch.int64))


def test_a_folder_without_a_model_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_pretrained(tmp_path)
