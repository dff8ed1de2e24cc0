"""Saved modules that were damaged, or made to harm: refused in a sentence, before anything is spent on them."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from topovq import KohonenVQ, ResidualVQ
from topovq.storage import DamagedFile, model_id, sha256
from topovq.tokenizer.models import VQVAE, VQVAE2, load_pretrained, outline

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 16, "code_dim": 8}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    VQVAE(**SMALL).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **values) -> None:
    """config.json with other values, in a folder as versions before manifests left it."""
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in {**config, **values}.items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / "manifest.json").unlink()


def change_weights(folder: Path, **tensors) -> None:
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")
    (folder / "manifest.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", [VQVAE, KohonenVQ])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str, kind) -> None:
    (kind(**SMALL) if kind is VQVAE else kind(4, 16)).save_pretrained(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=name):  # from_pretrained may see first that it is no JSON
            kind.from_pretrained(tmp_path)
    (tmp_path / name).write_bytes(whole)
    kind.from_pretrained(tmp_path)


def test_a_model_saved_before_manifests_loads_with_a_note(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        tokens = load_pretrained(saved).encode(x)
    assert not caplog.records
    (saved / "manifest.json").unlink()
    assert torch.equal(load_pretrained(saved).encode(x), tokens)
    assert "has no manifest.json, so damage to it may go unnoticed" in caplog.text


def test_the_id_of_a_model_is_the_digest_of_its_weights(saved: Path) -> None:
    assert model_id(saved) == sha256(saved / "model.safetensors")
    assert json.loads((saved / "manifest.json").read_text())["sha256"]["model.safetensors"] == model_id(saved)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mean": "left out"}, "has mean=None: expected the pixel statistics"),
        ({"std": [1, 1, float("nan")]}, "has std=.*nan"),
        ({"mean": [1, 1, True]}, r"has mean=\[1, 1, True\]"),
        ({"image_size": 100_000}, "image_size=100000 must be a whole number of at most 9,459"),
        ({"hiden": 16}, "'hiden', which is no argument of VQVAE"),
        ({"hidden": "x"}, "does not describe a module"),
        ({"hidden": 10**30}, "does not describe a module"),
        ({"hidden": 32}, "has shape .* but the model's is"),
        ({"quantizer_options": 3}, "quantizer_options=3 must be an object"),
        ({"model": "vqvae3"}, "names the model 'vqvae3'; valid: vqvae, vqvae2"),
        ({"model": ["vqvae"]}, "names the model"),
        ({"residual_layers": 10**9}, "asks for 1,000,000,000 modules"),
        ({"quantizer": "residual", "quantizer_options": {"num_quantizers": 10**9}}, "num_quantizers asks for"),
        ({"quantizer_options": {"grid": [2] * 2000}}, "grid asks for 2,000"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(saved: Path, values: dict, said: str) -> None:
    change(saved, **values)
    for load in (load_pretrained, outline):
        with pytest.raises(ValueError, match=rf"config\.json.*{said}|{said}"):
            load(saved)


def test_sizes_are_looked_at_before_memory_is_spent(saved: Path, run_with_gauge) -> None:
    change(saved, codebook_size=200_000_000, hidden=20_000, residual_hidden=20_000, image_size=4096)
    change_weights(saved)  # some gigabytes, if they were built
    run_with_gauge(f"""
        from topovq.tokenizer.models import load_pretrained, outline
        load_pretrained
        start_gauge()
        for load in (outline, load_pretrained):
            try:
                load({str(saved)!r})
            except ValueError as error:
                assert "shape" in str(error), error
            else:
                raise AssertionError("was loaded")
        assert growth() < 64, growth()
    """)


def test_a_model_larger_than_its_weights_is_refused(saved: Path) -> None:
    change(saved, codebook_size=50_000_000)
    codebook = [name for name in load_file(saved / "model.safetensors") if name.startswith("quantizers.")]
    change_weights(saved, **dict.fromkeys(codebook))
    with pytest.raises(DamagedFile, match=r"describes a model of [\d,]+ bytes, but model\.safetensors has"):
        load_pretrained(saved)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, r"does not fit its config\.json.*decoder\.0\.weight"),
        (torch.zeros(3), r"decoder\.0\.weight has shape \[3\], but the model's is \[16, 8, 3, 3\]"),
        (torch.zeros(16, 8, 3, 3, dtype=torch.int64), r"decoder\.0\.weight is of type I64"),
        (torch.full((16, 8, 3, 3), torch.nan), r"1,152 of 1,152 values of decoder\.0\.weight are NaN or infinite"),
    ],
)
def test_weights_that_are_not_sound_are_refused(saved: Path, tensor, said: str) -> None:
    change_weights(saved, **{"decoder.0.weight": tensor})
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{said}|{said}"):
        load_pretrained(saved)


def test_weights_that_are_no_safetensors_are_named(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    for data in (b"", b"x" * 100, (saved / "model.safetensors").read_bytes()[:-1]):
        (saved / "model.safetensors").write_bytes(data)
        with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged or no safetensors file"):
            load_pretrained(saved)


def test_an_outline_says_what_the_model_is(tmp_path: Path) -> None:
    model = VQVAE2(**SMALL, quantizer="residual")
    model.save_pretrained(tmp_path)
    found = outline(tmp_path)
    assert all(parameter.is_meta for parameter in found.parameters())
    assert (found.config, found.token_shapes) == (model.config, model.token_shapes)


def test_half_precision_and_shared_codebooks_still_load(tmp_path: Path) -> None:
    made = ResidualVQ(4, 16, num_quantizers=3, shared_codebook=True, neighborhood="hard")
    made.save_pretrained(tmp_path / "shared")
    assert torch.equal(ResidualVQ.from_pretrained(tmp_path / "shared").codebook, made.codebook)
    KohonenVQ(8, 16, codebook_dim=4).half().save_pretrained(tmp_path / "half")
    KohonenVQ.from_pretrained(tmp_path / "half")
