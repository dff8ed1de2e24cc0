"""torch.compile takes the layer whole, torch.export takes it in evaluation, and nothing waits for the device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from topovq import GradientVQ, GroupedResidualVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ

VARIANTS = {
    "default": lambda: KohonenVQ(8, 64),
    "ema": lambda: KohonenVQ(8, 64, neighborhood="none"),
    "hard": lambda: KohonenVQ(8, 64, neighborhood="hard", update_empty=False),
    "gaussian": lambda: KohonenVQ(8, 64, neighborhood="gaussian", count_smoothing="copy"),
    "fft": lambda: KohonenVQ(8, 1089, neighborhood="exponential"),
    "hexagonal": lambda: KohonenVQ(8, 64, topology="hexagonal"),
    "partly empty": lambda: KohonenVQ(8, 61),
    "hexagonal, partly empty": lambda: KohonenVQ(8, 61, topology="hexagonal", neighborhood="hard"),
    "revival": lambda: KohonenVQ(8, 64, threshold_ema_dead_code=0.1),
    "heads": lambda: KohonenVQ(
        8, 64, heads=2, codebook_dim=3, separate_codebook_per_head=True, rotation_trick=True
    ),
    "cosine": lambda: KohonenVQ(8, 64, use_cosine_sim=True),
    "gradient": lambda: GradientVQ(8, 64, neighborhood="hard"),
    "gradient, partly empty": lambda: GradientVQ(8, 61, neighborhood="gaussian", neighbor_weight=0.1),
    "soft": lambda: SoftKohonenVQ(8, 64),
    "residual": lambda: ResidualVQ(8, 64, num_quantizers=2),
    "beams": lambda: ResidualVQ(8, 64, num_quantizers=3, codebook_dim=4, beam_size=2, quantize_dropout=True),
    "shared": lambda: ResidualVQ(8, 64, num_quantizers=2, shared_codebook=True, threshold_ema_dead_code=0.1),
    "grouped": lambda: GroupedResidualVQ(8, 64, num_quantizers=2, groups=2),
    "orthogonal": lambda: KohonenVQ(8, 64, orthogonal_reg_weight=1.0, orthogonal_reg_max_codes=9),
    "drawn": lambda: KohonenVQ(8, 64, stochastic_sample_codes=True, sample_codebook_temp=0.3),
    "directional": lambda: KohonenVQ(8, 64, directional_reparam=True),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_training_and_evaluation_equal_eager(variant):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, other = VARIANTS[variant](), VARIANTS[variant]()
    other.load_state_dict(eager.state_dict())
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    addresses = [tensor.data_ptr() for tensor in other.buffers()]
    for step in range(2):
        x = torch.randn(3, 10, 8)
        gradients = []
        for vq in (eager, compiled):
            torch.manual_seed(step)
            leaf = x.clone().requires_grad_()
            quantized, indices, loss = vq(leaf)
            (quantized.square().sum() + loss.sum()).backward()
            gradients.append((leaf.grad, indices, quantized.detach()))
        for one, two in zip(*gradients):
            assert torch.allclose(one, two, atol=1e-5)
    assert torch.allclose(eager.codebook, other.codebook, atol=1e-5)
    assert addresses == [tensor.data_ptr() for tensor in other.buffers()]
    eager.eval()
    compiled.eval()
    assert torch.equal(eager(x).indices, compiled(x).indices)


def test_inductor_takes_a_training_step():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, other = KohonenVQ(8, 64, accept_image_fmap=True), KohonenVQ(8, 64, accept_image_fmap=True)
    other.load_state_dict(eager.state_dict())
    compiled = torch.compile(other, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 8, 4, 4, requires_grad=True)
        eager(x)
        quantized, _, loss = compiled(x)
        (quantized.sum() + loss).backward()
    assert torch.allclose(eager.codebook, other.codebook, atol=1e-5)


def test_first_batch_initialization_compiles():
    torch._dynamo.reset()
    torch.manual_seed(0)
    vq = KohonenVQ(8, 64, kmeans_init=True)
    compiled = torch.compile(vq, fullgraph=True, backend="aot_eager")
    x = torch.randn(100, 8) + 10
    compiled(x)
    compiled(x)
    assert vq.step.item() == 2
    assert (vq.codebook.mean(1) > 8).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_in_evaluation(variant):
    torch.manual_seed(0)
    vq = VARIANTS[variant]().eval()
    x = torch.randn(3, 10, 8)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(vq, (x,), dynamic_shapes={"x": {0: batch}}).module()
    for n in (3, 5):
        x = torch.randn(n, 10, 8)
        assert torch.equal(exported(x)[0], vq(x).quantized)
        assert torch.equal(exported(x)[1], vq(x).indices)


def test_an_exported_program_survives_saving(tmp_path):
    vq = KohonenVQ(8, 64, codebook_dim=4).eval()
    x = torch.randn(3, 10, 8)
    torch.export.save(torch.export.export(vq, (x,)), tmp_path / "vq.pt2")
    loaded = torch.export.load(tmp_path / "vq.pt2").module()
    assert torch.equal(loaded(x).quantized, vq(x).quantized)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_host_synchronization(variant):
    """A fake tensor has no values: a forward that asked for one would raise."""
    with FakeTensorMode():
        vq = VARIANTS[variant]()
        quantized, indices, loss = vq(torch.randn(3, 10, 8, requires_grad=True))
        (quantized.sum() + loss.sum()).backward()
        for figure in (vq.perplexity, vq.usage, vq.skipped, vq.step):
            assert figure.shape == ()
        assert indices[0].shape[:2] == (3, 10) if variant == "grouped" else indices.shape[:2] == (3, 10)
