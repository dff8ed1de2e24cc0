"""save_pretrained and from_pretrained: the same layer back, in a file without pickle."""

import json
import os
import types

import pytest
import torch

from topovq import GradientVQ, Grid, GroupedResidualVQ, KohonenVQ, ResidualVQ, Schedule, SoftKohonenVQ

WRITTEN = ["README.md", "config.json", "manifest.json", "model.safetensors"]
LAYERS = {
    "grid": lambda: KohonenVQ(4, 24, grid=Grid((4, 6), topology="hexagonal", wrap=(True, False)), tau=0.5),
    "partly empty": lambda: KohonenVQ(4, 23),
    "hexagons, partly empty": lambda: KohonenVQ(4, 23, grid=Grid((4, 6), topology="hexagonal", size=23)),
    "tuple": lambda: KohonenVQ(4, 24, grid=(4, 6), codebook_dim=3, heads=2, separate_codebook_per_head=True),
    "schedule": lambda: KohonenVQ(4, 16, neighborhood="gaussian", schedule=Schedule.exponential(3, 0.3, 100)),
    "steps": lambda: KohonenVQ(4, 1024, steps=8),  # saved while its width falls
    "kmeans": lambda: KohonenVQ(4, 16, kmeans_init=True),
    "gradient": lambda: GradientVQ(4, 16, neighborhood="hard", neighbor_weight=0.1, tau=0.2),
    "soft": lambda: SoftKohonenVQ(4, 16, temperature=Schedule.linear(1, 0.1, 50), grid=Grid(16)),
    "residual": lambda: ResidualVQ(4, 16, num_quantizers=2, neighborhood="hard", grid=(2, 8)),
}


def rewrite(folder, config):
    """As a version before manifests would have left it."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("name", LAYERS)
def test_round_trip(tmp_path, name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for _ in range(3):
        layer(torch.randn(40, 4))
    layer.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == set(WRITTEN)
    loaded = type(layer).from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.grid == layer.grid
    if isinstance(layer, KohonenVQ):
        assert loaded.neighborhood.width(loaded.step) == layer.neighborhood.width(layer.step)
    for key, value in layer.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    # Learning goes on from where it was: step, schedule and statistics are all there.
    layer.train()
    loaded.train()
    x = torch.randn(40, 4)
    assert torch.equal(layer(x).indices, loaded(x).indices)
    assert torch.equal(layer.codebook, loaded.codebook)


@pytest.mark.parametrize("kind", [GradientVQ, ResidualVQ])
def test_a_neighbor_term_that_was_saved_before_it_named_its_reduction_is_still_a_mean(tmp_path, kind):
    """Before there was a choice it was the mean over dimensions; what is saved now is what it was made with."""
    some = {"neighborhood": "hard", "neighbor_weight": 0.1}
    more = {} if kind is GradientVQ else {"num_quantizers": 2, "quantizer": "gradient"}
    for number, options in enumerate(({}, {"neighbor_reduction": "mean"}, {"neighbor_reduction": "sum"})):
        made = kind(4, 16, **some, **more, **options)
        folder = tmp_path / str(number)
        made.save_pretrained(folder)
        first = kind.from_pretrained(folder) if kind is GradientVQ else kind.from_pretrained(folder).quantizers[0]
        assert first.neighbor_reduction == options.get("neighbor_reduction", "sum")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("neighbor_reduction") == "sum"
    rewrite(folder, config)
    old = kind.from_pretrained(folder) if kind is GradientVQ else kind.from_pretrained(folder).quantizers[0]
    assert (old.neighbor_reduction, old.neighbor_weight) == ("mean", 0.1)


@pytest.mark.parametrize("kind", [KohonenVQ, ResidualVQ])
def test_learnable_codes_that_were_saved_with_a_neighborhood_still_load(tmp_path, kind):
    """Nothing used it: it is refused now, and a layer from before comes back without it."""
    more = {} if kind is KohonenVQ else {"num_quantizers": 2}
    made = kind(4, 16, learnable_codebook=True, ema_update=False, **more)
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rewrite(tmp_path, {**config, "neighborhood": "hard", "tau": 0.2})
    x = torch.randn(20, 4)
    assert torch.equal(kind.from_pretrained(tmp_path)(x).quantized, made.eval()(x).quantized)


@pytest.mark.parametrize("given", [{}, {"steps": 50}, {"tau": 0.5}], ids=str)
@pytest.mark.parametrize("kind", [KohonenVQ, ResidualVQ, GroupedResidualVQ])
def test_a_neighborhood_that_was_left_open_before_it_was_named_still_narrows(tmp_path, kind, given):
    more = {} if kind is KohonenVQ else {"num_quantizers": 2}
    made = kind(4, 16, neighborhood="narrowing", **more, **given)
    made(torch.randn(40, 4))
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("neighborhood") == "narrowing"
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **({"neighborhood": None} if kind is KohonenVQ else {})})
    )
    (tmp_path / "manifest.json").unlink()
    loaded = kind.from_pretrained(tmp_path)
    for book, old in zip(loaded.books(), made.books()):
        assert book.neighborhood.numbers == old.neighborhood.numbers
        assert (book.decay, book.update_empty, book.ride) == (old.decay, False, False)
    x = torch.randn(40, 4)
    made.train()(x)
    loaded.train()(x)
    for book, old in zip(loaded.books(), made.books()):
        assert torch.equal(book.codes, old.codes)


@pytest.mark.parametrize("kind", [KohonenVQ, ResidualVQ, GroupedResidualVQ])
def test_a_neighborhood_that_is_left_open_now_rides_when_it_is_loaded(tmp_path, kind):
    made = kind(4, 16, **({} if kind is KohonenVQ else {"num_quantizers": 2}))
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["neighborhood"] == "ride"
    loaded = kind.from_pretrained(tmp_path)
    assert all(book.ride and not book.is_initialized for book in loaded.books())


def test_schedule_and_grid_are_readable_in_the_config(tmp_path):
    LAYERS["schedule"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {k: v for k, v in config["schedule"].items() if v is not None} == {
        "kind": "exponential", "start": 3, "end": 0.3, "steps": 100,
    }  # fmt: skip


def test_weights_are_on_the_disk_before_they_take_their_name(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("os.fsync", lambda descriptor: written.append(os.fstat(descriptor).st_ino))
    KohonenVQ(4, 16).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_ino in written
    assert sorted(file.name for file in tmp_path.iterdir()) == WRITTEN


def test_a_folder_without_weights_says_so(tmp_path):
    LAYERS["tuple"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in"):
        KohonenVQ.from_pretrained(tmp_path)


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    LAYERS["tuple"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"codes has shape \[24, 3\], but the model's is \[12, 3\]"):
        KohonenVQ.from_pretrained(tmp_path, codebook_size=12, grid=(3, 4))


def test_a_folder_that_huggingface_hub_wrote_loads(tmp_path):
    """Version 0.1 saved through its mixin, which writes the fields of a schedule that are None too."""
    layer = LAYERS["schedule"]()
    layer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["schedule"] = {"tau": None, "start": 3, "end": 0.3, "steps": 100, "kind": "exponential"}
    rewrite(tmp_path, config)
    loaded = KohonenVQ.from_pretrained(str(tmp_path))
    assert loaded.neighborhood.schedule == layer.neighborhood.schedule
    assert torch.equal(loaded.codebook, layer.codebook)


def test_pushing_uploads_what_saving_writes(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    class Api:
        def __init__(self, token):
            assert token == "secret"

        def create_repo(self, repo_id, private, exist_ok):
            assert (private, exist_ok) == (True, True)
            return types.SimpleNamespace(repo_id="me/" + repo_id)

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(os.listdir(folder_path)), commit_message))
            return "address"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    layer = LAYERS["grid"]()
    options = {"private": True, "token": "secret", "commit_message": "First"}
    assert layer.save_pretrained(tmp_path / "mine", push_to_hub=True, **options) == "address"
    assert calls == [("me/mine", WRITTEN, "First")]


def test_names_on_the_hub_are_fetched_file_by_file(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    layer = LAYERS["grid"]()
    layer.save_pretrained(tmp_path)

    def download(repo_id, filename, revision):
        assert (repo_id, revision) == ("me/mine", "v1")
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = KohonenVQ.from_pretrained("me/mine", revision="v1")
    assert torch.equal(loaded.codebook, layer.codebook)
