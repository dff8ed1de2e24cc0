"""The transformer: what it may see, that sampling with a cache is the same model, levels and stages, files."""

import math

import pytest
import safetensors.torch
import torch

from topovq import Grid, KohonenVQ
from topovq.prior import Prior
from topovq.prior.transformer import Cache
from topovq.tokenizer.models import VQVAE, VQVAE2

PLANE = Grid((3, 4)).to_dict()
LAYOUTS = {
    "one level": ([[2, 3]], [PLANE]),
    "two levels": ([[1, 2], [2, 4]], [PLANE, Grid((2, 5)).to_dict()]),
    "stages": ([[2, 2, 3]], [PLANE, Grid((2, 5)).to_dict(), Grid(6).to_dict()]),
}


def make(name="one level", **options):
    shapes, grids = LAYOUTS[name]
    torch.manual_seed(0)
    prior = Prior(shapes, grids, dim=16, layers=2, heads=2, **options)
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return prior.eval()


def tokens_of(prior, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [prior.grids[slot].size for slot in prior.slot_of]
    return torch.stack([torch.randint(n, (batch,), generator=generator) for n in sizes], 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sees_the_tokens_before_it_alone(name):
    prior = make(name)
    tokens = tokens_of(prior, 1)
    before = prior.hidden(tokens)
    for t in range(prior.length):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % 6
        differs = (prior.hidden(changed) - before).abs().amax(-1)[0] > 1e-6
        assert differs.tolist() == [later > t for later in range(prior.length)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_with_the_cache_are_the_whole_pass(name):
    prior, labels = make(name, classes=2), torch.tensor([0, 1, 2])
    tokens = tokens_of(prior)
    cache = Cache(prior, 3)
    with torch.no_grad():
        whole = prior.hidden(tokens, labels)
        for t in range(prior.length):
            torch.testing.assert_close(prior.step(tokens[:, t - 1], t, labels, cache), whole[:, t])


def test_sequences_and_levels():
    """The coarsest level first, rows, columns, and stages one after the other at each place."""
    prior = make("two levels")
    assert prior.slot_of == [0, 0, *[1] * 8]
    top, bottom = torch.arange(2).view(1, 1, 2), torch.arange(8).view(1, 2, 4)
    sequence = prior.to_sequence([top, bottom])
    assert sequence.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert all(torch.equal(a, b) for a, b in zip(prior.to_levels(sequence), (top, bottom)))
    assert make("stages").slot_of == [0, 1, 2] * 4
    with pytest.raises(ValueError, match=r"shapes \[\(2, 2\)\] an image, but the prior's are \[\(1, 2\), \(2, 4\)\]"):
        prior.to_sequence(torch.zeros(1, 2, 2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loss_is_the_mean_of_the_tokens(name):
    prior = make(name)
    tokens = tokens_of(prior)
    torch.testing.assert_close(prior(tokens), -prior.log_probs(tokens).mean())


def test_all_images_together_have_a_probability_of_one():
    """A prior of two tokens of three codes: nine images."""
    torch.manual_seed(0)
    prior = Prior([[1, 2]], [Grid(3).to_dict()], dim=8, layers=1, heads=1)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    assert prior.log_probs(every).sum(1).exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_the_same_seed_gives_the_same_samples_and_known_tokens_stay():
    prior = make("two levels")

    def draw(seed, **options):
        return prior.sample(4, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    known = torch.full((4, prior.length), -1)
    known[:, 3] = 7
    drawn = draw(1, known_BT=known)
    assert (drawn[:, 3] == 7).all()
    assert torch.equal(drawn[:, :3], draw(1)[:, :3])
    prior.check_tokens(drawn)


def test_samples_follow_the_probabilities():
    torch.manual_seed(0)
    prior = Prior([[1, 2]], [Grid(3).to_dict()], dim=8, layers=1, heads=1)
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    number = 20_000
    drawn = prior.sample(number, generator=torch.Generator().manual_seed(0))
    share = (drawn[:, 0] * 3 + drawn[:, 1]).bincount(minlength=9) / number
    p = prior.log_probs(torch.cartesian_prod(torch.arange(3), torch.arange(3))).sum(1).exp()
    assert p.max() > 2 * p.min()
    assert ((share - p).abs() <= 5 * (p * (1 - p) / number).sqrt()).all()


def test_guidance():
    prior, labels = make(classes=2), torch.tensor([0, 1] * 20)

    def draw(**options):
        return prior.sample(40, generator=torch.Generator().manual_seed(1), **options)

    plain = draw(labels_B=labels)
    assert torch.equal(draw(labels_B=labels, guidance=1.0), plain)
    assert torch.equal(draw(labels_B=labels, guidance=0.0), draw())  # the condition has no say
    assert not torch.equal(draw(labels_B=labels, guidance=4.0), plain)
    with pytest.raises(ValueError, match=r"guidance=2.0 needs labels"):
        draw(guidance=2.0)
    with pytest.raises(ValueError, match=r"guidance=nan must be a finite number"):
        draw(labels_B=labels, guidance=float("nan"))


def test_training_hides_some_labels():
    prior = make(classes=2)
    tokens, labels = tokens_of(prior, 1).expand(5000, -1), torch.zeros(5000, dtype=torch.long)
    with torch.no_grad():
        with_label, without = prior(tokens, labels), prior(tokens)
        prior.train()
        torch.manual_seed(0)
        found = prior(tokens, labels)
    assert ((found - with_label) / (without - with_label)).item() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("head", ["map", "flat", "tied", [4, 3]])
def test_a_prior_comes_back_from_its_folder(head, tmp_path):
    prior = make(head=head, code_dim=5, tokenizer="ab", run="there", classes=2, class_names=["cat", "dog"])
    prior.set_codes([torch.randn(12, 5)])
    prior.save_pretrained(tmp_path)
    again = Prior.from_pretrained(tmp_path)
    tokens = tokens_of(prior)
    assert torch.equal(again.log_probs(tokens), prior.log_probs(tokens))
    assert (again.tokenizer, again.run, again.class_names) == ("ab", "there", ["cat", "dog"])


def test_a_prior_saved_before_heads_knew_codes_says_what_it_said(tmp_path):
    prior = make(code_dim=5)
    prior.set_codes([torch.randn(12, 5)])
    prior.save_pretrained(tmp_path)
    (tmp_path / "manifest.json").unlink()
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    old = {name: tensor for name, tensor in state.items() if ".fit." not in name}
    assert len(old) == len(state) - 8  # queries, two layers, a norm and the codes
    safetensors.torch.save_file(old, tmp_path / "model.safetensors")
    for parameter in prior.outputs[0].fit.query.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = tokens_of(prior)
    assert torch.equal(Prior.from_pretrained(tmp_path).log_probs(tokens), prior.log_probs(tokens))


def test_priors_of_tokenizers():
    torch.manual_seed(0)
    options = {"codebook_size": 12, "code_dim": 4, "hidden": 8, "mean": [0.0] * 3, "std": [1.0] * 3}
    two = VQVAE2(image_size=16, **options).eval()
    deep = VQVAE(image_size=16, quantizer="residual", quantizer_options={"num_quantizers": 3}, **options).eval()
    for model, slots in ((two, 2), (deep, 3)):
        prior = Prior.of(model, dim=16, layers=1, heads=2).eval()
        assert len(prior.grids) == slots
        tokens = model.encode(torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8))
        sequence = prior.to_sequence(tokens)
        assert prior(sequence).item() == pytest.approx(math.log(12), rel=0.1)  # it knows nothing yet
        drawn = prior.to_levels(prior.sample(2))
        assert model.decode(drawn if len(drawn) > 1 else drawn[0]).shape == (2, 3, 16, 16)
    codes = two.quantizers[1].maps[0].codes
    scaled = codes / codes.square().mean().sqrt()
    prior = Prior.of(two, dim=16, heads=2)
    torch.testing.assert_close(prior.inputs[1].codes_KC, scaled)
    torch.testing.assert_close(prior.outputs[1].fit.codes_PnC.flatten(0, 1), scaled)


def test_a_prior_learns_what_there_is_to_learn():
    """Images that are all one class's constant token: the loss goes to nothing, samples are of the class."""
    torch.manual_seed(0)
    prior = Prior([[2, 2]], [PLANE], dim=16, layers=1, heads=2, classes=2)
    tokens, labels = torch.tensor([[3] * 4, [8] * 4] * 16), torch.tensor([0, 1] * 16)
    optimizer = torch.optim.AdamW(prior.parameters(), 1e-2)
    for step in range(80):
        optimizer.zero_grad()
        prior(tokens, labels, 1.0 if step < 30 else None).backward()
        optimizer.step()
    prior.eval()
    assert prior(tokens, labels) < 0.05
    assert prior.sample(2, torch.tensor([0, 1]), temperature=0).tolist() == [[3] * 4, [8] * 4]


def test_what_does_not_fit_is_refused():
    prior = make()
    with pytest.raises(ValueError, match="token 12 is out of range: expected 0 to 11"):
        prior.check_tokens(torch.full((1, 6), 12))
    with pytest.raises(ValueError, match=r"not \[images, 6\]"):
        prior.check_tokens(torch.zeros(1, 5, dtype=torch.long))
    conditional = make(classes=2)
    for told in (conditional, conditional.log_probs):
        with pytest.raises(ValueError, match=r"label 2 is out of range: expected 0 to 1"):
            told(tokens_of(conditional, 1), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"label 2 is out of range: expected 0 to 1"):
        conditional.sample(1, torch.tensor([2]))
    with pytest.raises(ValueError, match="labels were given, but this prior knows no classes"):
        prior(tokens_of(prior, 1), torch.tensor([0]))
    for token in (-1, 12):
        with pytest.raises(ValueError, match=f"token {token} is out of range: expected 0 to 11"):
            prior(torch.full((1, 6), token))
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 5\) are not \[images, 6\]"):
        prior.log_probs(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="token -2 is out of range: expected 0 to 11, or -1 for masked"):
        prior.sample(1, known_BT=torch.full((1, 6), -2))
    with pytest.raises(ValueError, match=r"known tokens of shape \(1, 4\) are not \[images, 6\]"):
        prior.sample(1, known_BT=torch.full((1, 4), -1))
    with pytest.raises(ValueError, match=r"random numbers of shape \(2, 6, 2\) do not fit: `uniform\(3\)` makes them"):
        prior.sample(3, uniform_BTF=prior.uniform(2))
    with pytest.raises(TypeError, match="KohonenVQ is no tokenizer"):
        Prior.of(KohonenVQ(8, 16))
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) do not fit 3 images"):
        conditional.sample(3, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="have 3 levels and stages in all, but there are 1 grids"):
        Prior([[2, 2, 3]], [PLANE])
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        Prior([[2, 2]], [PLANE], dim=18, heads=2)
    with pytest.raises(ValueError, match="10,000,000,000 tokens an image"):
        Prior([[100_000, 100_000]], [PLANE])
    with pytest.raises(ValueError, match="head='round' is unknown"):
        Prior([[2, 2]], [PLANE], head="round")


def test_training_compiles_whole():
    prior = make("stages", classes=2)
    tokens, labels = tokens_of(prior), torch.tensor([0, 1, 1])
    compiled = torch.compile(prior, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, labels), prior(tokens, labels))
