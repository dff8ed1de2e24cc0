"""`write_report`: runs on one HTML page that needs nothing but itself: no script, no network.

The HTML is written by hand: one page is no reason for a template language.
"""

from __future__ import annotations

import html
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from topovq.drawing import draw, enlarge
from topovq.metrics import neighbor_distances, psnr, ssim, usage
from topovq.storage import write_atomic
from topovq.tokenizer.atlas import map_picture
from topovq.view.report.curves import curves, legend
from topovq.view.report.images import colored, data_uri, sheet
from topovq.view.report.study import Study, study

REPORT_FILE = "report.html"
DEMO_FILE, DEMO_LINK = "index.html", "The demo: both runs side by side"  # beside the runs of `topovq demo`
GENERATOR = '<meta name="generator" content="topovq">'
EXPLORER, EXPLORED = "http://127.0.0.1:8765/", 2  # where `topovq explore` listens, and how many runs it shows
PICTURE_BYTES = 3_300_000  # of all pictures together, before base64 makes them a third longer: a page is below 5 MB
PAIRS, STRIPS = 8, 4  # images shown with their reconstructions, and with their tokens moved
OFFSETS = range(-3, 4)
CURVES = {"validation loss": "loss", "training loss": "train_loss", "perplexity": "perplexity", "usage": "usage"}
USAGE = "Usage is the share of the codes that are chosen at least once in so many tokens."


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of one or several runs (folders) to `out`, whole or not at all; returns its path."""
    if not runs:
        raise ValueError("a report needs at least one run")
    names = [Path(run).resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    studies = [study(run, name) for run, name in zip(runs, names)]
    return write_page(studies, Path(out), " and ".join(names), links=_pages_beside(studies, Path(out)))


def write_page(
    studies: Sequence[Study], out: Path, title: str, introduction: str = "", links: Sequence[tuple[str, Path]] = ()
) -> Path:
    """Write the page of runs that were looked at already.

    introduction  a paragraph to begin with
    links         other pages, (what it says, where it is)
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, _render(studies, out, title, introduction, links).encode())
    return out


def _pages_beside(studies: Sequence[Study], out: Path) -> list[tuple[str, Path]]:
    """The pages there are of these runs, but for `out`: a demo's, and each run's own."""
    pages = {s.folder.parent / DEMO_FILE: DEMO_LINK for s in studies}
    pages |= {s.folder / REPORT_FILE: f"The report of {s.name}" for s in studies}
    others = {page: text for page, text in pages.items() if page.is_file() and page.resolve() != out.resolve()}
    return [(text, page) for page, text in others.items() if GENERATOR in page.read_text()]


def _render(
    studies: Sequence[Study], out: Path, title: str, introduction: str, links: Sequence[tuple[str, Path]]
) -> str:
    pictures = sum(2 + len(s.maps) * 3 + len(list(_moves(s))) for s in studies)
    budget = PICTURE_BYTES // pictures
    sections = [
        _learning(studies),
        *(_maps(s, budget) for s in studies),
        *(_reconstructions(s, budget) for s in studies),
        *(_shifts(s, budget) for s in studies if s.maps),
        _configuration(studies),
    ]
    return document(title, sections, introduction, _navigation(studies, out, links))


def document(title: str, sections: Sequence[str], introduction: str = "", navigation: str = "") -> str:
    """A page of these sections, all HTML, with its style inside."""
    style = (Path(__file__).parent / "style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{GENERATOR}\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}: report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{text(title)}</h1>\n"
        + f"<p>{text(introduction)}</p>\n" * bool(introduction)
        + navigation
        + "</header>\n<main>\n"
        + "\n".join(f"<section>\n{section}\n</section>" for section in sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _navigation(studies: Sequence[Study], out: Path, links: Sequence[tuple[str, Path]]) -> str:
    """Links to other pages, and how to open the runs in the explorer."""
    items = []
    for said, page in links:
        address = quote(os.path.relpath(page.resolve(), out.parent.resolve()))
        items.append(f'<li><a href="{text(address)}">{text(said)}</a></li>')
    shown = [s for s in studies if s.maps][:EXPLORED]
    if shown:
        command = shlex.join(["topovq", "explore", *(str(s.folder.resolve()) for s in shown)])
        items.append(
            f'<li>Move tokens yourself: run <code>{text(command)}</code>, then open <a href="{EXPLORER}">the explorer'
            "</a></li>"
        )
    return f'<nav aria-label="Other pages"><ul>{"".join(items)}</ul></nav>\n' if items else ""


def _learning(studies: Sequence[Study]) -> str:
    rows = "".join(f'<tr><th scope="row">{text(s.name)}</th>{_figures(s)}</tr>' for s in studies)
    columns = ("run", "steps", "validation loss", "best", "PSNR", "perplexity", "usage")
    head = "<tr>" + "".join(f'<th scope="col">{column}</th>' for column in columns) + "</tr>"
    parts = [scroller("Figures of the last validation", f"<table>{head}{rows}</table>")]
    parts += [f'<p class="note">All figures are of all validation images. {USAGE}</p>', "<h2>Learning</h2>"]
    recorded = [s for s in studies if s.validations]
    for s in studies:
        if not s.validations:
            parts.append(f'<p class="note">{text(s.name)} has no record of validations, so no curves.</p>')
    if recorded:
        charts = [
            curves(title, [(s.name, s.curve(key)) for s in recorded], key == "usage")
            for title, key in CURVES.items()
            if any(key in v for s in recorded for v in s.validations)  # older records have no training loss
        ]
        parts += [legend([s.name for s in recorded]), f'<div class="row">{"".join(charts)}</div>']
    return "\n".join(parts)


def _figures(s: Study) -> str:
    if not s.validations:
        return '<td colspan="6">not recorded</td>'
    last = s.validations[-1]
    best = min((v["loss"] for v in s.validations if v["loss"] is not None), default=None)
    shown = [f"{last['step']:,}", _number(last["loss"], ".5f"), _number(best, ".5f")]
    shown += [f"{_number(last['psnr'], '.2f')} dB", _number(last["perplexity"], ".1f")]
    shown.append(_number(last["usage"], ".1%") + (f" of {last['tokens']:,} tokens" if "tokens" in last else ""))
    return "".join(f'<td class="n">{figure}</td>' for figure in shown)


def _maps(s: Study, budget: int) -> str:
    parts = [f"<h2>{text(s.name)}: the map</h2>"]
    if not s.maps:
        kind = text(s.model.config["quantizer"])
        return parts[0] + f'\n<p class="note">The codes of quantizer {kind} have no places, so there is no map.</p>'
    parts.append(f'<p class="note">Hits are counted over {len(s.images_BCHW):,} {text(s.source)}. {USAGE}</p>')
    for which, chart in enumerate(s.maps):
        grid, hits_K = chart.grid, s.hits[which]
        apart_K = neighbor_distances(chart.codes_KD, grid).numpy()
        cell = max(1, min(24 if grid.topology == "hexagonal" else 8, 1024 // max(grid.shape)))
        of_distance = draw(enlarge(colored(apart_K, "magma"), cell), grid)
        of_hits = draw(enlarge(colored(np.log1p(hits_K.numpy()), "viridis"), cell), grid)
        shape = " x ".join(map(str, grid.shape))
        used = f"{int((hits_K > 0).sum()):,} of {grid.size:,} codes in {int(hits_K.sum()):,} tokens"
        if len(s.maps) > 1:
            parts.append(f"<h3>{text(chart.name)}</h3>")
        others = ", the other maps at their most used code" if len(s.maps) > 1 else ""
        captions = {
            f"Every code decoded, at its place on the {shape} {grid.topology} map{others}": map_picture(
                s.model, s.maps, which, s.usual
            ),
            f"U-matrix: mean distance to the codes next door, {apart_K.min():.3g} (dark) to {apart_K.max():.3g} "
            "(bright)": of_distance,
            f"Hits: usage {float(usage(hits_K)):.1%}, {used}; the most used code {int(hits_K.max()):,} times (bright; "
            "logarithmic)": of_hits,
        }
        figures = "".join(figure(picture, caption, budget) for caption, picture in captions.items())
        parts.append(f'<div class="row">{figures}</div>')
    return "\n".join(parts)


def _reconstructions(s: Study, budget: int) -> str:
    images = s.images_BCHW[_spread(len(s.images_BCHW), PAIRS)]
    decoded = s.decode(s.encode(images))
    scores = zip([psnr(a, b) for a, b in zip(decoded, images)], ssim(decoded, images).tolist())
    pairs = "".join(
        figure(sheet([[image, ours]]), f"{_number(p, '.1f')} dB, SSIM {q:.3f}", budget // PAIRS)
        for image, ours, (p, q) in zip(images, decoded, scores)
    )
    return (
        f"<h2>{text(s.name)}: originals and reconstructions</h2>\n"
        f'<p class="note">Left the original, right what its tokens decode to; {text(s.source)}.</p>\n'
        f'<div class="pairs">{pairs}</div>'
    )


def _moves(s: Study) -> Iterator[tuple[str, list[int]]]:
    """Which maps' tokens are moved in a strip: all, and where there are several levels each level alone."""
    everything = list(range(len(s.maps)))
    yield "all tokens", everything
    levels = sorted({chart.level for chart in s.maps})
    if len(levels) > 1:
        for level in levels:
            own = [number for number in everything if s.maps[number].level == level]
            yield f"tokens of {s.maps[own[0]].name.partition(',')[0]} alone", own


def _shifts(s: Study, budget: int) -> str:
    planes = s.encode(s.images_BCHW[_spread(len(s.images_BCHW), STRIPS)])
    parts = [f"<h2>{text(s.name)}: tokens moved on the map</h2>"]
    parts.append(
        f'<p class="note">Each row is an image; in the middle its tokens as they are, to the sides moved by '
        f"{OFFSETS[0]:+d} to {OFFSETS[-1]:+d} places along every axis of the map. Where the map is ordered, "
        "the image changes gently.</p>"
    )
    for label, moved in _moves(s):
        columns = []
        for offset in OFFSETS:
            offsets = s.nowhere()
            for number in moved:
                offsets[number] = (offset,) * s.maps[number].grid.ndim
            columns.append(s.decode(s.shift(planes, offsets)))
        rows = torch.stack(columns, 1)
        parts.append(f'<div class="strip">{figure(sheet([list(row) for row in rows]), label, budget)}</div>')
    return "\n".join(parts)


def _configuration(studies: Sequence[Study]) -> str:
    configs = [s.config or s.model.config for s in studies]
    names = [name for name in dict.fromkeys(name for config in configs for name in config) if name != "event"]
    rows = []
    for name in names:
        values = [config.get(name) for config in configs]
        differs = ' class="differs"' if any(value != values[0] for value in values) else ""
        cells = "".join(f"<td>{text(_plain(value))}</td>" for value in values)
        rows.append(f'<tr{differs}><th scope="row">{text(name)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{text(s.name)}</th>' for s in studies)
    shaded = " Rows that differ are shaded." if len(studies) > 1 else ""
    table = f"<table><tr><td></td>{head}</tr>{''.join(rows)}</table>"
    return (
        "<details>\n<summary><h2>Configuration, versions, hardware</h2></summary>\n"
        f'<p class="note">As the record has it, or where there is none the model.{shaded}</p>\n'
        f"{scroller('Configuration', table)}\n</details>"
    )


def scroller(label: str, content: str) -> str:
    """What may be wider than the page: it scrolls by itself, with the keyboard, too."""
    return f'<div class="wide" role="region" aria-label="{text(label)}" tabindex="0">{content}</div>'


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return "–" if value is None else str(value)


def _spread(number: int, wanted: int) -> Tensor:
    """Up to `wanted` of the images 0..number-1, evenly spaced."""
    return torch.linspace(0, number - 1, min(wanted, number)).long()


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format(value, form)


def figure(pixels: np.ndarray, caption: str, budget: int) -> str:
    """A picture of at most `budget` bytes with its caption, which is its text as well."""
    said = text(caption)
    return f'<figure><img alt="{said}" src="{data_uri(pixels, budget)}"><figcaption>{said}</figcaption></figure>'


def text(value: object) -> str:
    """A value as text of a page."""
    return html.escape(str(value))
