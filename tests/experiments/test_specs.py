"""Which runs the tables are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.records import Records
from experiments.specs import QUICK, TABLES, Blocks, Cell, Options, cells, configs, targets


def find(table: str, dataset: str = "cifar10", blocks: Blocks | None = None, **values: str) -> Cell:
    every = cells(table, dataset, blocks=blocks)
    (cell,) = [c for c in every if all(getattr(c, name) == value for name, value in values.items())]
    return cell


def test_every_row_of_the_paper_is_a_cell_with_its_numbers() -> None:
    datasets = {table: dict.fromkeys(key[1] for key in targets() if key[0] == table) for table in TABLES}
    every = [cell for table in TABLES for dataset in datasets[table] for cell in cells(table, dataset)]
    from_paper = [cell for cell in every if cell.paper]
    assert [cell.key for cell in from_paper] == list(targets())
    assert len(from_paper) == 51
    assert find("main", method="ema").paper == {
        "loss_mean": "51.9",
        "loss_std": "0.2",
        "steps10_mean_k": "5.4",
        "steps10_std_k": "0.5",
        "steps20_mean_k": "3.7",
        "steps20_std_k": "0.5",
        "seeds": "10",
    }


def test_exponential_stands_after_each_gaussian_row_and_has_no_number_of_the_paper() -> None:
    kinds = [cell.neighborhood for cell in cells("main")]
    assert kinds == ["none", "hard", "gaussian", "exponential"]
    rows = cells("ablation", "faces")
    for gaussian, exponential in zip(rows[4::2], rows[5::2]):
        assert gaussian.paper
        assert exponential == replace(gaussian, neighborhood="exponential")
        assert exponential.paper is None
    robust = [cell.neighborhood for cell in cells("robustness")]
    assert robust == ["none", "hard", "gaussian", "exponential"] * 3
    assert "exponential" not in {cell.neighborhood for cell in cells("robustness", blocks="plain")}


def test_the_cifar10_run_is_that_of_the_paper() -> None:
    config = find("main", method="ksom", neighborhood="hard").config(seed=3)
    assert (config.data, config.image_size, config.model, config.seed) == ("cifar10", 32, "vqvae", 3)
    plain = {"hidden": 128, "residual_layers": 2, "residual_hidden": 32, "stride": 4}
    assert config.model_options == plain | {"residual": "activated"}
    model = config.build_model(32, (0,) * 3, (1,) * 3)
    assert model.quantizers[0].commitment_weight == 0.25
    ours = find("main", blocks="plain", method="ksom", neighborhood="hard").config(seed=3)
    assert (ours.model_options, ours.run_id == config.run_id) == (plain, False)
    assert (config.codebook_size, config.code_dim, config.quantizer) == (512, 64, "kohonen")
    assert config.quantizer_options == {
        "neighborhood": "hard",
        "tau": 0.1,
        "grid": [16, 32],
        "count_init": 1.0,
        "update_empty": True,
    }
    assert (config.steps, config.batch_size, config.learning_rate) == (30_000, 256, 1e-3)
    assert (config.weight_decay, config.clip, config.precision, config.validate_every) == (0.0, 1.0, "bf16", 1_000)


def test_the_256x256_runs_are_those_of_the_paper() -> None:
    for dataset, data in (("imagenet", "imagenet"), ("faces", "faces")):
        config = find("robustness", dataset, method="ema", count_init="0", update_empty="no").config(0)
        assert (config.data, config.image_size, config.model) == (data, 256, "vqvae2")
        sizes = {"hidden": 128, "residual_layers": 2, "residual_hidden": 32, "strides": [4, 2]}
        assert config.model_options == sizes | {"residual": "activated"}
        assert (config.batch_size, config.learning_rate, config.steps) == (128, 3e-4, 30_000)
        assert (config.quantizer, config.quantizer_options) == ("ema", {"count_init": 0.0, "update_empty": False})


def test_a_model_of_a_cell_is_what_the_cell_says() -> None:
    line = find("ablation", grid_dim="1", neighborhood="exponential").config(0)
    vq = line.build_model(32, (0,) * 3, (1,) * 3).quantizers[0]
    assert (vq.grid.shape, vq.neighborhood.kind, vq.neighborhood.schedule.tau) == ((512,), "exponential", 0.1)
    som = (
        find("gradient", blocks="plain", method="som-vae-input-mean-1.0")
        .config(0)
        .build_model(32, (0,) * 3, (1,) * 3)
        .quantizers[0]
    )
    assert (som.neighbor_target, som.neighbor_weight, som.neighbor_reduction) == ("input", 1.0, "mean")
    assert som.commitment_weight == 0.25
    assert (som.grid.shape, som.neighborhood.kind) == ((16, 32), "hard")


def test_the_som_vae_is_that_of_the_authors_and_comes_with_both_targets_and_both_weights_of_a_mean() -> None:
    names = ("neighbor_target", "neighbor_weight", "neighbor_reduction")
    found = {
        cell.method: tuple(cell.config(0).quantizer_options[name] for name in names)
        for cell in cells("gradient", blocks="plain")
        if cell.method.startswith("som-vae")
    }
    assert [cell.method for cell in cells("gradient")] == ["gradient", "ema", "som-vae", "ksom"]
    assert found.pop("som-vae") == ("winner", 0.1, "sum")
    assert set(found.values()) == {(target, weight, "mean") for target in ("input", "winner") for weight in (0.1, 1.0)}
    assert found["som-vae-winner-mean-0.1"] == ("winner", 0.1, "mean")


def test_records_that_name_no_reduction_are_those_of_the_mean() -> None:
    records = Records([Path(__file__).parents[2] / "records"])
    som_vae = [cell for cell in cells("gradient", blocks="plain") if cell.method.startswith("som-vae")]
    measured = {cell.method: records.finished(cell.config(0)) for cell in som_vae}
    assert measured.pop("som-vae") is None
    for method, found in measured.items():
        assert found is not None, method
        options = found.config["quantizer_options"]
        assert method == f"som-vae-{options['neighbor_target']}-mean-{options['neighbor_weight']}"
        assert "neighbor_reduction" not in options


def test_cells_of_several_tables_are_one_run() -> None:
    same = [
        find("sensitivity", count_init="1", update_empty="yes"),
        find("main", method="ema"),
        find("gradient", method="ema"),
    ]
    assert len({cell.config(0).run_id for cell in same}) == 1
    # Of most seeds: EMA-VQ 4, hard, gaussian and exponential 4 each. Of fewer: other maps and taus 9, gradient 1 and
    # SOM-VAE 1. With plain blocks gaussian and exponential are 1 each of most, and SOM-VAE 5 of fewer.
    for blocks, number in (("paper", 16 * 10 + 11 * 5), ("plain", 10 * 5 + 15 * 3)):
        found = {config.run_id for table in TABLES for config in configs(table, Options(blocks=blocks))}
        assert len(found) == number


def test_the_id_depends_on_no_device_and_on_what_was_asked_for() -> None:
    config = configs("main", Options())[0]
    assert config.resolve("cpu").run_id == config.resolve("cuda").run_id == config.run_id
    assert configs("main", Options(steps=10))[0].run_id != config.run_id
    assert configs("main", Options(batch_size=32))[0].run_id != config.run_id
    assert {c.batch_size for c in configs("main", Options("imagenet", batch_size=32))} == {32}
    assert {c.batch_size for c in configs("main", Options("imagenet"))} == {128}
    assert len(configs("main", Options(seeds=3))) == 12
    assert [c.seed for c in configs("main", Options(seeds=3))[:3]] == [0, 1, 2]
    assert configs("main", Options("imagenet", data_path=Path("here")))[0].data_path == Path("here")


def test_the_quick_version_has_the_rows_of_cifar10_on_photographs() -> None:
    rows = cells("sensitivity", QUICK)
    assert [cell.key[2:] for cell in rows] == [cell.key[2:] for cell in cells("sensitivity")]
    assert not any(cell.paper for cell in rows)
    config = rows[0].config(0)
    assert (config.data, config.device, config.precision) == ("photos", "cpu", "fp32")


def test_the_study_of_scale_has_more_seeds_where_they_are_cheap() -> None:
    rows = cells("scale")
    assert len(rows) == 8 * 6
    seeds = {(cell.method, cell.codebook_size): len(cell.seeds(3)) for cell in rows}
    assert (seeds["ksom", 16_384], seeds["ksom", 65_536], seeds["fsq", 512]) == (3, 1, 1)
    assert {len(cell.seeds(9)) for cell in rows} == {9, 1}  # as many as were asked for, but where a run is costly
    assert len(configs("scale", Options(codebooks=(512,)))) == 3 * 3 + 5
    by_method = {cell.method: cell.config(0) for cell in cells("scale", codebooks=[512])}
    assert by_method["ema"].run_id == find("main", blocks="plain", method="ema").config(0).run_id
    assert by_method["ksom-paper"].run_id == find("main", blocks="plain", neighborhood="hard").config(0).run_id
    assert by_method["ksom"].quantizer == "kohonen"
    assert by_method["ksom"].quantizer_options == {"neighborhood": "narrowing"}
    faces = cells("scale", "faces")
    assert [(cell.method, cell.codebook_size, cell.config(0).model) for cell in faces] == [
        ("ema", 16_384, "vqvae"),
        ("ksom", 16_384, "vqvae"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mian",), "did you mean 'main'"),
        (("main", "cifar"), "did you mean 'cifar10'"),
        (("gradient", "imagenet"), "'gradient' has no rows for 'imagenet'; it has them for cifar10"),
        (("main", "cifar10", [512]), "goes with 'scale'"),
        (("scale", "cifar10", [500]), "has the sizes 512, 1024"),
    ],
)
def test_what_there_is_not_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cells(*arguments)
    with pytest.raises(ValueError, match="seeds=0 must be at least 1"):
        Options(seeds=0)
