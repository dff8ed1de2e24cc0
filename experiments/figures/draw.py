"""Drawing a figure: curves from records, pictures and measures from models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from experiments.figures.curves import Curve, course, curve, draw_losses, draw_perplexities
from experiments.figures.measures import (
    NEAR,
    WIDE,
    Measured,
    batches,
    draw_shift_scores,
    draw_topography,
    level_choices,
    shift_scores,
    topographies,
    write_rows,
)
from experiments.figures.neighborhoods import draw_neighborhoods
from experiments.figures.parts import FROM_RECORDS, MEASURED, MOST_SEEDS, SCALE_MAP, TRACED, Part, Search, panels
from experiments.figures.pictures import draw_map, draw_maps2, draw_scale_map, draw_shifts, token_counts
from experiments.figures.style import save
from experiments.records import Record, Records, check_alike
from experiments.runs import Images, load
from experiments.specs import BLOCKS, IMAGES, PAPER_STEPS, QUICK, SETTINGS, Options, other_data
from topovq.tokenizer.data import Source

# Pixels of the images that measures are taken over: at 256x256, 32 images (two minutes on two cores) or 512.
PIXELS = {"cpu": 2**21, "cuda": 2**25}
MOST_IMAGES = 1_024
ALL_IMAGES = 10_000  # that use is counted over, if there are so many
EARLY = 1_500  # steps of the early figure, as the authors'
LEVELS = {1: ("",), 2: ("top codes", "bottom codes")}


def draw(name: str, options: Options, source: Source | None = None) -> list[Path]:
    """Draw a figure into OUT/NAME-DATASET.png and .svg, a measured one also into .csv; the files written.

    Models are looked for in the folder of runs alone, records also in the folders of records. A curve or measure is of
    exactly as many seeds as were asked for, else of as many as there are. `source` is where images come from, if not
    from the data set that the record names. What is missing is a FileNotFoundError that names the run and the command
    that makes it; a partial figure leaves curves out and says so.
    """
    out, file = options.out, f"{name}-{options.dataset}"
    if name == "neighborhoods":
        return save(draw_neighborhoods(), out, name)
    folders = (options.runs, *options.records) if name in (*FROM_RECORDS, *TRACED) else (options.runs,)
    search = Search(name, options, folders, Records(folders))
    if name in TRACED:
        return save(draw_course(search, panels(name, options.dataset, options.blocks)[""]), out, file)
    parts = _panels(search)
    if name in FROM_RECORDS:
        return save(_curves(search, parts), out, file)
    images = Images(source, options.data_path)
    if name in MEASURED:
        measured, caption = _measure(search, parts[""], images)
        plot = draw_shift_scores if name == "shift-psnr" else draw_topography
        return [*save(plot(measured, caption), out, file), write_rows(measured, out / f"{file}.csv")]
    return save(_pictures(search, parts[""], images), out, file)


def _panels(search: Search) -> dict[str, list[Part]]:
    """The figure's parts, with the first of the residual blocks of which there is a run of every part."""
    options = search.options
    for blocks in BLOCKS if options.blocks is None and options.render_only else ():
        found = panels(search.name, options.dataset, blocks)
        if all(part.second or search.number(part) for parts in found.values() for part in parts):
            return found
    return panels(search.name, options.dataset, options.blocks)


def _curves(search: Search, of_panel: dict[str, list[Part]]) -> Any:
    """Losses, or perplexities: of two levels a panel each."""
    drawn: dict[str, list[tuple[Part, list[Record]]]] = {}
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
    caption = _setting(configs[0], search.options.dataset)
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


# Single training batches, from the `trace` lines of records


def draw_course(search: Search, parts: Sequence[Part]) -> Any:
    """The figure `early` or `utilization`, of every seed whose record has the course of its training."""
    every = {part.look: [search.find(part, seed) for seed in range(MOST_SEEDS)] for part in parts}
    found = {look: [run for run in runs if run is not None and run.traces()] for look, runs in every.items()}
    lacking = [look.label for look, runs in found.items() if not runs]
    if lacking:
        raise FileNotFoundError(
            f"the figure {search.name!r} needs records that tell of single batches, and there is none of "
            f"{', '.join(lacking)}; `python -m experiments.paper.run --only main early` trains such runs"
        )
    first = next(iter(found.values()))[0]
    trace = first.traces()[0]
    caption = f"VQ-VAE on {first.config['data']}, every {trace['every']} steps, one batch a point."
    if search.name == "early":
        curves = [course(look, runs, None, EARLY) for look, runs in found.items()]
        return draw_losses({"": curves}, "The first steps", f"{caption} N is the initial count.", "training")
    levels = LEVELS[len(trace["perplexities"])]
    panels = {name: [course(look, runs, i) for look, runs in found.items()] for i, name in enumerate(levels)}
    return draw_perplexities(panels, first.config["codebook_size"], "Codes in use in training batches", caption)


# Models


def _pictures(search: Search, parts: Sequence[Part], images: Images) -> Any:
    """Pictures of the models of the first seed of which all are there."""
    seed, runs = search.of_one_seed(parts)
    check_alike(runs.values())
    models = {name: load(run) for name, run in runs.items()}
    config, model = next(iter(runs.values())).config, next(iter(models.values()))
    setting = _setting(config, search.options.dataset)
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
            facts = {
                "dataset": search.options.dataset,
                "steps": config["steps"],
                "seed": config["seed"],
                "run": config["id"],
            }
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
    setting = _setting(runs[0][1].config, search.options.dataset)
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
    if not quick and config["model_options"].get("residual") != "activated":
        words.append("plain residual blocks (not the authors')")
    if images and other_data(dataset, images):
        words.append(f"{images:,} training images (the paper has about {IMAGES[dataset]:,})")
    words.append(f"{steps:,} steps" + f" (the paper {PAPER_STEPS:,})" * (steps != PAPER_STEPS and not quick))
    if batch != usual:
        words.append(f"batches of {batch:,}" + f" (the paper {usual:,})" * (not quick))
    return ", ".join(words)
