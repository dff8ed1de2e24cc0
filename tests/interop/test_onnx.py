"""torch.onnx.export(dynamo=True) takes an encoder with its quantizer; onnxruntime gives the same tokens."""

import functools

import pytest
import torch
from autoencoder import ImageEncoder
from test_export import ANY_IMAGES, ANY_ROWS, QUANTIZERS
from torch import nn
from torch.export import Dim
from torch.onnx._internal.exporter._registration import ONNXRegistry

from topovq import KohonenVQ

for library in ("onnx", "onnxscript"):
    pytest.importorskip(library, reason="pip install onnx onnxscript onnxruntime")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxscript onnxruntime")


@pytest.fixture(autouse=True)
def known_operations(monkeypatch):
    """What torch can write is listed anew for each file, a fifth of its time: here once."""
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(listed))


listed = functools.cache(ONNXRegistry.from_torchlib)


def in_onnxruntime(model, args, shapes, folder, kwargs=None):
    """The model as a function of NumPy arrays that onnxruntime computes."""
    path = folder / "model.onnx"
    program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*tensors):
        outputs = session.run(None, dict(zip(names, (tensor.numpy() for tensor in tensors))))
        return [torch.from_numpy(output) for output in outputs]

    return run


@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_encoder_gives_the_same_tokens(name, tmp_path):
    torch.manual_seed(0)
    encoder = ImageEncoder(QUANTIZERS[name]()).eval()
    run = in_onnxruntime(encoder, (torch.randn(2, 3, 16, 16),), ANY_IMAGES, tmp_path)
    for shape in ((1, 3, 8, 8), (3, 3, 24, 40)):
        image = torch.randn(shape)
        quantized, indices, loss = run(image)
        expected = encoder(image)
        assert torch.equal(indices, expected[1])
        assert torch.allclose(quantized, expected[0], atol=1e-6)
        assert torch.allclose(loss, expected[2])


# To ask for the closest codes learns nothing, whatever the mode.
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if "closest" not in name])
def test_training_mode_is_refused_with_advice(name):
    encoder, image = ImageEncoder(QUANTIZERS[name]()).train(), torch.randn(2, 3, 16, 16)
    with pytest.raises(Exception, match=r"met a layer in training mode.*call \.eval\(\) on the model first"):
        torch.onnx.export(encoder, (image,), dynamo=True, verbose=False)


@pytest.mark.parametrize("size", [7, 50, 4100])
def test_equal_codes_are_a_tie_that_the_lowest_wins(size, tmp_path):
    torch.manual_seed(0)
    vq = KohonenVQ(16, size, neighborhood="none").eval()
    half = size // 2 + 1
    vq.codebook = torch.randn(half, 16).repeat(2, 1)[:size]
    run = in_onnxruntime(vq, (torch.randn(300, 16),), ANY_ROWS, tmp_path)
    for n in (1, 5, 300):
        x = torch.randn(n, 16)
        indices = run(x)[1]
        assert torch.equal(indices, vq(x).indices)
        assert indices.max() < half


def test_half_precision(tmp_path):
    torch.manual_seed(0)
    vq = KohonenVQ(16, 50, codebook_dim=8).half().eval()
    x = torch.randn(300, 16).half()
    quantized, indices, _ = in_onnxruntime(vq, (x,), ANY_ROWS, tmp_path)(x)
    # Both round the projection to 16 bits, each in its own way: a vector between two codes may go to either.
    assert (indices == vq(x).indices).float().mean() > 0.98
    assert quantized.dtype == torch.float16


def test_masks(tmp_path):
    torch.manual_seed(0)
    vq = KohonenVQ(16, 50, heads=2, codebook_dim=5).eval()
    x, mask = torch.randn(4, 10, 16), torch.arange(40).view(4, 10) % 3 > 0
    every = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    run = in_onnxruntime(vq, (x,), {"x": every, "mask": every}, tmp_path, {"mask": mask})
    quantized, indices, loss = run(x, mask)
    expected = vq(x, mask=mask)
    assert torch.equal(indices, expected.indices)
    assert (indices[~mask] == -1).all()
    assert torch.allclose(quantized, expected.quantized, atol=1e-6)
    assert torch.allclose(loss, expected.loss)


def test_tokens_decode(tmp_path):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vq = KohonenVQ(8, 64, codebook_dim=4, accept_image_fmap=True)

        def forward(self, tokens):
            return self.vq.get_output_from_indices(tokens)

    torch.manual_seed(0)
    decoder, tokens = Decoder().eval(), torch.randint(-1, 64, (3, 7, 2))
    shapes = {"tokens": dict.fromkeys(range(3), Dim.DYNAMIC)}
    run = in_onnxruntime(decoder, (torch.randint(64, (2, 5, 4)),), shapes, tmp_path)
    assert torch.allclose(run(tokens)[0], decoder(tokens), atol=1e-6)
