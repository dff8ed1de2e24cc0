"""The study `scale` as a picture: loss, and the share of codes in use, over the size of the codebook."""

from __future__ import annotations

from typing import Any

from topovq.pictures import COLORS
from topovq.studies.canvas import canvas, style
from topovq.studies.sheet import Sheet

# method -> (what the legend says, color, marker)
LOOKS = {
    "ema": ("EMA-VQ", COLORS["EMA-VQ"], "o"),
    "ksom-paper": ("KSOM, the paper's hard neighborhood", "#7cb79b", "s"),
    "ksom": ("KSOM, recommended schedule", COLORS["KSOM"], "D"),
    "vqp": ("vector-quantize-pytorch, k-means start and expiry", "#4c6fb1", "^"),
    "vqp-rotation": ("vector-quantize-pytorch, rotation trick", "#8fa8d8", "v"),
    "simvq": ("SimVQ", "#8c564b", "P"),
    "fsq": ("FSQ", "#9467bd", "X"),
    "lfq": ("LFQ", "#b0a030", "*"),
}


def draw_scale(sheet: Sheet) -> Any:
    """Two panels from the rows of the study's table: each method at the last step it was run to."""
    rows = [dict(zip(sheet.columns, row)) for row in sheet.values]
    sizes = sorted({int(row["codebook_size"]) for row in rows})
    last: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        key = row["method"], int(row["codebook_size"])
        if key not in last or int(row["steps"]) > int(last[key]["steps"]):
            last[key] = row
    seeds = sorted({int(row["n"]) for row in last.values()})
    lengths = sorted({int(row["steps"]) for row in last.values()})
    caption = (
        f"{_range(seeds)} seed{'s' * (seeds != [1])} a point, {_range(lengths)} steps; codes in use are those that "
        "occur among the tokens of the validation images."
    )
    with style():
        figure, (losses, uses) = canvas(2, "Codebooks of growing size", caption)
        for method, (label, color, marker) in LOOKS.items():
            drawn = [last[method, size] for size in sizes if (method, size) in last]
            at = [int(row["codebook_size"]) for row in drawn]
            how = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.8, "label": label, "capsize": 2}
            for ax, name in ((losses, "loss"), (uses, "codes_used_percent")):
                means = [float(row[f"{name}_mean"]) for row in drawn]
                spread = [float(row[f"{name}_std"] or 0) for row in drawn]
                if drawn:
                    ax.errorbar(at, means, spread, **how)
        for ax in (losses, uses):
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
            ax.minorticks_off()
            ax.set_xlabel("codes in the codebook")
        losses.set(ylabel="validation reconstruction loss (1e-3)", ylim=(0, None))
        uses.set(ylabel="codes in use (%)", ylim=(0, 104))
        losses.legend(loc="lower left")
    return figure


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
