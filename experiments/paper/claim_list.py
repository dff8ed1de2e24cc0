"""What the paper claims, claim by claim, and the rule by which our figures answer (claims.py has the figures)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.paper.claims import (
    DIFFERS,
    ERRORS,
    MOST_SEEDS,
    NOT_RUN,
    SAME,
    UNKNOWN,
    Answer,
    Claim,
    Evidence,
    answers,
    authors_blocks,
    beyond,
    early,
    greater,
    joined,
    levels,
    loss,
    moved,
    perplexities,
    precision,
    smoothness,
    speedups,
    steps,
    topographic_errors,
)
from experiments.paper.groups import EMA, HARD, SHORT, TAUS, smooth_cells
from experiments.paper.table import Row
from experiments.records import Record, Records
from experiments.tables import Line

MISSING: Answer = (NOT_RUN, 0, UNKNOWN)
SIMILAR = 0.02  # losses within so much of each other are similar
PAPER_FAILS, RARE = 1 / 20, 0.05  # runs of the paper's two series that failed; what is less likely is ruled out
BASELINE, SPEED, ROBUST, MAP, BEYOND = "baseline", "speed", "robustness", "map", "beyond"


def verdict(holds: bool) -> str:
    return SAME if holds else DIFFERS


def least(rows: list[Row]) -> int:
    return min(row.n for row in rows)


def lowest_and_highest(rows: list[Row]) -> tuple[str, float]:
    """The lowest and the highest mean loss in words, and how far they are apart as a share of the lowest."""
    means = [loss(row).mean for row in rows]
    return f"{min(means):.1f} to {max(means):.1f}", max(means) / min(means) - 1


def similar(rows: list[Row]) -> Answer:
    words, apart = lowest_and_highest(rows)
    return words, least(rows), verdict(apart < SIMILAR)


# EMA-VQ alone


def fails_from_0(e: Evidence) -> Answer:
    """So few runs without a failure do not tell where one in twenty fails."""
    zero = early(e)[1]
    failed, n = zero["failed"], zero["n"]
    without = DIFFERS if (1 - PAPER_FAILS) ** n < RARE else UNKNOWN
    return f"{failed} of {n} runs fail", n, SAME if failed else without


def later_from_0(e: Evidence) -> Answer:
    rows = [e.row("sensitivity", count_init=count, update_empty="yes") for count in ("0", "1")]
    zero, one = (steps(row, 1.1) for row in rows)
    return f"{fmean(zero):.1f} and {fmean(one):.1f}", least(rows), greater(zero, one)


def steady_from_1(e: Evidence) -> Answer:
    row = e.row("sensitivity", count_init="1", update_empty="yes")
    return loss(row).show(2), row.n, verdict((loss(row).std or 0) < SIMILAR * loss(row).mean)


def needs_updates(e: Evidence) -> Answer:
    good = loss(e.row("sensitivity", count_init="1", update_empty="yes")).mean
    rows = [e.row("sensitivity", count_init=count, update_empty="no") for count in ("0", "1")]
    means = [loss(row).mean for row in rows]
    return f"{means[0]:.1f} and {means[1]:.1f}", least(rows), verdict(min(means) > 1.2 * good)


def steps_of_the_collapsed(e: Evidence) -> Answer:
    row = e.row("sensitivity", count_init="0", update_empty="no")
    ours, paper = row.ours()["steps10"], row.paper()["steps10"]
    assert ours is not None
    assert paper is not None
    apart = ours.standard_errors_from(paper)
    return ours.show(1), row.n, UNKNOWN if apart is None else verdict(abs(apart) <= ERRORS)


# Loss and speed


def losses_alike(e: Evidence) -> Answer:
    return similar(e.rows("main"))


def saved(percent: int) -> Any:
    """KSOM, hard, against EMA-VQ."""

    def answer(e: Evidence) -> Answer:
        (line,) = [x for x in speedups(e) if (x["neighborhood"], x["within_percent"]) == ("hard", percent)]
        low, high = line["low_percent"], line["high_percent"]
        words = f"{line['saved_percent']:.0f}% ({low:.0f} to {high:.0f})"
        if percent == 20:
            return words, line["n"], SAME if low > 0 else DIFFERS if high < 0 else UNKNOWN
        return words, line["n"], SAME if high < 5 else DIFFERS if low > 5 else UNKNOWN

    return answer


def at_256(dataset: str, words: str, read: Callable[[Record], float], holds: Callable[..., bool], **start: str) -> Any:
    """A claim on data of which we have less, where what does not hold proves nothing.

    `words` has the means of KSOM and of EMA-VQ, of what is `read` of each run.
    """

    def answer(e: Evidence) -> Answer:
        for blocks, length, said in ((EMA.blocks, {}, "fewer images"), ("plain", SHORT, "fewer images, short runs")):
            here = [replace(cell, dataset=dataset, blocks=blocks, **start) for cell in (HARD, EMA)]  # type: ignore[arg-type]
            ksom, ema = ([read(run) for run in e.runs(cell, MOST_SEEDS, **length)] for cell in here)
            if ksom and ema:
                ours = f"{words.format(fmean(ksom), fmean(ema))}, {said}"
                return ours, min(len(ksom), len(ema)), SAME if holds(ksom, ema) else UNKNOWN
        return MISSING

    return answer


def best(run: Record) -> float:
    return 1e3 * run.best


def last_top(run: Record) -> float:
    """Perplexity of the top level at the last step."""
    return float(run.validations()[-1]["perplexity_0"])


faces_better = at_256("faces", "{:.2f} and {:.2f}", best, lambda ksom, ema: greater(ema, ksom) == SAME)
faces_top = at_256("faces", "{:.0f} and {:.0f}", last_top, lambda ksom, ema: fmean(ksom) > 300 and fmean(ema) < 100)


def robust_at_256(dataset: str) -> Any:
    """With counts from 0 and no updates of empty clusters."""
    worst = {"count_init": "0", "update_empty": "no"}
    return at_256(dataset, "{:.2f} against {:.2f}", best, lambda ksom, ema: fmean(ksom) < 0.9 * fmean(ema), **worst)


# Robustness


def ksom_everywhere(kind: str) -> Any:
    def answer(e: Evidence) -> Answer:
        rows = e.rows("robustness", neighborhood=kind)
        rows += [
            row for blocks in {row.cell.blocks for row in rows} for row in e.rows("main", blocks, neighborhood=kind)
        ]
        return similar(rows) if len(rows) == 4 else MISSING

    return answer


def sooner_everywhere(e: Evidence) -> Answer:
    words, verdicts, n = [], [], 99
    for count, update in (("0", "no"), ("1", "no"), ("0", "yes")):
        rows = [
            e.row("robustness", neighborhood=kind, count_init=count, update_empty=update) for kind in ("none", "hard")
        ]
        ema, ksom = (steps(row, 1.1) for row in rows)
        words.append(f"{fmean(ksom):.1f} against {fmean(ema):.1f}")
        verdicts.append(greater(ema, ksom))
        n = min(n, least(rows))
    return "; ".join(words), n, joined(verdicts)


# The map


def smaller_tau(e: Evidence) -> Answer:
    of_tau = {cell.tau: topographic_errors(e, cell) for cell in smooth_cells(["hard"]) if cell.grid_dim == "2"}
    if not all(of_tau.values()):
        return MISSING
    words = ", ".join(f"{fmean(of_tau[tau]):.0%}" for tau in TAUS)
    return words, min(map(len, of_tau.values())), joined(greater(of_tau["1"], of_tau[tau]) for tau in TAUS[1:])


def moved_tokens(e: Evidence) -> Answer:
    lines = {(line["method"], line["by"]): line for line in moved(e) if line["places"] == 1}
    if len(lines) < 4:
        return MISSING
    ksom, ema, index = (lines[key]["psnr"] for key in (("ksom", "grid"), ("ema", "grid"), ("ema", "index")))
    words = f"{ksom:.1f} dB; EMA-VQ {ema:.1f} on the grid, {index:.1f} by index"
    return words, min(line["n"] for line in lines.values()), verdict(ksom > max(ema, index) + 3)


def in_use(e: Evidence) -> Answer:
    """The mean over the first, and over the last thousand steps of each run."""
    rows = [e.row("main", method="ema"), e.row("main", neighborhood="hard")]
    found = [[[fmean(_thousands(run)[place]) for run in row.runs] for row in rows] for place in (0, -1)]
    words = [f"{fmean(ksom):.0f} against {fmean(ema):.0f}" for ema, ksom in found]
    verdicts = [greater(ksom, ema) for ema, ksom in found]
    return f"{words[0]} at first, {words[1]} at the end", least(rows), joined(verdicts)


def _thousands(run: Record) -> list[list[float]]:
    """The run's perplexities, a list for each thousand steps."""
    values = perplexities(run)
    each = max(1, 1_000 * len(values) // run.config["steps"])
    return [values[first : first + each] for first in range(0, len(values), each)]


# The appendix, and what the paper names without a figure


def ablation_alike(e: Evidence) -> Answer:
    return similar([row for row in e.rows("ablation") if row.cell.paper])


def gradient_worse(e: Evidence) -> Answer:
    rows = [e.row("gradient", method=name) for name in ("gradient", "ema")]
    gradient, ema = (loss(row).mean for row in rows)
    return f"{gradient:.1f} and {ema:.1f}", least(rows), verdict(gradient > 1.1 * ema)


def som_vae_slower(e: Evidence) -> Answer:
    rows = [*e.rows("gradient", method="som-vae"), *e.rows("gradient", method="ksom")]
    if len(rows) < 2:
        return MISSING
    som, ksom = (steps(row, 1.1) for row in rows)
    verdicts = [similar(rows)[2], greater(som, ksom)]
    return f"{fmean(som):.1f} and {fmean(ksom):.1f}", least(rows), joined(verdicts)


def softmax_fails(e: Evidence) -> Answer:
    lines = {line["method"]: line for line in beyond(e)}
    soft = [line for name, line in lines.items() if name.startswith("soft")]
    if not soft:
        return MISSING
    best, usual = min(line["loss_mean"] for line in soft), lines["hard"]["loss_mean"]
    return f"{best:.1f}, KSOM {usual:.1f}", min(line["n"] for line in soft), verdict(best > 1.1 * usual)


def neural_gas(e: Evidence) -> Answer:
    lines = {line["method"]: line for line in beyond(e)}
    if "gas" not in lines:
        return MISSING
    return f"{lines['gas']['loss_mean']:.1f}, KSOM {lines['hard']['loss_mean']:.1f}", lines["gas"]["n"], UNKNOWN


CLAIMS = [
    Claim(BASELINE, "Counts from 0 can make EMA-VQ fail", "Sec. 4.1, Fig. 2", "one of two series ends at 148.7 ± 299.7",
          fails_from_0, "#counts-that-start-at-0"),
    Claim(BASELINE, "Counts from 0 reach +10% later than from 1", "Table 1", "6.8 and 5.4 thousand steps", later_from_0,
          "results.md#robustness"),
    Claim(BASELINE, "Counts from 1 vary little", "Sec. 4.1", "51.9 ± 0.2", steady_from_1, "results.md#robustness"),
    Claim(BASELINE, "Without updates of empty clusters EMA-VQ is much worse", "Table 1",
          "148.8 and 68.3 (counts from 0 and 1)", needs_updates, "results.md#robustness"),
    Claim(BASELINE, "Steps to +10% with counts from 0 and no updates", "Table 1", "13.5 ± 0.7", steps_of_the_collapsed,
          "#steps-of-a-run-that-collapsed"),
    Claim(SPEED, "All methods reach a similar loss", "Table 2", "51.8 to 52.1", losses_alike, "results.md#main"),
    Claim(SPEED, "KSOM is sooner within 20%", "Sec. 4.2, Table 2", "32% fewer steps (2.5 against 3.7)", saved(20),
          "#how-much-sooner"),
    Claim(SPEED, "Within 10% it saves less than 5%", "Sec. 4.2", "4% (5.2 against 5.4)", saved(10), "#how-much-sooner"),
    Claim(SPEED, "On faces KSOM has the lower loss", "Table 2", "1.73 and 1.86", faces_better, "results-256.md#faces"),
    Claim(ROBUST, "KSOM reaches the same loss in all configurations", "Table 3", "51.8 to 52.1",
          ksom_everywhere("hard"), "results.md#robustness"),
    Claim(ROBUST, "The same holds for the Gaussian", "Table 3, caption", "similar", ksom_everywhere("gaussian"),
          "results.md#robustness"),
    Claim(ROBUST, "And for the formula of the authors' code", "-", "-", ksom_everywhere("exponential"),
          "results.md#robustness"),
    Claim(ROBUST, "KSOM is sooner within 10% in these configurations", "Table 3",
          "5.2 against 13.5; 4.8 against 16.3; 4.8 against 6.8", sooner_everywhere, "results.md#robustness"),
    Claim(ROBUST, "Faces, worst configuration: KSOM is far better", "Table 3", "1.74 against 3.73",
          robust_at_256("faces"), "results-256.md#faces"),
    Claim(ROBUST, "ImageNet, worst configuration: KSOM is far better", "Table 3", "24.4 against 44.7",
          robust_at_256("imagenet"), "results-256.md#imagenet"),
    Claim(MAP, "Images survive a move of KSOM's tokens by one place, not of EMA-VQ's", "Sec. 4.3, Fig. 4", "by eye",
          moved_tokens, "#moved-tokens"),
    Claim(MAP, "A smaller tau gives a smoother map (tau 1, 0.1, 0.01)", "App. B.2", "by eye", smaller_tau,
          "#tau-and-the-order-of-the-map"),
    Claim(MAP, "KSOM uses codes more evenly (perplexity, CIFAR-10)", "App. B.1, Fig. 5", "higher", in_use,
          "results.md#main"),
    Claim(MAP, "On faces, top level: above 300, EMA-VQ below 100", "App. B.1", "> 300 and < 100", faces_top,
          "results-256.md#faces"),
    Claim(BEYOND, "Grid and tau hardly matter for the loss", "App. B.2, Table 4", "51.7 to 52.1", ablation_alike,
          "results.md#neighborhoods-maps-and-tau"),
    Claim(BEYOND, "Codes by gradient are worse than by EMA", "App. B.3, Table 5", "69.4 and 51.9", gradient_worse,
          "results.md#codes-learned-by-gradient"),
    Claim(BEYOND, "The SOM-VAE has KSOM's loss and is slower to +10%", "App. B.3, Table 5", "7.3 and 5.2",
          som_vae_slower, "results.md#codes-learned-by-gradient"),
    Claim(BEYOND, "The softmax KSOM fails when made discrete", "Sec. 5", "no figure", softmax_fails,
          "#what-the-paper-names-without-a-figure"),
    Claim(BEYOND, "Neural gas may be worth a try", "Sec. 5", "no figure", neural_gas,
          "#what-the-paper-names-without-a-figure"),
]  # fmt: skip


def csv_files(folder: Path, records: Records) -> dict[str, list[Line]]:
    """The rows of every file there is something for, by its name."""
    evidence = Evidence(folder, records)
    made = {"speedup": speedups, "early": early, "precision": precision, "smoothness": smoothness}
    made |= {"moved": moved, "beyond": beyond, "levels": levels, "blocks": authors_blocks}
    files = {name: lines(evidence) for name, lines in made.items()}
    return {"claims": list(answers(CLAIMS, evidence)), **{name: lines for name, lines in files.items() if lines}}
