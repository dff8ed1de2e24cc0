"""A codebook's state stays what it is, whoever casts, copies, saves or loads it."""

import copy

import pytest
import safetensors.torch
import torch
from books import book_of, learn, state_of
from torch import Tensor, nn

from topovq import GradientVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ
from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.use import NEVER

LAYERS = {
    "ema": lambda: KohonenVQ(4, 8, neighborhood="none", kmeans_init=True),
    "map": lambda: KohonenVQ(4, 8, neighborhood="narrowing", kmeans_init=True),
    "ride": lambda: KohonenVQ(4, 8),
    "cosine": lambda: KohonenVQ(4, 8, neighborhood="none", kmeans_init=True, use_cosine_sim=True),
    "soft": lambda: SoftKohonenVQ(4, 8, kmeans_init=True),
    "gradient": lambda: GradientVQ(4, 8, kmeans_init=True),
}
STATISTICS = ("codes", "sums", "counts", "hits")


def far_away() -> Tensor:
    """One vector that no code is near: codes that started from it have been thrown away, others follow it by 1%.

    Those that ride follow it by 31% of the way.
    """
    return torch.full((1, 4), -50.0)


def trained(layer: str) -> KohonenVQ:
    torch.manual_seed(0)
    vq = LAYERS[layer]()
    for _ in range(3):
        vq(torch.randn(64, 4) + 5)
    return vq


def tensors(vq: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vq.state_dict().items()}


# Ways in which the buffers of a layer are filled


def by_state_dict(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    vq.load_state_dict(source)
    return vq


def by_assignment(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    vq.to("meta").load_state_dict(source, assign=True)
    return vq


def one_by_one(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    vq.to("meta")
    for name in sorted(source):
        vq.load_state_dict({name: source[name]}, strict=False, assign=True)
    return vq


def by_copying(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    for name, tensor in vq.state_dict().items():
        tensor.copy_(source[name])
    return vq


def by_replacing(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    book = vq.codebook_of(0)
    for name, tensor in source.items():
        short = name.split(".")[-1]
        if short in book._parameters:
            book._parameters[short] = nn.Parameter(tensor)
        else:
            book._buffers[short] = tensor
    return vq


def codes_alone(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    vq.codebook_of(0).codes.data.copy_(source["codebooks.0.codes"])
    return vq


def all_but_the_flag(vq: KohonenVQ, source: dict[str, Tensor]) -> KohonenVQ:
    for name, tensor in vq.state_dict().items():
        if not name.endswith("initialized"):
            tensor.copy_(source[name])
    return vq


WAYS = [by_state_dict, by_assignment, one_by_one, by_copying, by_replacing, codes_alone, all_but_the_flag]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_codes_stay_whatever_way_they_came(way, layer):
    source = trained(layer)
    vq = way(LAYERS[layer](), tensors(source))
    vq(far_away())
    moved = (vq.codebook - source.codebook).detach().abs().amax(1)
    assert moved.max() < {"cosine": 0.02, "ride": 0.31 * 60}.get(layer, 0.6)
    if layer not in ("map", "soft", "ride"):
        assert (moved < 1e-3).sum() >= 7  # one code was chosen
    assert vq.codebook_of(0).is_initialized
    assert vq.codebook_of(0).initialized.item()


@pytest.mark.parametrize("way", WAYS)
def test_learning_goes_on_as_it_would_have(way):
    source = trained("ema")
    vq = way(LAYERS["ema"](), tensors(source))
    for each in (source, vq):
        each(torch.randn(64, 4, generator=torch.Generator().manual_seed(2)) + 5)
    if way is not codes_alone:  # which have the counts of a start
        torch.testing.assert_close(vq.codebook, source.codebook)
        torch.testing.assert_close(vq.codebook_of(0).counts, source.codebook_of(0).counts)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", [by_state_dict, by_assignment, one_by_one, by_copying, by_replacing])
def test_a_layer_that_was_saved_before_its_start_still_starts_from_data(way, layer):
    torch.manual_seed(0)
    vq = way(LAYERS[layer](), tensors(LAYERS[layer]()))
    vq(far_away())
    assert vq.codebook.mean() < (-0.4 if layer == "cosine" else -40)


@pytest.mark.parametrize("way", [by_copying, codes_alone])
@pytest.mark.parametrize("layer", ["ema", "gradient"])
def test_codes_stay_in_a_compiled_step(way, layer):
    torch._dynamo.reset()
    source = trained(layer)
    vq = way(LAYERS[layer](), tensors(source))
    compiled = torch.compile(vq, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(far_away())
    assert vq.codebook.mean() > 3
    fresh = LAYERS[layer]()  # the graph of one that was filled must not serve one that was not
    torch.compile(fresh, fullgraph=True, backend="aot_eager")(far_away())
    assert fresh.codebook.mean() < -40


def test_diffusers_keeps_codes_and_statistics(tmp_path):
    diffusers = pytest.importorskip("diffusers")

    class Net(diffusers.ModelMixin, diffusers.ConfigMixin):
        @diffusers.configuration_utils.register_to_config
        def __init__(self, layer: str = "ema") -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)
            self.vq = LAYERS[layer]()

    for layer in ("ema", "gradient"):
        net = Net(layer)
        net.vq.load_state_dict(trained(layer).state_dict())
        net.save_pretrained(tmp_path / layer)
        for options in ({}, {"torch_dtype": torch.bfloat16}, {"torch_dtype": torch.float16}):
            loaded = Net.from_pretrained(tmp_path / layer, **options)
            book = loaded.vq.codebook_of(0)
            assert loaded.project.weight.dtype == options.get("torch_dtype", torch.float32)
            assert book.codes.dtype == book.hits.dtype == torch.float32
            torch.testing.assert_close(book.codes, net.vq.codebook, rtol=4e-3, atol=0)
            before = book.codes.detach().clone()
            loaded.train().vq(before)  # vectors on the codes do not move them
            torch.testing.assert_close(book.codes.detach(), before, rtol=1e-4, atol=0)


# Precision


def dtypes(vq: KohonenVQ) -> set[torch.dtype]:
    book = vq.codebook_of(0)
    return {getattr(book, name).dtype for name in STATISTICS if hasattr(book, name)}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_default_type_of_half_precision_is_for_others(layer, half):
    torch.set_default_dtype(half)
    try:
        vq = LAYERS[layer]()
        low = KohonenVQ(4, 8, codebook_dim=2, update_empty=False, threshold_ema_dead_code=0.1)
        vq(torch.randn(64, 4))
        low(torch.randn(64, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes(vq) == dtypes(low) == {torch.float32}
    assert low.codebook_of(0).received.dtype == torch.float32
    assert low.project_in.weight.dtype == half


def test_a_default_type_of_double_precision_is_taken():
    torch.set_default_dtype(torch.float64)
    try:
        vq = KohonenVQ(4, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes(vq) == {torch.float64}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layer", ["ema", "gradient"])
@pytest.mark.parametrize("way", [by_assignment, one_by_one, by_replacing])
def test_statistics_that_arrive_in_half_precision_become_float32(way, layer, compiled):
    torch._dynamo.reset()
    source = trained(layer)
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors(source).items()
    }
    vq = way(LAYERS[layer](), state)
    codes = state["codebooks.0.codes"].float()
    vq.train()
    step = torch.compile(vq, fullgraph=True, backend="aot_eager") if compiled else vq
    step(codes)
    assert dtypes(vq) == {torch.float32}
    # Sums and counts were rounded each on its own: their ratio is not the code, which must stay nevertheless.
    torch.testing.assert_close(vq.codebook.detach(), codes, rtol=1e-4, atol=0)
    assert dtypes(copy.deepcopy(vq)) == dtypes(vq.half()) == {torch.float32}


def test_an_optimizer_keeps_its_parameter_when_it_becomes_float32():
    vq = GradientVQ(4, 8)
    vq.codebook_of(0)._parameters["codes"] = nn.Parameter(vq.codebook.detach().bfloat16())
    parameter = vq.codebook_of(0).codes
    vq(torch.randn(64, 4))
    assert vq.codebook_of(0).codes is parameter
    assert parameter.dtype == torch.float32


@pytest.mark.parametrize("first", ["evaluation", "compiled training"])
def test_the_first_forward_may_be_one_of_evaluation_or_compiled(first):
    torch._dynamo.reset()
    state = {name: each.half() if each.is_floating_point() else each for name, each in tensors(trained("ema")).items()}
    vq = step = by_replacing(LAYERS["ema"](), state)
    if first == "evaluation":
        vq.training = False  # not by eval(), which looks at the state, too
        with torch.inference_mode():  # what is made within cannot be trained
            vq(torch.randn(5, 4))
        vq.training = True
    else:
        step = torch.compile(vq, fullgraph=True, backend="aot_eager")
    step(torch.randn(5, 4))
    assert dtypes(vq) == {torch.float32}
    assert vq.step.item() == 4


# Saving what is pending


def test_what_is_pending_is_saved_and_learned_from_after_loading():
    torch.manual_seed(0)
    whole, parts, again = (KohonenVQ(4, 8, neighborhood="none") for _ in range(3))
    parts.load_state_dict(whole.state_dict())
    keys = set(parts.state_dict())
    first, last = torch.randn(2, 32, 4)
    with parts.accumulate():
        assert set(parts.state_dict()) == keys  # nothing yet
        parts(first)
    state = safetensors.torch.load(safetensors.torch.save(parts.state_dict()))
    assert set(state) - keys == {"codebooks.0.pending"}
    again.load_state_dict(state)
    assert set(again.state_dict()) == set(state)
    whole(torch.cat([first, last]))
    for each in (parts, again):
        each(last)
        torch.testing.assert_close(each.codebook, whole.codebook)
        assert set(each.state_dict()) == keys


def test_a_state_without_anything_pending_leaves_nothing_pending():
    plain, vq = KohonenVQ(4, 8), KohonenVQ(4, 8)
    with vq.accumulate():
        vq(torch.randn(32, 4) + 100)
    vq.load_state_dict(plain.state_dict())
    assert vq.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(32, 4)
    for each in (plain, vq):
        each(x)
    torch.testing.assert_close(vq.codebook, plain.codebook)


def test_statistics_pending_for_another_size_are_refused():
    vq, state = KohonenVQ(4, 8), KohonenVQ(4, 8).state_dict()
    state["codebooks.0.pending"] = torch.zeros(8 * 5 + 8 + 1)
    with pytest.raises(RuntimeError, match=r"codebooks.0.pending of shape \(49,\) does not fit: expected \(41,\)"):
        vq.load_state_dict(state)


def test_accumulation_within_accumulation_does_not_end_it():
    x, codes = torch.randn(30, 3), torch.randn(6, 3)
    parts, whole = book_of(codes, "hard", 2, 3), book_of(codes, "hard", 2, 3)
    index = torch.arange(30) % 6
    with parts.accumulate_updates():
        with parts.accumulate_updates():
            learn(parts, x[:10], index[:10])
        learn(parts, x[10:20], index[10:20])
        assert parts.step.item() == 0
    learn(parts, x[20:], index[20:])
    learn(whole, x, index)
    torch.testing.assert_close(parts.codes, whole.codes)
    assert parts.step.item() == 1


# One layer under two names


@pytest.mark.parametrize("make", [*LAYERS.values(), lambda: ResidualVQ(4, 8, num_quantizers=2)])
def test_a_shared_layer_is_saved_once_and_loaded(tmp_path, make):
    def twice() -> nn.Module:
        layer = make()
        return nn.ModuleDict({"one": layer, "two": layer})

    model, other = twice(), twice()
    model["one"](torch.randn(64, 4))
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    assert safetensors.torch.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert other["one"] is other["two"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_what_is_missing_is_reported():
    model, other = nn.ModuleDict({"vq": KohonenVQ(4, 8)}), nn.ModuleDict({"other": nn.Linear(1, 1)})
    missing = model.load_state_dict(other.state_dict(), strict=False).missing_keys
    assert set(missing) == set(model.state_dict())


# States from before


def test_a_state_without_the_last_use_of_codes_loads():
    old = book_of(torch.zeros(4, 1), "none", decay=0.5)
    learn(old, torch.zeros(3, 1), [0, 1, 1])
    for _ in range(4):
        learn(old, torch.zeros(1, 1), [2])
    state = state_of(old)
    del state["idle"]
    new = Codebook(1, Neighborhood("none", Grid(4)), decay=0.5)
    new.load_state_dict(state)
    # What hits can tell: code 2 was chosen lately, 0 and 1 not for some updates, 3 never.
    assert new.idle.tolist() == [NEVER, NEVER, 0, NEVER]
    assert new.usage().item() == 0.25
    assert "idle" not in state


def test_what_a_loader_that_knows_no_newer_buffer_leaves_there_does_no_harm():
    """transformers fills what a checkpoint does not have with whatever is in memory."""
    options = {"neighborhood": "none", "update_empty": False, "threshold_ema_dead_code": 0.1}
    torch.manual_seed(0)
    vq = KohonenVQ(1, 4, **options)
    vq.codebook = torch.arange(4.0)[:, None]
    x = torch.arange(3.0)[:, None].repeat(100, 1)
    for _ in range(20):
        vq(x)
    book, before = vq.codebook_of(0), vq.codebook.clone()
    book.idle.copy_(torch.tensor([1495211376, 32510, 0, -1136369040]))
    book.received.copy_(torch.tensor([2.8e15, 4.5e-41, -0.01, torch.nan]))
    vq(x)
    torch.testing.assert_close(vq.codebook[:3], before[:3])  # none of those in use is revived
    assert vq.usage.item() == 0.75
    assert book.received.isfinite().all()
