"""The study `scale` as a picture: loss, and the share of codes in use, over the size of the codebook."""

from __future__ import annotations

from typing import Any

from experiments.canvas import canvas, style
from experiments.sheet import Sheet
from topovq.view.pictures import COLORS

# method -> (what the legend says, color, marker)
LOOKS = {
    "ema": ("EMA-VQ", COLORS["EMA-VQ"], "o"),
    "ksom-paper": ("KSOM as in the paper", "#7cb79b", "s"),
    "ksom": ("KSOM, recommended schedule", COLORS["KSOM"], "D"),
    "vqp": ("vector-quantize-pytorch, k-means start and expiry", "#4c6fb1", "^"),
    "vqp-rotation": ("vector-quantize-pytorch, rotation trick", "#8fa8d8", "v"),
    "simvq": ("SimVQ", "#8c564b", "P"),
    "fsq": ("FSQ", "#9467bd", "X"),
    "lfq": ("LFQ", "#b0a030", "*"),
}
LEAST = 0.1  # of the steps: before that, losses say how a method starts


def draw_scale(sheet: Sheet) -> Any:
    """Two panels from the rows of the study's table: filled where runs had all steps, hollow at an earlier step, where
    methods of which some had fewer are compared; what they were after the first LEAST of the steps is left out."""
    rows = [dict(zip(sheet.columns, row)) for row in sheet.values]
    full = max(int(row["steps"]) for row in rows)
    rows = [row for row in rows if int(row["steps"]) >= LEAST * full]
    sizes = sorted({int(row["codebook_size"]) for row in rows})
    seeds = sorted({int(row["n"]) for row in rows})
    fewer = sorted({int(row["steps"]) for row in rows} - {full}, reverse=True)
    caption = f"{_range(seeds)} seed{'s' * (seeds != [1])} a point, {full:,} steps"
    if fewer:
        caption += f"; hollow: after {' or '.join(f'{steps:,}' for steps in fewer)} steps, every method with as many"
    caption += ". Codes in use are those that occur among the tokens of the validation images."
    with style():
        figure, (losses, uses) = canvas(2, "Codebooks of growing size", caption)
        for method, (label, color, marker) in LOOKS.items():
            how = {"color": color, "marker": marker, "markersize": 5, "capsize": 2}
            for steps in (full, *fewer):
                drawn = [row for row in rows if row["method"] == method and int(row["steps"]) == steps]
                drawn.sort(key=lambda row: int(row["codebook_size"]))
                if not drawn:
                    continue
                line = {"linewidth": 1.8} if steps == full else {"linewidth": 0.9, "linestyle": "--", "mfc": "white"}
                for ax, name in ((losses, "loss"), (uses, "codes_used_percent")):
                    means = [float(row[f"{name}_mean"]) for row in drawn]
                    spread = [float(row[f"{name}_std"] or 0) for row in drawn]
                    at = [int(row["codebook_size"]) for row in drawn]
                    ax.errorbar(at, means, spread, label=label, **how, **line)
                label = "_"  # once is enough: such labels are not in a legend
        for ax in (losses, uses):
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
            ax.minorticks_off()
            ax.set_xlabel("codes in the codebook")
        losses.set(ylabel="validation reconstruction loss (1e-3)", ylim=(0, None))
        uses.set(ylabel="codes in use (%)", ylim=(0, 104))
        losses.legend(loc="lower left", labelspacing=0.25)  # below the curves
    return figure


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
