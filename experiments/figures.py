"""The figures as data: which runs each is drawn from, and the drawing.

Curves are drawn from records alone, wherever they lie; pictures and measures need the models in the runs' folder.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from experiments.courses import draw_course
from experiments.parts import FROM_RECORDS, TRACED, Part, Search
from experiments.pictures import (
    NEAR,
    WIDE,
    batches,
    draw_map,
    draw_maps2,
    draw_scale_map,
    draw_shifts,
    level_choices,
    shift_scores,
    token_counts,
    topographies,
)
from experiments.plots import (
    Curve,
    Look,
    Measured,
    curve,
    draw_losses,
    draw_neighborhoods,
    draw_perplexities,
    draw_shift_scores,
    draw_topography,
    save,
)
from experiments.runs import Images, Record, Records, check_alike, load
from experiments.specs import (
    BLOCKS,
    IMAGES,
    PAPER_STEPS,
    QUICK,
    SCALE,
    SETTINGS,
    Blocks,
    Cell,
    Options,
    blocks_of,
    cells,
    once,
    other_data,
)
from topovq.storage import write_atomic
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig
from topovq.view.pictures import COLORS

FIGURES = {
    "initialization": "validation loss for both initial counts, with and without updates of empty clusters",
    "perplexity": "perplexity over training, EMA-VQ and KSOM",
    "early": "training loss of the first 1,500 steps for both initial counts, EMA-VQ",
    "utilization": "perplexity of single training batches, EMA-VQ and KSOM",
    "neighborhoods": "the neighborhoods on a map and how they shrink (needs no runs)",
    "map": "the codebook map of a VQ-VAE, KSOM and EMA-VQ side by side",
    "maps2": "the codebook maps of a VQ-VAE-2, the other level held at one code",
    "shifts": "images decoded from tokens moved by -3 to 3 places, KSOM above EMA-VQ",
    "shifts-wide": "the same from -10 to 10",
    "shift-psnr": "measured: PSNR of images decoded from moved tokens over the offset",
    "topography": "measured: topographic error, and the distance of neighboring codes over that of any two",
    "scale-map": "of the study `scale`: a map of 16,384 codes, and how often each is used, KSOM and EMA-VQ",
}
MEASURED = ("shift-psnr", "topography")
BLUE, VIOLET, GRAY, YELLOW = "#3f6fb5", "#7a4fa3", "#8c8c8c", "#c9a227"
SCALE_MAP = "scale-map"
MAPPED = 16_384  # codes of the largest map that is drawn: 128 x 128
# Pixels of the images that measures are taken over: at 256x256, 32 images (two minutes on two cores) or 512.
PIXELS = {"cpu": 2**21, "cuda": 2**25}
MOST_IMAGES = 1_024
ALL_IMAGES = 10_000  # that use is counted over, if there are so many


def figures_of(dataset: str) -> list[str]:
    """The paper's figures that can be drawn for a data set: its models have one level or two."""
    check_name("data set of the figures", dataset, SETTINGS)
    other = "map" if SETTINGS[dataset].model == "vqvae2" else "maps2"
    return [name for name in FIGURES if name != SCALE_MAP and (name != other or dataset == QUICK)]


def panels(name: str, dataset: str, blocks: Blocks | None = None) -> dict[str, list[Part]]:
    """The parts of a figure, panel by panel."""
    blocks = blocks_of("main", dataset, blocks)
    check_name("figure", name, FIGURES)
    if name == SCALE_MAP:
        known = {cell.codebook_size or 0 for cell in cells(SCALE, dataset)}
        size = max(size for size in known if size <= MAPPED)
        of_method = {cell.method: cell for cell in cells(SCALE, dataset, [size])}
        looks = {"ksom": "KSOM", "ema": "EMA-VQ"}
        return {"": [Part(Look(label, COLORS[label]), of_method[method]) for method, label in looks.items()]}
    if name not in figures_of(dataset):
        levels = "two levels of a VQ-VAE-2" if name == "maps2" else "one level of a VQ-VAE"
        has = ", ".join(other for other in SETTINGS if name in figures_of(other))
        raise ValueError(f"the figure {name!r} shows the {levels}: dataset={dataset!r} must be one of {has}")
    if name == "neighborhoods":
        return {}
    if name == "initialization":
        return {
            "EMA-VQ": _initializations(dataset, "ema", blocks),
            "KSOM, hard": _initializations(dataset, "ksom", blocks),
        }
    twins = [
        Part(Look("KSOM", COLORS["KSOM"]), _cell(dataset, "ksom", blocks)),
        Part(Look("EMA-VQ", COLORS["EMA-VQ"]), _cell(dataset, "ema", blocks)),
    ]
    if name == "early":
        zero = _cell(dataset, "ema", blocks, "0")
        return {"": [replace(twins[1], look=Look("N = 1", COLORS["EMA-VQ"])), Part(Look("N = 0", BLUE), zero)]}
    if name in ("perplexity", "utilization"):
        others = {"gaussian": BLUE, "exponential": VIOLET}
        ksom, ema = twins
        others_parts = [
            Part(Look(f"KSOM, {kind}", color), replace(ksom.cell, neighborhood=kind)) for kind, color in others.items()
        ]
        return {"": [ema, replace(ksom, look=Look("KSOM, hard", COLORS["KSOM"])), *others_parts]}
    return {"": [replace(part, two_levels=name == "maps2" and dataset == QUICK) for part in twins]}


def _initializations(dataset: str, method: str, blocks: Blocks) -> list[Part]:
    """The four ways to start and to update; EMA-VQ's with N = 0 a second time, since there seeds differ."""
    parts = [Part(Look("N = 1", COLORS["EMA-VQ" if method == "ema" else "KSOM"]), _cell(dataset, method, blocks))]
    zero = _cell(dataset, method, blocks, "0")
    if method == "ema":
        parts += [Part(Look("N = 0", BLUE), zero), Part(Look("N = 0, other seeds", VIOLET), zero, second=True)]
    else:
        parts.append(Part(Look("N = 0", BLUE), zero))
    for count, color in (("1", YELLOW), ("0", GRAY)):
        parts.append(
            Part(Look(f"N = {count}, empty not updated", color, "--"), _cell(dataset, method, blocks, count, "no"))
        )
    return parts


def _cell(dataset: str, method: str, blocks: Blocks, count_init: str = "1", update_empty: str = "yes") -> Cell:
    """EMA-VQ, or the paper's KSOM: hard, 2-D, tau 0.1."""
    place = ("none", "", "") if method == "ema" else ("hard", "2", "0.1")
    return Cell("main", dataset, method, *place, count_init, update_empty, blocks=blocks)


def needs(name: str, options: Options) -> list[TrainConfig]:
    """The runs that a figure is drawn from, each once: curves of as many seeds as the tables, pictures of one."""
    if name in TRACED:
        return []  # of paper_run.py
    number = options.seeds_of("main") if name in FROM_RECORDS else 1
    if name in MEASURED and options.seeds is not None:
        number = options.seeds
    return once(
        part.config(seed, options.steps, options.data_path, options.batch_size)
        for parts in panels(name, options.dataset, options.blocks).values()
        for part in parts
        for seed in part.seeds(number)
    )


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


def write_rows(measured: Sequence[Measured], path: Path) -> Path:
    """One row a result, numbers in full; infinity is `inf`."""
    rows = [{"method": m.method, **m.facts, **asdict(result)} for m in measured for result in m.results]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, buffer.getvalue().encode())
    return path


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
