"""Codebooks out of other libraries, and their quantizers replaced inside a model."""

import re

import pytest
import torch
from torch import Tensor, nn
from vector_quantize_pytorch import GroupedResidualVQ, HierarchicalVQ, RandomProjectionQuantizer, VectorQuantize
from vector_quantize_pytorch import ResidualVQ as PeerResidualVQ

from topovq import KohonenVQ
from topovq.convert import from_kohonen_vae, from_rosinality, from_vector_quantize_pytorch, replace_quantizers

SIZE, DIM = 16, 4


def trained(**options) -> VectorQuantize:
    """A VectorQuantize that has seen three batches, so that codes, sums and counts are all different."""
    torch.manual_seed(0)
    vq = VectorQuantize(**{"dim": DIM, "codebook_size": SIZE, "decay": 0.9, **options})
    for _ in range(3):
        vq(vectors(vq))
    return vq.eval()


def vectors(vq) -> Tensor:
    if vq.accept_image_fmap:
        return torch.randn(2, vq.dim, 5, 3)
    if vq.accept_3d_fmap:
        return torch.randn(2, vq.dim, 2, 3, 4)
    return torch.randn(3, 8, vq.dim) if vq.channel_last else torch.randn(3, vq.dim, 8)


def state_of(codes: Tensor, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """A state dict of a trained layer: counts 1, 2, ..., and the sums that go with them."""
    counts = torch.arange(1.0, 1 + codes.shape[0])
    return dict(zip(names, (codes, codes * counts[:, None], counts)))


class Holder(nn.Module):
    def __init__(self, **quantizers):
        super().__init__()
        for name, vq in quantizers.items():
            setattr(self, name, vq)


# Checkpoints


def test_rosinality_by_hand():
    state = {
        "enc.weight": torch.zeros(3),
        "quantize_t.embed": torch.tensor([[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0, 8.0]]),  # [D, K]
        "quantize_t.embed_avg": torch.tensor([[10.0, 3.0, 5.0, 7.0], [20.0, 4.0, 6.0, 8.0]]),
        "quantize_t.cluster_size": torch.tensor([10.0, 1.0, 1.0, 1.0]),
    }
    vq = from_rosinality(state, neighborhood="none", decay=0.5)
    book = vq.codebook_of(0)
    assert torch.equal(vq.codebook, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]))
    assert torch.equal(book.sums[0], torch.tensor([10.0, 20.0]))
    assert torch.equal(book.counts, torch.tensor([10.0, 1.0, 1.0, 1.0]))
    # One more update of code 0, with (0, 0): m = (5, 10) and N = 5 + 0.5. From codes alone it would be (0.5, 1).
    vq(torch.zeros(1, 2))
    torch.testing.assert_close(vq.codebook[0], torch.tensor([5 / 5.5, 10 / 5.5]), rtol=1e-4, atol=0)


def test_rosinality_with_two_quantizers():
    names = ("embed", "embed_avg", "cluster_size")
    top, bottom = torch.randn(SIZE, DIM), torch.randn(SIZE, DIM)
    state = {}
    for prefix, codes in (("quantize_t.", top), ("quantize_b.", bottom)):
        state |= {prefix + key: value.mT if value.ndim == 2 else value for key, value in state_of(codes, names).items()}
    with pytest.raises(ValueError, match=r"holds 2 quantizers.*'quantize_t\.', 'quantize_b\.'"):
        from_rosinality(state)
    for prefix, codes in (("quantize_t", top), ("quantize_b.", bottom)):  # with or without the dot
        assert torch.equal(from_rosinality(state, prefix=prefix).codebook, codes)
    with pytest.raises(ValueError, match=r"no 'enc\.embed'.*'quantize_t\.', 'quantize_b\.'"):
        from_rosinality(state, prefix="enc")


def test_kohonen_vae_keeps_statistics_and_step():
    codes = torch.randn(SIZE, DIM)
    state = state_of(codes, ("_w", "_ema_w", "_ema_cluster_size")) | {"counter": torch.tensor(1234.0)}
    state = {f"model.quantizer.{key}": value for key, value in state.items()}
    vq = from_kohonen_vae(state, grid=(2, 8), neighborhood="hard")
    book = vq.codebook_of(0)
    assert torch.equal(vq.codebook, codes)
    assert torch.equal(book.sums, state["model.quantizer._ema_w"])
    assert torch.equal(book.counts, state["model.quantizer._ema_cluster_size"])
    assert vq.step == 1234
    assert vq.step.dtype == torch.int64
    assert vq.grid.shape == (2, 8)
    assert vq.neighborhood.kind == "hard"


def test_codes_alone_are_enough():
    codes = torch.randn(SIZE, DIM)
    vq = from_kohonen_vae({"_w": codes})
    assert torch.equal(vq.codebook, codes)
    assert torch.equal(vq.codebook_of(0).sums, codes)
    assert vq.step == 0


def test_counts_of_zero_are_no_statistics():
    # As rosinality's layer starts. With N = 0 the first update would send every code not chosen to the origin.
    codes = torch.randn(SIZE, DIM) + 5
    state = {"embed": codes.T, "embed_avg": codes.T.clone(), "cluster_size": torch.zeros(SIZE)}
    vq = from_rosinality(state, neighborhood="none")
    vq(codes[:1])
    torch.testing.assert_close(vq.codebook, codes, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("load", "state", "message"),
    [
        (from_rosinality, {"a": 1, "b": 2}, "holds 0 quantizers.*no key ends in 'embed'; found 'a', 'b'"),
        (from_rosinality, {}, "found nothing"),
        (from_rosinality, {"embed": torch.zeros(1, 4, 2)}, r"'embed' has shape \(1, 4, 2\).*\[D, K\]"),
        (from_rosinality, {"embed": torch.zeros(2, 4), "embed_avg": torch.zeros(2, 4)}, "'cluster_size' is missing"),
        (
            from_kohonen_vae,
            {"_w": torch.zeros(2, 4), "_ema_w": torch.zeros(2, 4), "_ema_cluster_size": torch.zeros(4)},
            r"'_ema_cluster_size' of shape \(4,\) do not fit.*expected \(2, 4\) and \(2,\)",
        ),
        (from_vector_quantize_pytorch, {f"layer{i}.weight": 0 for i in range(20)}, "'layer0.weight'.* and 12 more"),
        (
            from_vector_quantize_pytorch,
            {"_codebook.embed": torch.zeros(1, 4, 2), "project_in.weight": torch.zeros(2, 3)},
            "'project_in.bias', 'project_out.weight', 'project_out.bias' are missing",
        ),
    ],
)
def test_what_is_missing_is_named(load, state, message):
    with pytest.raises(ValueError, match=message):
        load(state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 8, "codebook_dim": 4},
        {"dim": 8, "codebook_dim": 4, "heads": 2, "separate_codebook_per_head": True},
        {"dim": 6, "codebook_dim": 4, "heads": 2},
        {"use_cosine_sim": True},
        {"kmeans_init": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_vector_quantize_state_dict(options):
    peer = trained(**options)
    state = {f"model.vq.{key}": value for key, value in peer.state_dict().items()}
    known = {name: value for name, value in options.items() if name == "use_cosine_sim"}
    vq = from_vector_quantize_pytorch(state, **known).eval()
    torch.testing.assert_close(vq.codebook, peer.codebook, rtol=1e-6, atol=0)
    x = vectors(peer)
    theirs, ours = peer(x), vq(x)
    assert torch.equal(ours.indices, theirs[1])
    torch.testing.assert_close(ours.quantized, theirs[0])
    for h in range(len(vq.codebooks)):
        assert torch.equal(vq.codebook_of(h).sums, peer._codebook.embed_avg[h])
        assert torch.equal(vq.codebook_of(h).counts, peer._codebook.cluster_size[h])


@pytest.mark.parametrize("cosine", [False, True])
def test_learning_goes_on_as_in_vector_quantize_pytorch(cosine):
    # The same statistics under the same rule: after more updates the codes are still the same.
    peer = trained(use_cosine_sim=cosine).train()
    vq = from_vector_quantize_pytorch(peer, neighborhood="none", count_smoothing="copy")
    assert vq.training
    for _ in range(5):
        x = vectors(peer)
        peer(x), vq(x)
    torch.testing.assert_close(vq.codebook, peer.codebook)


def test_sums_that_do_not_give_the_codes_are_not_kept():
    # Their codebook setter leaves the sums as they were, and their next update undoes it.
    peer = trained()
    codes = torch.randn(SIZE, DIM) + 3
    peer.codebook = codes
    vq = from_vector_quantize_pytorch(peer.state_dict(), neighborhood="none")
    vq(codes[:1])
    torch.testing.assert_close(vq.codebook, codes, rtol=1e-3, atol=0)


def test_uninitialized_codebook_is_initialized_from_the_first_batch():
    peer = VectorQuantize(DIM, SIZE, kmeans_init=True)
    vq = from_vector_quantize_pytorch(peer.state_dict(), neighborhood="none")
    assert not vq.codebook_of(0).is_initialized
    vq(torch.randn(100, DIM) + 50)
    assert vq.codebook.mean() > 40


@pytest.mark.parametrize("option", [{"layernorm_after_project_in": True, "codebook_dim": 2}, {"affine_param": True}])
def test_state_without_counterpart_is_named(option):
    peer = VectorQuantize(DIM, SIZE, **option)
    with pytest.raises(ValueError, match=f"have no counterpart.*{next(iter(option))}"):
        from_vector_quantize_pytorch(peer.state_dict())


def test_options_that_contradict_the_checkpoint_are_refused():
    peer = VectorQuantize(8, SIZE, codebook_dim=4, heads=2, separate_codebook_per_head=True)
    with pytest.raises(ValueError, match="2 codebooks were found, but the options given ask for 1"):
        from_vector_quantize_pytorch(peer.state_dict(), separate_codebook_per_head=False)
    with pytest.raises(ValueError, match="do not fit"):
        from_kohonen_vae({"_w": torch.zeros(16, 4)}, codebook_size=32)
    with pytest.raises(TypeError, match=r"a Holder \(prefix=None\) is not a VectorQuantize.*replace_quantizers"):
        from_vector_quantize_pytorch(Holder(vq=peer))


# Modules


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotation_trick": False, "commitment_weight": 0.25, "decay": 0.95, "eps": 1e-4},
        {"channel_last": False},
        {"accept_image_fmap": True},
        {"accept_image_fmap": True, "dim": 8, "codebook_dim": 2, "heads": 2},
        {"accept_3d_fmap": True},
        {"dim": 8, "heads": 2, "codebook_dim": 4},
        {"dim": 8, "heads": 2, "codebook_dim": 4, "separate_codebook_per_head": True},
        {"dim": 6, "codebook_dim": 4},
        {"use_cosine_sim": True},
        {"freeze_codebook": True},
        {"ema_update": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_replaced_vector_quantize_does_the_same(options):
    peer = trained(**options)
    model = nn.Sequential(nn.Identity(), peer).eval()
    x = vectors(peer)
    theirs = model(x)
    assert replace_quantizers(model) == ["1"]
    vq = model[1]
    assert isinstance(vq, KohonenVQ)
    ours = model(x)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(vq.get_output_from_indices(ours[1]), theirs[0])
    for name in ("rotation_trick", "commitment_weight", "freeze_codebook", "channel_last", "heads", "dim"):
        assert getattr(vq, name) == getattr(peer, name), name
    assert vq.codebook_of(0).decay == peer._codebook.decay
    assert vq.codebook_of(0).eps == peer._codebook.eps
    assert vq.neighborhood.kind == KohonenVQ(DIM, SIZE).neighborhood.kind

    model.train(), peer.train()
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    before = vq.codebook.clone()
    (quantized, _, loss), (their_quantized, _, their_loss) = model(x1), peer(x2)
    torch.testing.assert_close(loss, their_loss)
    probe = torch.randn_like(quantized)
    ((quantized * probe).sum() + loss).backward(), ((their_quantized * probe).sum() + their_loss).backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-3, atol=1e-4)
    moves = not options.get("freeze_codebook") and options.get("ema_update", True)
    assert torch.equal(vq.codebook, before) != moves


def test_replacing_keeps_mode_type_device_and_parameters():
    model = Holder(vq=VectorQuantize(8, SIZE, codebook_dim=4).train()).bfloat16()
    weight = model.vq.project_in.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_quantizers(model)
    assert model.vq.training
    assert model.vq.project_in.weight is weight
    assert model.vq.codebook.dtype == torch.float32
    quantized, _, loss = model.vq(torch.randn(2, 5, 8, dtype=torch.bfloat16))
    assert quantized.dtype == torch.bfloat16
    before = weight.clone()
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.vq.project_in.weight, before)

    model = Holder(vq=VectorQuantize(DIM, SIZE).eval()).double()
    codes = model.vq.codebook.clone()
    replace_quantizers(model)
    assert not model.vq.training
    assert torch.equal(model.vq.codebook, codes)
    assert model.vq.codebook.dtype == torch.float64


def test_options_come_first():
    model = Holder(a=trained(), b=trained(accept_image_fmap=True))
    names = replace_quantizers(model, neighborhood="hard", tau=0.5, grid=(2, 8), decay=0.7, rotation_trick=False)
    assert names == ["a", "b"]
    for vq in (model.a, model.b):
        assert vq.neighborhood.kind == "hard"
        assert vq.grid.shape == (2, 8)
        assert vq.codebook_of(0).decay == 0.7
        assert not vq.rotation_trick
    assert model.b.accept_image_fmap


def test_codes_that_followed_the_gradient_follow_the_rule():
    model = Holder(vq=VectorQuantize(DIM, SIZE, learnable_codebook=True, ema_update=False))
    replace_quantizers(model)
    before = model.vq.codebook.clone()
    model.vq(torch.randn(64, DIM))
    assert not list(model.vq.parameters())
    assert not torch.equal(model.vq.codebook, before)
    assert model.vq.codebook_of(0).decay == 0.99

    model = Holder(vq=VectorQuantize(DIM, SIZE, learnable_codebook=True, ema_update=False).requires_grad_(False))
    replace_quantizers(model)
    before = model.vq.codebook.clone()
    model.vq(torch.randn(64, DIM))
    assert torch.equal(model.vq.codebook, before)


def test_one_module_in_two_places_stays_one_module():
    peer = trained()
    model = Holder(encoder=Holder(vq=peer), decoder=Holder(vq=peer))
    assert replace_quantizers(model) == ["encoder.vq", "decoder.vq"]
    assert model.encoder.vq is model.decoder.vq


@pytest.mark.parametrize("projected", [False, True])
def test_inside_residual_vq(projected):
    torch.manual_seed(0)
    peer = PeerResidualVQ(
        dim=8,
        codebook_dim=4 if projected else 8,
        num_quantizers=3,
        codebook_size=SIZE,
        decay=0.9,
        quantize_dropout=True,
    )
    for _ in range(3):
        peer(torch.randn(2, 10, 8))
    peer.eval()
    x = torch.randn(2, 10, 8)
    quantized, indices, _, codes = peer(x, return_all_codes=True)
    outputs = peer.get_output_from_indices(indices)
    assert replace_quantizers(peer) == ["layers.0", "layers.1", "layers.2"]
    ours = peer(x, return_all_codes=True)
    assert torch.equal(ours[1], indices)
    torch.testing.assert_close(ours[0], quantized)
    assert ours[2].shape == (3,)
    torch.testing.assert_close(ours[3], codes)
    torch.testing.assert_close(peer.get_output_from_indices(indices), outputs)
    before = peer.codebooks.clone()
    peer.train()
    peer(x, rand_quantize_dropout_fixed_seed=3)
    assert not torch.equal(peer.codebooks[0], before[0])


def test_inside_grouped_residual_vq():
    torch.manual_seed(0)
    peer = GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=SIZE).eval()
    x = torch.randn(2, 10, 8)
    quantized, indices, _ = peer(x)
    assert replace_quantizers(peer) == [f"rvqs.{group}.layers.{layer}" for group in (0, 1) for layer in (0, 1)]
    ours = peer(x)
    assert torch.equal(ours[1], indices)
    torch.testing.assert_close(ours[0], quantized)


def test_inside_hierarchical_vq():
    torch.manual_seed(0)
    peer = HierarchicalVQ(dim=DIM, codebook_size=SIZE, scales=(1, 4), accept_image_fmap=True).eval()
    x = torch.randn(2, DIM, 4, 4) if peer.channel_first else torch.randn(2, 4, 4, DIM)
    quantized, indices, _ = peer(x)
    assert replace_quantizers(peer, threshold_ema_dead_code=0.0)
    ours = peer(x)
    torch.testing.assert_close(ours[0], quantized)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], indices))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layernorm_after_project_in", {"layernorm_after_project_in": True, "codebook_dim": 2}),
        ("commitment_use_cross_entropy_loss", {"commitment_use_cross_entropy_loss": True}),
        ("orthogonal_reg_weight", {"orthogonal_reg_weight": 10.0}),
        ("codebook_diversity_loss_weight", {"codebook_diversity_loss_weight": 1.0}),
        ("stochastic_sample_codes", {"stochastic_sample_codes": True}),
        ("straight_through", {"straight_through": True, "rotation_trick": False}),
        ("directional_reparam", {"directional_reparam": True, "threshold_ema_dead_code": 2}),
        ("affine_param", {"affine_param": True}),
        ("vq_bridge", {"vq_bridge": nn.Linear(DIM, DIM)}),
        ("manual_ema_update", {"manual_ema_update": True}),
        (
            "in_place_codebook_optimizer",
            {"in_place_codebook_optimizer": torch.optim.SGD, "learnable_codebook": True, "ema_update": False},
        ),
        ("sync_update_v", {"sync_update_v": 0.5, "learnable_codebook": True, "ema_update": False}),
        ("return_zeros_for_masked_padding", {"return_zeros_for_masked_padding": False}),
        ("route_gradients_to_input", {"route_gradients_to_input": False}),
        ("threshold_ema_dead_code", {"threshold_ema_dead_code": 2}),
    ],
)
def test_options_without_counterpart_are_named_and_nothing_is_replaced(name, options):
    first, second = trained(), VectorQuantize(DIM, SIZE, **options)
    model = Holder(first=first, second=second)
    with pytest.raises(TypeError, match=re.escape(name)) as caught:
        replace_quantizers(model)
    assert "'second'" in "".join(caught.value.__notes__)
    assert model.first is first
    assert model.second is second


def test_dead_code_threshold_can_be_restated():
    model = Holder(vq=VectorQuantize(DIM, SIZE, threshold_ema_dead_code=2))
    replace_quantizers(model, threshold_ema_dead_code=0.1)
    assert model.vq.codebook_of(0).dead_threshold == 0.1


@pytest.mark.parametrize(
    "option",
    [
        {"shared_codebook": True},
        {"implicit_neural_codebook": True},
        {"diveq": True},
        {"beam_size": 2},
    ],
    ids=lambda option: next(iter(option)),
)
def test_residual_options_without_counterpart_are_named(option):
    peer = PeerResidualVQ(dim=DIM, num_quantizers=2, codebook_size=SIZE, **option)
    with pytest.raises(TypeError, match=f"ResidualVQ: {next(iter(option))}"):
        replace_quantizers(peer)


def test_models_that_cannot_be_served_say_so():
    with pytest.raises(ValueError, match=r"Linear holds no quantizer.*VectorQuantize of.*VectorQuantizer of diffusers"):
        replace_quantizers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"itself a VectorQuantize.*from_vector_quantize_pytorch"):
        replace_quantizers(VectorQuantize(DIM, SIZE))
    with pytest.raises(TypeError, match="inside vector_quantize_pytorch's RandomProjectionQuantizer"):
        replace_quantizers(RandomProjectionQuantizer(dim=DIM, codebook_size=SIZE, codebook_dim=2))
    with pytest.raises(ValueError, match="no balanced 2-D grid") as caught:
        replace_quantizers(Holder(vq=VectorQuantize(DIM, 17)))
    assert "'vq'" in caught.value.__notes__[0]


# diffusers


class VectorQuantizer(nn.Module):
    """The interface of diffusers' class, for where that is not installed."""

    __module__ = "diffusers.models.autoencoders.vae"

    def __init__(self, n_e, vq_embed_dim, beta, remap=None, sane_index_shape=False, legacy=True):
        super().__init__()
        self.n_e, self.vq_embed_dim, self.beta, self.legacy = n_e, vq_embed_dim, beta, legacy
        self.remap, self.sane_index_shape = remap, sane_index_shape
        self.embedding = nn.Embedding(n_e, vq_embed_dim)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        tokens = torch.cdist(z.view(-1, self.vq_embed_dim), self.embedding.weight).argmin(1)
        z_q = self.embedding(tokens).view(z.shape)
        moves_encoder, moves_codes = (z_q.detach() - z).square().mean(), (z_q - z.detach()).square().mean()
        loss = moves_encoder + self.beta * moves_codes if self.legacy else self.beta * moves_encoder + moves_codes
        z_q = (z + (z_q - z).detach()).permute(0, 3, 1, 2).contiguous()
        tokens = tokens.reshape(z_q.shape[0], *z_q.shape[2:]) if self.sane_index_shape else tokens
        return z_q, loss, (None, None, tokens)

    def get_codebook_entry(self, indices, shape):
        z_q = self.embedding(indices)
        return z_q if shape is None else z_q.view(shape).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(params=["stand-in", "diffusers"])
def diffusers_quantizer(request):
    if request.param == "stand-in":
        return VectorQuantizer
    vae = pytest.importorskip("diffusers.models.autoencoders.vae", reason="diffusers is not installed")
    return vae.VectorQuantizer


@pytest.mark.parametrize("sane", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_replaced_diffusers_quantizer_does_the_same(diffusers_quantizer, sane, legacy):
    torch.manual_seed(0)
    theirs = diffusers_quantizer(SIZE, DIM, 0.25, sane_index_shape=sane, legacy=legacy)
    nn.init.normal_(theirs.embedding.weight)
    model = Holder(quantize=theirs).eval()
    z = torch.randn(2, DIM, 3, 5)
    z_q, _, (_, _, tokens) = theirs(z)
    assert replace_quantizers(model) == ["quantize"]
    ours = model.quantize
    assert not ours.training
    assert torch.equal(ours.vq.codebook, theirs.embedding.weight)
    our_z_q, _, (perplexity, encodings, our_tokens) = ours(z)
    torch.testing.assert_close(our_z_q, z_q)
    assert our_z_q.is_contiguous()
    assert torch.equal(our_tokens, tokens)
    assert perplexity.shape == ()
    assert encodings is None
    assert (ours.n_e, ours.vq_embed_dim) == (SIZE, DIM)
    for indices, shape in ((tokens, (2, 3, 5, DIM)), (tokens.reshape(2, 15), (2, 3, 5, DIM)), (tokens, None)):
        entries = ours.get_codebook_entry(indices, shape)
        assert torch.equal(entries, theirs.get_codebook_entry(indices, shape))

    model.train(), theirs.train()  # the encoder learns as it did
    z1, z2 = z.clone().requires_grad_(), z.clone().requires_grad_()
    before = ours.vq.codebook.clone()
    for quantizer, inputs in ((ours, z1), (theirs, z2)):
        quantized, loss, _ = quantizer(inputs)
        (quantized.square().sum() + loss).backward()
    torch.testing.assert_close(z1.grad, z2.grad)
    assert not torch.equal(ours.vq.codebook, before)


def test_diffusers_half_frozen_and_remapped(diffusers_quantizer):
    model = Holder(quantize=diffusers_quantizer(SIZE, DIM, 0.25)).half()
    replace_quantizers(model)
    z_q, _, (_, _, tokens) = model.quantize(torch.randn(1, DIM, 2, 2).half())
    assert z_q.dtype == torch.float16
    assert model.quantize.get_codebook_entry(tokens, (1, 2, 2, DIM)).dtype == torch.float16
    assert model.quantize.vq.codebook.dtype == torch.float32

    model = Holder(quantize=diffusers_quantizer(SIZE, DIM, 0.25).requires_grad_(False))
    replace_quantizers(model)
    before = model.quantize.vq.codebook.clone()
    model.quantize(torch.randn(1, DIM, 2, 2))
    assert torch.equal(model.quantize.vq.codebook, before)

    theirs = diffusers_quantizer(SIZE, DIM, 0.25)
    theirs.remap = "used.npy"
    with pytest.raises(TypeError, match=r"remap='used\.npy'"):
        replace_quantizers(Holder(quantize=theirs))


def test_a_whole_vq_model_of_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = diffusers.VQModel(
        block_out_channels=(32,), norm_num_groups=8, num_vq_embeddings=SIZE, vq_embed_dim=DIM, lookup_from_codebook=True
    ).eval()
    nn.init.normal_(model.quantize.embedding.weight)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = model(x).sample
        tokens = model.quantize(model.encode(x).latents)[2][2]
        decoded = model.decode(tokens, force_not_quantize=True, shape=(1, 16, 16, DIM)).sample
        assert replace_quantizers(model) == ["quantize"]
        torch.testing.assert_close(model(x).sample, before)
        again = model.decode(tokens, force_not_quantize=True, shape=(1, 16, 16, DIM)).sample
    torch.testing.assert_close(again, decoded)


def test_subclasses_are_left_alone():
    class Special(VectorQuantize):
        pass

    with pytest.raises(ValueError, match="subclasses are left alone"):
        replace_quantizers(Holder(vq=Special(DIM, SIZE)))
