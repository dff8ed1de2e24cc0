"""Figures: their runs, their curves from hand-made records, and every file of them from small runs."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import lines_of, write_record
from PIL import Image

from experiments.figures import draw as drawing
from experiments.figures import parts as figures
from experiments.figures.curves import Look, curve, draw_losses, draw_perplexities
from experiments.figures.neighborhoods import weights
from experiments.figures.parts import FIGURES, FROM_RECORDS, QUICK_SIZE, TRACED, Search, figures_of, panels
from experiments.records import Records
from experiments.specs import Options
from topovq.tokenizer.data import open_source
from topovq.tokenizer.training import TrainConfig, train
from topovq.view.pictures import COLORS

QUICK: dict[str, Any] = {"dataset": "photos", "steps": 2}


def needs(name: str, **options: Any) -> list[TrainConfig]:
    return figures.needs(name, Options(**options))


def draw(name: str, runs: Path, out: Path, *, source: Any = None, **options: Any) -> list[Path]:
    """From the runs there and no others."""
    return drawing.draw(name, Options(**{"runs": runs, "out": out, "records": (), **options}), source)


def test_neighborhoods_are_the_formulas() -> None:
    hard = weights("hard", 10)
    assert hard.shape == (7, 11)
    assert hard[3, 5] == 1
    assert hard[2:5, 4:7].sum() == pytest.approx(1 + 8 / 2)  # 1 / (1 + 10 * 0.1) for the eight
    assert hard.sum() == hard[2:5, 4:7].sum()
    assert weights("gaussian", 20)[3, 6] == pytest.approx(math.exp(-3))
    assert weights("exponential", 0)[3, 0] == pytest.approx(math.exp(-0.5))


def lines(losses: list[float | None], every: int = 10, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "config"}]
    for number, loss in enumerate(losses, 1):
        found.append({"event": "validation", "step": every * number, "loss": loss, "perplexity": 3.0, **more})
    return [*found, {"event": "final", "steps": every * len(losses)}]


def test_a_curve_is_the_mean_of_its_seeds() -> None:
    look = Look("EMA-VQ", COLORS["EMA-VQ"])
    made = curve(look, [lines([0.4, 0.2]), lines([0.6, None])], "loss")
    assert made.steps_T.tolist() == [10, 20]
    assert np.isnan(made.values_ST[1, 1])
    figure = draw_losses({"one": [curve(look, [lines([0.4, 0.2]), lines([0.6, 0.3])], "loss")]}, "title", "caption")
    thin, other, thick = (line.get_ydata().tolist() for line in figure.axes[0].get_lines())
    assert thin == pytest.approx([400, 200])
    assert other == pytest.approx([600, 300])
    assert thick == pytest.approx([500, 250])
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == "EMA-VQ (2 seeds)"
    (alone,) = draw_perplexities({"": [curve(look, [lines([1.0])], "perplexity")]}, 8, "", "").axes[0].get_lines()[:1]
    assert alone.get_ydata().tolist() == [3]
    with pytest.raises(ValueError, match=r"different steps \(10, 20 and 5, 10\)"):
        curve(look, [lines([1.0, 1.0]), lines([1.0, 1.0], every=5)], "loss")
    with pytest.raises(ValueError, match="hold no 'perplexity_0'; they hold event, step, loss, perplexity"):
        curve(look, [lines([1.0])], "perplexity_0")
    with pytest.raises(ValueError, match="no records"):
        curve(look, [], "loss")


def test_the_runs_of_a_figure() -> None:
    assert needs("neighborhoods") == []
    pair = needs("map")
    assert [config.quantizer for config in pair] == ["kohonen", "ema"]
    assert pair[0].quantizer_options == {
        "neighborhood": "hard", "tau": 0.1, "grid": [16, 32], "count_init": 1.0, "update_empty": True,
    }  # fmt: skip
    assert needs("map", seeds=4) == pair  # pictures are of one seed
    assert len(needs("topography", seeds=4)) == 8
    start = needs("initialization", seeds=3)
    assert len(start) == 3 * 5 + 3 * 4
    zero = [c for c in start if c.quantizer == "ema" and c.quantizer_options == {"count_init": 0, "update_empty": True}]
    assert [config.seed for config in zero] == [0, 1, 2, 3, 4, 5]  # N = 0 twice
    kinds = [c.quantizer_options.get("neighborhood") for c in needs("perplexity", seeds=1, steps=7)]
    assert kinds == [None, "hard", "gaussian", "exponential"]
    two = needs("maps2", dataset="photos", steps=3)
    assert {(c.model, c.image_size, c.data, c.steps) for c in two} == {("vqvae2", QUICK_SIZE, "photos", 3)}
    assert needs("shifts", dataset="faces", data_path=Path("x"))[0].data_path == Path("x")
    assert "maps2" not in figures_of("cifar10")
    assert "map" not in figures_of("imagenet")
    assert figures_of("photos") == [name for name in FIGURES if name != "scale-map"]
    large = needs("scale-map")
    assert [(c.quantizer, c.codebook_size, c.seed) for c in large] == [("kohonen", 16_384, 0), ("ema", 16_384, 0)]
    assert {c.codebook_size for c in needs("scale-map", dataset="photos")} == {4_096}
    with pytest.raises(ValueError, match="'scale' is done on cifar10"):
        needs("scale-map", dataset="imagenet")
    with pytest.raises(ValueError, match="seeds=0 must be at least 1"):
        needs("map", seeds=0)
    with pytest.raises(ValueError, match=r"'maps2' shows the two levels.*dataset='cifar10' must be one of imagenet, "):
        needs("maps2")
    with pytest.raises(ValueError, match="shifts-wide"):
        needs("shift-wide")


def make_record(folder: Path, config: TrainConfig, losses: list[float | None], **more: Any) -> Path:
    """A record in the folder of its run; `more` is in each of its validations."""
    record = lines_of(config, losses)
    for line in record:
        line |= more if line["event"] == "validation" else {}
    return write_record(folder / record[0]["id"] / "record.jsonl", record)


def test_curves_are_drawn_from_records_alone(tmp_path: Path) -> None:
    runs, records, out = (tmp_path / name for name in ("runs", "records", "out"))
    wanted = needs("initialization", seeds=2, steps=30)
    for number, config in enumerate(wanted):
        make_record(runs if number % 2 else records, config, [300, 200, 100])
    paths = draw("initialization", runs, out, steps=30, records=(records,))
    assert [path.name for path in paths] == ["initialization-cifar10.png", "initialization-cifar10.svg"]
    svg = paths[1].read_text()
    for words in ("N = 1 (2 seeds)", "N = 0 (2 seeds)", "N = 0, other seeds (2 seeds)", "KSOM, hard", "30 steps"):
        assert words in svg
    assert "Not run" not in svg
    draw("initialization", runs, out, steps=30, seeds=2, records=(records,))
    with pytest.raises(FileNotFoundError, match=r"count_init=1 update_empty=yes, seed 2, 30 steps") as missed:
        draw("initialization", runs, out, steps=30, seeds=3, records=(records,))
    assert "`python -m experiments initialization --dataset cifar10 --steps 30 --seeds 3` makes it" in str(missed.value)
    assert needs("initialization", seeds=3, steps=30)[2].run_id in str(missed.value)
    assert str(records) in str(missed.value)


def test_a_partial_figure_says_what_it_lacks(tmp_path: Path) -> None:
    some = needs("perplexity", seeds=1, dataset="imagenet")
    make_record(tmp_path, some[0], [300, 100], perplexity_0=5.0, perplexity_1=7.0)
    with pytest.raises(FileNotFoundError, match="ksom hard"):
        draw("perplexity", tmp_path, tmp_path, dataset="imagenet")
    svg = draw("perplexity", tmp_path, tmp_path, dataset="imagenet", partial=True)[1].read_text()
    for words in ("top codes", "bottom codes", "EMA-VQ (1 seed)", "Not run: KSOM, hard"):
        assert words in svg
    with pytest.raises(FileNotFoundError, match="no-runs"):
        draw("perplexity", tmp_path / "no-runs", tmp_path, dataset="imagenet", partial=True)


def test_a_caption_says_what_is_not_the_papers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dataset": "faces", "steps": 20, "batch_size": 32}
    for config in needs("perplexity", seeds=1, **options):
        lines = lines_of(config, [9], source_train_images=5_753)
        lines[1] |= {"perplexity_0": 5.0, "perplexity_1": 7.0}
        write_record(tmp_path / f"{config.run_id}.jsonl", lines)
    path = draw("perplexity", tmp_path, tmp_path, **options)[1]
    assert path.name == "perplexity-faces.svg"
    caption = words_of(path)
    assert "5,753 training images (the paper has about 43,000), 20 steps (the paper 30,000)" in caption
    assert "batches of 32 (the paper 128), one seed a line." in caption
    with pytest.raises(FileNotFoundError, match="--steps 20 --batch-size 64` makes it"):
        draw("perplexity", tmp_path, tmp_path, **(options | {"batch_size": 64}))
    for config in needs("perplexity", seeds=1):
        make_record(tmp_path, config, [300, 100])
    caption = words_of(draw("perplexity", tmp_path, tmp_path)[1])
    assert "the paper " not in caption
    assert "batches" not in caption


def words_of(path: Path) -> str:
    """The text of an SVG, its lines joined."""
    return " ".join(re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", path.read_text()))


def test_a_curve_of_one_validation_is_seen() -> None:
    one = curve(Look("one", "red"), [[{"event": "validation", "step": 5, "loss": 0.1}]], "loss")
    (line,) = draw_losses({"": [one]}, "", "").axes[0].get_lines()
    assert line.get_marker() == "o"
    two = [{"event": "validation", "step": step, "loss": 0.1} for step in (5, 10)]
    (line,) = draw_losses({"": [curve(Look("two", "red"), [two], "loss")]}, "", "").axes[0].get_lines()
    assert line.get_marker() in ("", "None")


def test_runs_on_different_images_are_refused(tmp_path: Path) -> None:
    wanted = needs("perplexity", seeds=2, steps=20)
    for config in wanted:
        images = {"source_train_images": 7} if config is wanted[-1] else {}
        write_record(tmp_path / f"{config.run_id}.jsonl", lines_of(config, [300, 100], **images))
    with pytest.raises(ValueError, match=r"not one experiment: source_train_images is 40053 in 7 .* and 7 in 1"):
        draw("perplexity", tmp_path, tmp_path / "out", steps=20)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def few() -> Any:
    """Photographs with a dozen validation crops instead of hundreds."""
    source = open_source("photos", size=32)
    source._validation_indices = np.arange(12)
    return source


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory, few: Any) -> Path:
    """The runs of the quick figures after two steps; two seeds of those that are measured."""
    root = tmp_path_factory.mktemp("runs")
    pictures = [config for name in ("maps2", "scale-map") for config in needs(name, **QUICK)]
    for config in [*needs("topography", **QUICK, seeds=2), *pictures]:
        train(replace(config, out=root / config.run_id), quiet=True, source=few)
    return root


def test_every_figure_is_written(small_runs: Path, few: Any, tmp_path: Path) -> None:
    for name in FIGURES:
        if name in (*FROM_RECORDS, *TRACED):
            continue
        paths = draw(name, small_runs, tmp_path, **QUICK, source=few)
        kinds = ("png", "svg", "csv") if name in ("shift-psnr", "topography") else ("png", "svg")
        file = name if name == "neighborhoods" else f"{name}-photos"
        assert paths == [tmp_path / f"{file}.{kind}" for kind in kinds]
        with Image.open(paths[0]) as picture:
            assert min(picture.size) > 200
        text = paths[1].read_text()
        assert "<text" in text
        assert ("never)" in text) == (name == "scale-map")  # how many codes do not occur
    assert len(list(tmp_path.iterdir())) == 2 * (len(FIGURES) - len(FROM_RECORDS) - len(TRACED)) + 2

    rows = list(csv.DictReader((tmp_path / "shift-psnr-photos.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 21  # methods, seeds, offsets
    still = [row for row in rows if row["offset"] == "0"]
    assert {row["to_reconstruction"] for row in still} == {"inf"}
    assert {(row["method"], row["seed"]) for row in still} == {(m, s) for m in ("KSOM", "EMA-VQ") for s in "01"}
    assert {row["run"] for row in rows} == {c.run_id for c in needs("topography", **QUICK, seeds=2)}
    order = list(csv.DictReader((tmp_path / "topography-photos.csv").read_text().splitlines()))
    assert len(order) == 4
    assert {row["vectors"] for row in order} == {str(12 * 8 * 8)}
    assert "2 seeds a method" in (tmp_path / "topography-photos.svg").read_text()


def test_the_rows_are_those_of_the_model(small_runs: Path, few: Any, tmp_path: Path) -> None:
    """At no offset, what is written is the PSNR that validation recorded."""
    draw("shift-psnr", small_runs, tmp_path, **QUICK, seeds=1, source=few)
    rows = list(csv.DictReader((tmp_path / "shift-psnr-photos.csv").read_text().splitlines()))
    for row in (row for row in rows if row["offset"] == "0"):
        record = (small_runs / row["run"] / "record.jsonl").read_text().splitlines()
        validation = next(line for line in map(json.loads, record) if line["event"] == "validation")
        assert float(row["to_original"]) == pytest.approx(validation["psnr"], abs=1e-3)


def test_a_model_that_is_missing_is_named(small_runs: Path, tmp_path: Path) -> None:
    wanted = needs("map", dataset="photos", steps=3)[0]
    with pytest.raises(FileNotFoundError) as missed:
        draw("map", small_runs, tmp_path, dataset="photos", steps=3, partial=True)
    assert wanted.run_id in str(missed.value)
    assert "steps=2 instead of 3" in str(missed.value)  # what is there nearly is it
    assert "`python -m experiments map --quick --steps 3` makes it" in str(missed.value)
    path = make_record(tmp_path, wanted, [100, 100, 100])
    make_record(tmp_path, needs("map", dataset="photos", steps=3)[1], [100, 100, 100])
    with pytest.raises(FileNotFoundError, match=f"{path.parent.name} holds neither a model"):
        draw("map", tmp_path, tmp_path, dataset="photos", steps=3)


def test_panels_share_their_colors() -> None:
    for name in ("map", "shifts", "shift-psnr"):
        (parts,) = panels(name, "cifar10").values()
        assert {part.look.label: part.look.color for part in parts} == COLORS


def test_pictures_are_of_the_first_seed_that_all_models_have(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {("KSOM", 0), ("KSOM", 1), ("EMA-VQ", 1)}
    monkeypatch.setattr(Search, "find", lambda _, part, seed: seed if (part.look.label, seed) in have else None)
    search = Search("map", Options(), [Path("runs")], Records([]))
    parts = panels("map", "cifar10")[""]
    assert search.of_one_seed(parts) == (1, {"KSOM": 1, "EMA-VQ": 1})
    have.discard(("EMA-VQ", 1))
    with pytest.raises(FileNotFoundError, match=r"ema.*, seed 0, 30,000 steps\), which is not in runs"):
        search.of_one_seed(parts)
