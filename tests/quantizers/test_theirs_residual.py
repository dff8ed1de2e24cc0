"""ResidualVQ and GroupedResidualVQ beside vector-quantize-pytorch's, on the same codes."""

import json

import pytest
import torch
import vector_quantize_pytorch as theirs
from safetensors.torch import save_file
from torch import nn

from topovq import GroupedResidualVQ, KohonenVQ, ResidualVQ

# Their rule and their gradient.
RULE = {"neighborhood": "none", "count_smoothing": "copy", "decay": 0.8, "rotation_trick": None}


def same_codes(peer: theirs.ResidualVQ, own: ResidualVQ) -> None:
    for before, layer in zip(peer.layers, own.quantizers):
        layer.codebook = before.codebook.detach()
    for name in ("project_in", "project_out"):
        getattr(own, name).load_state_dict(getattr(peer, name).state_dict())


def twins(**options) -> tuple[theirs.ResidualVQ, ResidualVQ]:
    torch.manual_seed(0)
    options = {"dim": 8, "codebook_size": 32, **options}
    if isinstance(options["codebook_size"], int):
        options["num_quantizers"] = 3
    peer, own = theirs.ResidualVQ(**options), ResidualVQ(**RULE, **options)
    same_codes(peer, own)
    return peer, own


SETTINGS = {
    "plain": {},
    "dim": {"codebook_dim": 4},
    "cosine": {"use_cosine_sim": True},
    "sizes": {"codebook_size": (4, 16, 32)},
    "beams": {"beam_size": 3},
    "weighted beams": {"beam_size": 2, "eval_beam_size": 4, "beam_score_quantizer_weights": [0.1, 0.5, 1.0]},
    "dim and beams": {"codebook_dim": 4, "beam_size": 2, "eval_beam_size": 3},
    "cosine beams": {"use_cosine_sim": True, "beam_size": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_output_losses_and_codes_are_theirs(name, masked):
    if masked and "cosine" in name:
        pytest.skip("where there is a mask, their loss compares codes of length 1 with vectors of any length")
    peer, own = twins(**SETTINGS[name])
    for step in range(3):
        x = torch.randn(2, 50, 8)
        mask = torch.rand(2, 50) > 0.3 if masked else None
        quantized, indices, losses = peer(x, mask=mask)
        ours = own(x, mask=mask)
        assert torch.equal(ours.indices, indices), step
        assert torch.allclose(ours.quantized, quantized, atol=1e-5)
        assert losses.shape == ours.loss.shape == (3,)
        assert torch.allclose(ours.loss, losses, atol=1e-6)
        if "beams" in name:  # of theirs only the first quantizer learns
            same_codes(peer, own)
        for before, layer in zip(peer.layers, own.quantizers):
            assert torch.allclose(layer.codebook, before.codebook, atol=1e-5)
    peer.eval()
    own.eval()
    x = torch.randn(2, 50, 8)
    quantized, indices, _, codes = peer(x, return_all_codes=True)
    ours = own(x, return_all_codes=True)
    assert torch.equal(ours[1], indices)
    assert torch.allclose(ours[0], quantized, atol=1e-5)
    assert torch.allclose(ours[3], codes, atol=1e-5)
    assert torch.allclose(own.get_output_from_indices(indices), peer.get_output_from_indices(indices), atol=1e-5)
    for one, two in zip(own.codebooks, peer.codebooks):
        assert torch.allclose(one, two, atol=1e-5)


def test_images_are_projected_too():
    """Theirs cannot: a linear layer on [B, C, h, w]."""
    torch.manual_seed(0)
    flat, image = ResidualVQ(8, 16, 3, codebook_dim=4), ResidualVQ(8, 16, 3, codebook_dim=4, accept_image_fmap=True)
    image.load_state_dict(flat.state_dict())
    x = torch.randn(2, 5, 3, 8)
    one, two = flat.eval()(x), image.eval()(x.movedim(-1, 1))
    assert torch.equal(one.indices, two.indices)
    assert torch.equal(one.quantized.movedim(-1, 1), two.quantized)
    assert torch.equal(image.get_output_from_indices(two.indices), two.quantized)
    assert image.get_codes_from_indices(two.indices).shape == (3, 2, 4, 5, 3)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_gradient_is_theirs_over_the_number_of_times_it_comes(fraction, depth):
    """Straight-through, theirs hands the gradient to x 1 + (1-f) + (1-f)^2 + ... times, and here it is once."""
    torch.manual_seed(0)
    options = {"dim": 4, "codebook_size": 16, "num_quantizers": depth, "quant_grad_frac": fraction}
    peer, own = (
        theirs.ResidualVQ(rotation_trick=False, **options),
        ResidualVQ(**{**RULE, "rotation_trick": False}, **options),
    )
    same_codes(peer, own)
    gradients = []
    for vq in (peer, own):
        x = torch.linspace(-1, 1, 80).view(20, 4).requires_grad_()
        quantized, _, losses = vq(x)
        (output,) = torch.autograd.grad(quantized.square().sum(), x, retain_graph=True)
        (commitment,) = torch.autograd.grad(losses.sum(), x)
        gradients.append((output, commitment))
    times = sum((1 - fraction) ** place for place in range(depth))
    assert torch.allclose(gradients[0][0], gradients[1][0] * times, atol=1e-5)
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"quantize_dropout_cutoff_index": 2}, {"quantize_dropout_multiple_of": 2}])
@pytest.mark.parametrize("beams", [None, 2])
def test_dropout_with_a_seed_is_theirs(options, beams):
    torch.manual_seed(0)
    options = {
        "dim": 4,
        "codebook_size": 16,
        "num_quantizers": 5,
        "quantize_dropout": True,
        "beam_size": beams,
        **options,
    }
    peer, own = theirs.ResidualVQ(**options), ResidualVQ(**RULE, **options)
    same_codes(peer, own)
    kept = set()
    for seed in range(8):
        x = torch.randn(2, 20, 4)
        quantized, indices, losses = peer(x, rand_quantize_dropout_fixed_seed=seed)
        ours = own(x, rand_quantize_dropout_fixed_seed=seed)
        assert torch.equal(ours.indices, indices)
        assert torch.allclose(ours.quantized, quantized, atol=1e-5)
        assert torch.allclose(ours.loss, losses, atol=1e-6)
        kept.add(int((indices[0, 0] >= 0).sum()))
        if beams:
            same_codes(peer, own)
        for before, layer in zip(peer.layers, own.quantizers):
            assert torch.allclose(layer.codebook, before.codebook, atol=1e-5)
    assert len(kept) > 1


def test_dropout_draws_every_depth_and_gives_the_gradient_once():
    torch.manual_seed(0)
    vq = ResidualVQ(4, 16, 6, quantize_dropout=True, quantize_dropout_cutoff_index=1, quantize_dropout_multiple_of=3)
    depths = []
    for _ in range(40):
        x = torch.randn(10, 4, requires_grad=True)
        quantized, indices, losses = vq(x)
        depths.append(int((indices[0] >= 0).sum()))
        assert ((losses > 0).long() == (indices[0] >= 0).long()).all()
        (gradient,) = torch.autograd.grad(quantized.sum(), x)
        assert torch.allclose(gradient, torch.ones_like(gradient), atol=1e-5)
    assert set(depths) == {3, 6}
    assert (vq.eval()(x).indices >= 0).all()
    with pytest.raises(ValueError, match="quantize_dropout_cutoff_index=6 must be from 0 to 5"):
        ResidualVQ(4, 16, 6, quantize_dropout=True, quantize_dropout_cutoff_index=6)


@pytest.mark.parametrize("kmeans_init", [True, False])
def test_quantizers_that_are_dropped_start_from_the_first_batch_too(kmeans_init):
    torch.manual_seed(0)
    vq = ResidualVQ(4, 8, 4, quantize_dropout=True, kmeans_init=kmeans_init)
    drawn = [book.codes.clone() for book in vq.maps]
    assert (vq(torch.randn(50, 4)).indices < 0).any()
    for book, before in zip(vq.maps, drawn):
        assert book.is_initialized
        assert (book.codes != before).any(1).all()


def test_fewer_tokens_decode_to_what_fewer_quantizers_make():
    torch.manual_seed(0)
    vq, x = ResidualVQ(4, 16, 3, codebook_dim=2).eval(), torch.randn(6, 4)
    indices = vq(x).indices
    codes = vq.get_codes_from_indices(indices)
    two = vq.project_out(codes[0] + codes[1])
    assert torch.allclose(vq.get_output_from_indices(indices[:, :2]), two, atol=1e-6)
    dropped = torch.where(torch.tensor([True, True, False]), indices, -1)
    assert torch.equal(vq.get_output_from_indices(dropped), vq.get_output_from_indices(indices[:, :2]))
    assert vq.get_codes_from_indices(indices[:, :2]).shape == (3, 6, 2)
    assert (vq.get_codes_from_indices(indices[:, :2])[2] == 0).all()
    with pytest.raises(ValueError, match=r"\(6, 4\) must end in 3, the number of quantizers, or in fewer"):
        vq.get_output_from_indices(torch.zeros(6, 4, dtype=torch.int64))


def test_a_beam_finds_a_better_row_than_the_greedy_choice():
    """Codes {0, 3} then {-2, 2}: 1.4 is closest to 0, and then to 2 (0.6 off); 3 - 2 is only 0.4 off."""
    weights = [0.0, 1.0]
    vq = ResidualVQ(1, 2, 2, neighborhood="none", beam_score_quantizer_weights=weights).eval()
    vq.quantizers[0].codebook = torch.tensor([[0.0], [3.0]])
    vq.quantizers[1].codebook = torch.tensor([[-2.0], [2.0]])
    x = torch.tensor([[1.4]])
    assert vq(x).indices.tolist() == [[0, 1]]
    assert vq(x, beam_size=2).indices.tolist() == [[1, 0]]
    assert vq(x, beam_size=2).quantized.item() == pytest.approx(1.0)


def test_with_beams_each_quantizer_learns_from_what_reached_it():
    torch.manual_seed(0)
    options = {"neighborhood": "hard", "decay": 0.5}
    vq, x = ResidualVQ(4, 16, 3, beam_size=3, **options), torch.randn(60, 4)
    layers = [KohonenVQ(4, 16, **options) for _ in range(3)]
    for layer, own in zip(layers, vq.quantizers):
        layer.codebook = own.codebook
    left = x
    for place, tokens in enumerate(vq(x).indices.unbind(-1)):
        codes = layers[place].get_codes_from_indices(tokens)
        layers[place].update_indices(left, tokens)
        left = left - codes
        assert torch.equal(layers[place].codebook, vq.codebooks[place])


def test_groups_of_channels_in_images():
    torch.manual_seed(0)
    flat, image = (GroupedResidualVQ(8, 16, 2, groups=2, accept_image_fmap=fmap).eval() for fmap in (False, True))
    image.load_state_dict(flat.state_dict())
    x = torch.randn(2, 5, 3, 8)
    one, two = flat(x), image(x.movedim(-1, 1))
    assert torch.equal(one.indices, two.indices)
    assert torch.equal(one.quantized.movedim(-1, 1), two.quantized)
    assert torch.equal(image.get_output_from_indices(two.indices), two.quantized)


def test_a_beam_in_a_checkpointed_forward_chooses_as_before():
    from torch.utils.checkpoint import checkpoint

    def gradient(checkpointed):
        torch.manual_seed(0)
        vq = ResidualVQ(4, 16, 3, beam_size=2, quantize_dropout=True, rotation_trick=True)
        x = torch.randn(40, 4, requires_grad=True)
        quantized, _, losses = checkpoint(vq, x, use_reentrant=False) if checkpointed else vq(x)
        (quantized.square().sum() + losses.sum()).backward()
        return x.grad, vq.codebook

    for one, two in zip(gradient(True), gradient(False)):
        assert torch.equal(one, two)


# One codebook for all


def test_a_shared_codebook_learns_from_all_that_was_quantized():
    torch.manual_seed(0)
    vq = ResidualVQ(4, 16, 3, shared_codebook=True, neighborhood="hard")
    alone = KohonenVQ(4, 16, neighborhood="hard")
    alone.codebook = vq.codebooks[0]
    x = torch.randn(100, 4)
    left, inputs = x, []
    with torch.no_grad():
        for _ in range(3):
            inputs.append(left)
            left = left - alone.eval()(left).quantized
    vq(x)
    alone.train()(torch.cat(inputs))
    assert vq.step == 1
    assert torch.allclose(vq.codebooks[0], alone.codebook, atol=1e-6)
    assert torch.equal(vq.codebooks[0], vq.codebooks[2])
    assert sum(p.numel() for p in vq.quantizers[0].codebooks.buffers()) == sum(b.numel() for b in vq.buffers())
    assert vq.health().dead_codes <= 16
    before = vq.codebooks[0].clone()
    vq(x, freeze_codebook=True)
    assert torch.equal(vq.codebooks[0], before)
    with vq.accumulate():
        vq(x)
    assert torch.equal(vq.codebooks[0], before)
    vq(x)
    assert vq.step == 2
    with pytest.raises(ValueError, match=r"one size for all quantizers, got codebook_size=\(4, 6\)"):
        ResidualVQ(4, (4, 6), shared_codebook=True)


def test_a_shared_codebook_chooses_as_theirs_and_revives_from_all_layers():
    torch.manual_seed(0)
    options = {"dim": 8, "codebook_size": 32, "num_quantizers": 3, "shared_codebook": True}
    peer, own = theirs.ResidualVQ(**options), ResidualVQ(**RULE, **options)
    same_codes(peer, own)
    x = torch.randn(2, 50, 8)
    assert torch.equal(own(x).indices, peer(x)[1])

    vq = ResidualVQ(2, 16, 2, shared_codebook=True, threshold_ema_dead_code=0.5, neighborhood="none", decay=0.5)
    codes = torch.cat([torch.randn(8, 2), torch.full((8, 2), 1e3)])
    vq.quantizers[0].codebook = codes
    for _ in range(5):
        vq(torch.randn(100, 2) + 20)
    assert vq.codebooks[0].abs().max() < 100
    assert vq.codebooks[0].norm(dim=1).max() > 20, (
        "the first quantizer's vectors are among those that codes revive from"
    )
    assert vq.codebooks[0].norm(dim=1).min() < 10, "and so are the second's"


@pytest.mark.parametrize("options", [{"shared_codebook": True}, {"codebook_dim": 2}])
def test_saving(tmp_path, options):
    torch.manual_seed(0)
    vq, x = ResidualVQ(4, 16, 3, **options), torch.randn(40, 4)
    vq(x)
    vq.save_pretrained(tmp_path)
    loaded = ResidualVQ.from_pretrained(tmp_path).train()
    for _ in range(2):
        assert torch.equal(loaded(x).indices, vq(x).indices)
    assert torch.equal(loaded.codebooks, vq.codebooks)


def test_sizes_of_each_layer_are_saved(tmp_path):
    vq = ResidualVQ(4, (4, 16))
    vq.save_pretrained(tmp_path)
    assert ResidualVQ.from_pretrained(tmp_path).codebook_sizes == (4, 16)
    assert [len(codes) for codes in vq.codebooks] == [4, 16]
    assert vq.coords(vq.eval()(torch.randn(5, 4)).indices).shape == (5, 2, 2)
    for size, count in (((4, 16), 3), ((), None), (16, None), (16, 0)):
        with pytest.raises(ValueError, match="num_quantizers"):
            ResidualVQ(4, size, count)


def test_layers_that_were_saved_with_a_projection_each_still_load(tmp_path):
    torch.manual_seed(0)
    layers = nn.ModuleList(KohonenVQ(4, 16, codebook_dim=2) for _ in range(3)).eval()
    state = {f"layers.{key}": value for key, value in layers.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    arguments = {"dim": 4, "codebook_size": 16, "num_quantizers": 3, "codebook_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(arguments))
    x = torch.randn(10, 4)
    left, tokens = x, []
    for layer in layers:
        made = layer(left)
        left = left - made.quantized
        tokens.append(made.indices)
    fresh = ResidualVQ(**arguments).eval()
    fresh.load_state_dict(state)
    for vq in (fresh, ResidualVQ.from_pretrained(tmp_path)):
        assert torch.equal(vq(x).indices, torch.stack(tokens, -1))
        assert torch.allclose(vq(x).quantized, x - left, atol=1e-5)
        assert torch.allclose(vq.get_output_from_indices(vq(x).indices), x - left, atol=1e-5)


# Groups


@pytest.mark.parametrize("options", [{}, {"quantize_dropout": True, "codebook_dim": 2}])
def test_groups_are_theirs(options):
    torch.manual_seed(0)
    options = {"dim": 8, "groups": 2, "num_quantizers": 3, "codebook_size": 16, **options}
    peer, own = theirs.GroupedResidualVQ(**options).eval(), GroupedResidualVQ(**RULE, **options).eval()
    for one, two in zip(peer.rvqs, own.rvqs):
        same_codes(one, two)
    x = torch.randn(2, 50, 8)
    quantized, indices, _ = peer(x)
    ours = own(x)
    assert torch.equal(ours.indices, indices)
    assert ours.loss.shape == (2, 3)
    assert torch.allclose(ours.quantized, quantized, atol=1e-5)
    assert torch.allclose(own.get_output_from_indices(indices), quantized, atol=1e-5)
    assert torch.equal(own.codebooks, peer.codebooks)
    depths = {int((own.train()(x).indices[:, 0].flatten(1, -2)[:, 0] >= 0).sum()) for _ in range(12)}
    assert depths == ({2, 4, 6} if "quantize_dropout" in options else {6}), "groups drop the same quantizers"


def test_groups_are_saved_and_refuse_what_does_not_fit(tmp_path):
    torch.manual_seed(0)
    vq, x = GroupedResidualVQ(8, 16, 2, groups=2), torch.randn(3, 10, 8)
    vq(x)
    assert vq.health().dead_codes + 64 * vq.usage == pytest.approx(64)
    vq.save_pretrained(tmp_path)
    assert torch.equal(GroupedResidualVQ.from_pretrained(tmp_path)(x).indices, vq.eval()(x).indices)
    assert len(vq(x, return_all_codes=True)) == 4
    with pytest.raises(ValueError, match="groups=3 must be an int of at least 1 that divides dim=8"):
        GroupedResidualVQ(8, 16, 2, groups=3)
    with pytest.raises(ValueError, match=r"\(3, 10, 7\) must have dim = 8 channels"):
        vq(x[..., :7])
    with pytest.raises(ValueError, match=r"must begin with 2, the number of groups"):
        vq.get_output_from_indices(torch.zeros(3, 10, 2, dtype=torch.int64))
