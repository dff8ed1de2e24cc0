"""The paper's figures, and the measures beside them: which runs each is drawn from, and the drawing.

Curves are drawn from records alone, wherever they lie; pictures and measures need the models in the runs' folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from experiments.canvas import save
from experiments.figure_curves import Curve, curve, draw_losses, draw_perplexities
from experiments.figure_maps import draw_map, draw_maps2, draw_scale_map, token_counts
from experiments.figure_measures import Measured, draw_shift_scores, draw_topography, write_rows
from experiments.figure_neighborhoods import draw_neighborhoods
from experiments.figure_parts import FIGURES, FROM_RECORDS, MEASURED, SCALE_MAP, Part, figures_of, panels
from experiments.figure_runs import Images, Search, check_alike, load
from experiments.figure_shifts import NEAR, WIDE, draw_shifts
from experiments.library import Found, Library
from experiments.shifts import batches, level_choices, shift_scores
from experiments.specs import PAPER_STEPS, QUICK, SETTINGS, default_seeds
from experiments.targets import IMAGES, other_data
from experiments.topography import topographies
from topovq.tokenizer.data import Source
from topovq.tokenizer.training import TrainConfig

__all__ = ["FIGURES", "FROM_RECORDS", "draw", "figures_of", "needs"]

# Pixels of the images that measures are taken over: at 256x256, 32 images (two minutes on two cores) or 512.
PIXELS = {"cpu": 2**21, "cuda": 2**25}
MOST_IMAGES = 1_024
ALL_IMAGES = 10_000  # that use is counted over, if there are so many


def needs(
    name: str,
    *,
    dataset: str = "cifar10",
    steps: int | None = None,
    seeds: int | None = None,
    batch_size: int | None = None,
    quick: bool = False,
    data_path: Path | None = None,
) -> list[TrainConfig]:
    """The runs that a figure is drawn from, each once.

    `seeds` is how many a curve or a measure is taken over (default: for curves as in the tables, for measures 1).
    """
    dataset = QUICK if quick else dataset
    number = seeds if seeds is not None else default_seeds("main", dataset) if name in FROM_RECORDS else 1
    if number < 1:
        raise ValueError(f"seeds={seeds!r} must be at least 1")
    number = number if name in (*FROM_RECORDS, *MEASURED) else 1
    found: dict[str, TrainConfig] = {}
    for parts in panels(name, dataset).values():
        for part in parts:
            for seed in part.seeds(number):
                config = part.config(seed, steps, data_path, batch_size)
                found.setdefault(config.run_id, config)
    return list(found.values())


def draw(
    name: str,
    runs: Path,
    out: Path,
    *,
    dataset: str = "cifar10",
    steps: int | None = None,
    seeds: int | None = None,
    batch_size: int | None = None,
    quick: bool = False,
    records: Sequence[Path] = (),
    source: Source | None = None,
    data_path: Path | None = None,
    partial: bool = False,
) -> list[Path]:
    """Draw a figure into out/NAME-DATASET.png and .svg, a measured one also into .csv; the files written.

    runs       folder of runs: models are looked for there alone, records also in the folders `records`
    seeds      exactly so many a curve or measure; default: as many as there are, at least one
    source     where images come from, if not from the data set the record names (`data_path`: where that lies now)
    partial    leave out curves that have no runs, and say so in the caption
    What is missing is a FileNotFoundError that names the run and the command that makes it.
    """
    dataset = QUICK if quick else dataset
    parts = panels(name, dataset)
    if name == "neighborhoods":
        return save(draw_neighborhoods(), out, name)
    file = f"{name}-{dataset}"
    folders = [runs, *records] if name in FROM_RECORDS else [runs]
    where = " or ".join(map(str, folders))
    some = partial and name in FROM_RECORDS  # a picture of one of two models would be none
    search = Search(name, dataset, steps, seeds, batch_size, quick, some, Library(folders), where)
    if name in FROM_RECORDS:
        return save(_curves(search, parts), out, file)
    images = Images(source, data_path)
    if name in MEASURED:
        measured, caption = _measure(search, parts[""], images)
        plot = draw_shift_scores if name == "shift-psnr" else draw_topography
        return [*save(plot(measured, caption), out, file), write_rows(measured, out / f"{file}.csv")]
    return save(_pictures(search, parts[""], images), out, file)


def _curves(search: Search, of_panel: dict[str, list[Part]]) -> Any:
    """Losses, or perplexities: of two levels a panel each."""
    drawn: dict[str, list[tuple[Part, list[Found]]]] = {}
    left_out = []
    for panel, parts in of_panel.items():
        number = next((n for n in map(search.number, parts) if n), 0)
        for part in parts:
            found = search.runs(part, number)
            if found:
                drawn.setdefault(panel, []).append((part, found))
            else:
                left_out.append(f"{panel}, {part.look.label}" if panel else part.look.label)
    if not drawn:
        raise FileNotFoundError(search.missing(next(iter(of_panel.values()))[0], 0))
    every = [run for panel in drawn.values() for _, found in panel for run in found]
    check_alike(every)
    configs = [run.config for run in every]
    several = any(len(found) > 1 for panel in drawn.values() for _, found in panel)
    caption = _setting(configs[0], search.dataset)
    caption += "; thin lines are single seeds, thick ones their means." if several else ", one seed a line."
    if left_out:
        caption += f" Not run: {'; '.join(left_out)}."

    def curves(panel: str, key: str) -> list[Curve]:
        return [curve(part.look, [run.lines for run in found], key) for part, found in drawn[panel]]

    if search.name == "initialization":
        caption += " N is the initial count; clusters without members are updated as well where nothing else is said."
        losses = {panel: curves(panel, "loss") for panel in drawn}
        return draw_losses(losses, "Initial counts and empty clusters", caption)
    levels = {"": "perplexity"}
    if configs[0]["model"] == "vqvae2":
        levels = {"top codes": "perplexity_0", "bottom codes": "perplexity_1"}
    caption += " Perplexity is over all tokens of the validation images (the paper's is over those of a batch)."
    codes = configs[0]["codebook_size"]
    perplexities = {label: curves("", key) for label, key in levels.items()}
    return draw_perplexities(perplexities, codes, "Codes in use over training", caption)


def _pictures(search: Search, parts: Sequence[Part], images: Images) -> Any:
    """Pictures of the models of the first seed of which all are there."""
    seed, runs = search.of_one_seed(parts)
    check_alike(runs.values())
    models = {name: load(run) for name, run in runs.items()}
    config, model = next(iter(runs.values())).config, next(iter(models.values()))
    setting = _setting(config, search.dataset)
    if search.name == SCALE_MAP:
        taken = images.take(ALL_IMAGES, model, config)
        caption = f"{setting}, seed {seed}; KSOM with the recommended schedule. Use is over {len(taken):,} images."
        return draw_scale_map(models, {name: token_counts(m, taken) for name, m in models.items()}, caption)
    caption = f"{setting}, seed {seed}; KSOM with a hard 2-D neighborhood, τ = 0.1."
    if search.name == "map":
        return draw_map(models, caption)
    if search.name == "maps2":
        return draw_maps2(models, f"{caption} Places on a map are (row, column).")
    levels = len(model.quantizers)
    number = (3 if levels == 1 else 1) if search.name == "shifts-wide" else (4 if levels == 1 else 2)
    caption += (
        f" The first validation image{'s' * (number > 1)}; moved by +1, every token becomes the code one place further "
        "along each axis of the map, and those at its border stay."
    )
    return draw_shifts(
        models, images.take(number, model, config), WIDE if search.name == "shifts-wide" else NEAR, caption
    )


def _measure(search: Search, parts: Sequence[Part], images: Images) -> tuple[list[Measured], str]:
    """The measures of every model there is, over the same images."""
    runs = [(part, run) for part in parts for run in search.runs(part, search.number(part))]
    check_alike(run for _, run in runs)
    console = Console(stderr=True)
    measured: list[Measured] = []
    taken: Tensor | None = None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(search.name, total=None)
        for number, (part, run) in enumerate(runs):
            model, config = load(run), run.config
            if taken is None:
                most = PIXELS[model.mean_C11.device.type] // model.image_size**2
                taken = images.take(max(1, min(MOST_IMAGES, most)), model, config)
                steps = len(batches(taken)) * len(level_choices(model)) * len(WIDE)
                progress.update(task, total=len(runs) * (steps if search.name == "shift-psnr" else 1))
            facts = {"dataset": search.dataset, "steps": config["steps"], "seed": config["seed"], "run": config["id"]}
            results: Any
            if search.name == "shift-psnr":
                results = shift_scores(model, taken, WIDE, lambda: progress.advance(task))
            else:
                results = topographies(model, taken)
                progress.update(task, completed=number + 1)
            measured.append(Measured(part.look.label, facts, results))
    assert taken is not None
    counts = {m.method: sum(other.method == m.method for other in measured) for m in measured}
    seeds = ", ".join(f"{name} {_seeds(number)}" for name, number in counts.items())
    if len(set(counts.values())) == 1:
        seeds = f"{_seeds(next(iter(counts.values())))} a method"
    setting = _setting(runs[0][1].config, search.dataset)
    caption = f"{setting}, {seeds}; over {len(taken):,} validation images. "
    if search.name == "shift-psnr":
        caption += "Against the reconstruction there is no number at 0, where the two are the same image."
    else:
        caption += "Neighbors are the eight places around one; dotted: what codes in no order would have."
    return measured, caption


def _seeds(number: int) -> str:
    return f"{number} seeds" if number > 1 else "one seed"


def _setting(config: dict[str, Any], dataset: str) -> str:
    """What was trained, in words, and where that is not what the paper trained."""
    model = {"vqvae": "VQ-VAE", "vqvae2": "VQ-VAE-2"}[config["model"]]
    images, batch = config.get("source_train_images") or 0, config["batch_size"]
    steps, usual = config["steps"], SETTINGS[dataset].batch_size
    quick = dataset == QUICK
    words = [f"{model} on {config['data']}", f"{config['codebook_size']:,} codes"]
    if images and other_data(dataset, images):
        words.append(f"{images:,} training images (the paper has about {IMAGES[dataset]:,})")
    words.append(f"{steps:,} steps" + f" (the paper {PAPER_STEPS:,})" * (steps != PAPER_STEPS and not quick))
    if batch != usual:
        words.append(f"batches of {batch:,}" + f" (the paper {usual:,})" * (not quick))
    return ", ".join(words)
