"""Codebooks of other libraries' checkpoints, loaded into ours."""

import pytest
import torch
from theirs import DIM, SIZE, Holder, trained, vectors
from torch import Tensor
from vector_quantize_pytorch import VectorQuantize

from topovq.convert import from_kohonen_vae, from_rosinality, from_vector_quantize_pytorch


def state_of(codes: Tensor, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """A state dict of a trained layer: counts 1, 2, ..., and the sums that go with them."""
    counts = torch.arange(1.0, 1 + codes.shape[0])
    return dict(zip(names, (codes, codes * counts[:, None], counts)))


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
