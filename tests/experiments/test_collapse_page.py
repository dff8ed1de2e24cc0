"""The page on collapse says what the records say, and the picture of the study is drawn from its table."""

from __future__ import annotations

import csv
import math
import re
import shutil
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks import schedules
from benchmarks.schedules import empty_table, late_losses, short_table, small_table, smoothing_table, table
from experiments.figure_scale import LOOKS, draw_scale
from experiments.library import Library
from experiments.scale import make_scale
from experiments.sheet import Sheet, as_csv, markdown
from experiments.specs import cells
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.update import Batch, Rule, State, update
from topovq.tokenizer.models.peers import FSQ_LEVELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text()
SIZES = [512, 1024, 4096, 16384, 65536, 262144]
COMPARED = SIZES[:-2]  # with all quantizers of others, after 6,000 steps
LARGE = SIZES[-2:]  # with them after fewer
PEERS = ["vqp", "vqp-rotation", "simvq", "fsq", "lfq"]
SEEN, ALL = "validation", "validation and training"  # tokens


@pytest.fixture(scope="module")
def sheet() -> Sheet:
    return make_scale("cifar10", Library([ROOT / "records"]), seeds=3, partial=True, codebooks=SIZES)


@pytest.fixture(scope="module")
def faces() -> Sheet:
    return make_scale("celebahq_afhq", Library([ROOT / "records"]), seeds=1, steps=10_000, batch_size=32)


def in_use() -> list[dict[str, str]]:
    with open(ROOT / "benchmarks" / "results" / "use.csv") as file:
        return list(csv.DictReader(file))


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def use_table() -> list[str]:
    """Codes that occur among the validation tokens, and among all."""
    runs = {run.config["id"]: run.config for run in Library([ROOT / "records"]).all()}
    rows = {(row["run"], row["over"]): row for row in in_use()}
    assert {(row["over"], row["tokens"]) for row in in_use()} == {(SEEN, "636608"), (ALL, "3200000")}
    names = ["ema", "ksom-paper", "ksom, counts smoothed", "ksom"]
    lines = []
    for run in {run for run, _ in rows}:
        options = runs[run]["quantizer_options"]
        rule = options.get("neighborhood"), options.get("update_empty", True)
        name = {("hard", True): 1, ("gaussian", True): 2, ("gaussian", False): 3}.get(rule, 0)
        order = int(rows[run, SEEN]["codebook_size"]), name
        shares = [f"{float(rows[run, over]['used']):.1%}" for over in (SEEN, ALL)]
        lines.append((order, f"| {order[0]:,} | {names[name]} | {runs[run]['seed']} | {' | '.join(shares)} |"))
    return [line for _, line in sorted(lines)]


def test_the_tables_are_those_of_the_records(sheet: Sheet, faces: Sheet) -> None:
    head, rule, *body = lines_of(markdown(sheet))
    few = [line for line in body if int(line.split("|")[1].replace(",", "")) not in LARGE]
    assert len(few) == (3 + len(PEERS) + 3) * len(COMPARED)
    both = [head, rule, *few, head, rule, *body[len(few) :]]
    use = ["| K | method | seed | of the validation tokens | of all |", "| --: | --- | --: | --: | --: |", *use_table()]
    tried = [*table(), *small_table(), *short_table(), *smoothing_table(), *empty_table()]
    assert lines_of(PAGE) == [*both, *use, *lines_of(markdown(faces)), *tried]
    for each in (sheet, faces):
        assert (ROOT / "docs" / "results" / f"{each.name}.csv").read_text() == as_csv(each)


def by_method(sheet: Sheet, steps: int = 30_000) -> dict[tuple[str, int], dict[str, str]]:
    rows = [dict(zip(sheet.columns, row)) for row in sheet.values]
    return {(row["method"], int(row["codebook_size"])): row for row in rows if int(row["steps"]) == steps}


def test_the_numbers_in_the_text_are_those_of_the_records(sheet: Sheet) -> None:
    rows = by_method(sheet)

    def used(method: str, size: int) -> float:
        return float(rows[method, size]["codes_used_percent_mean"]) / 100

    found = Library([ROOT / "records" / "scale"]).all()
    tokens = {64 * int(run.config["source_validation_images"]) for run in found if run.config["data"] == "cifar10"}
    assert tokens == {636_608}
    assert "636,608 tokens" in PAGE
    assert [round(636_608 / size) for size in (16_384, *LARGE)] == [39, 10, 2]
    assert all(used("ema", size) * size < 2_200 for size in SIZES)
    assert all(used("ksom", size) > 0.99 for size in COMPARED)
    with open(ROOT / "benchmarks" / "results" / "scale.csv") as file:
        step = {(row["quantizer"], int(row["codebook_size"])): float(row["ms"]) for row in csv.DictReader(file)}
    over = {
        size: max(ms / step["ema", size] - 1 for (name, at), ms in step.items() if at == size and "kohonen" in name)
        for size in SIZES
    }
    said = re.search(r"\(at most ([\d.]+)% at\s16,384 codes, ([\d.]+)% at 65,536, ([\d.]+)% at 262,144\)", PAGE)
    assert said is not None
    assert list(said.groups()) == [f"{100 * over[size]:.1f}" for size in (16_384, 65_536, 262_144)]
    assert all(abs(step["kohonen at 0.75", size] / step["ema", size] - 1) < 0.006 for size in (16_384, 65_536, 262_144))
    assert all(abs(step["kohonen hard", size] / step["ema", size] - 1) < 0.025 for size in SIZES)


def curve(method: str, size: int) -> dict[int, dict[str, float]]:
    """What the one run of 30,000 steps was at each of its validations."""
    cell = next(cell for cell in cells("scale", codebooks=[size]) if cell.method == method)
    run = Library([ROOT / "records"]).finished(cell.config(0))
    assert run is not None
    return {seen["step"]: {"loss": 1e3 * seen["loss"], "usage": seen["usage"]} for seen in run.validations()}


def test_too_many_codes() -> None:
    text = " ".join(PAGE.split())
    for method, said in (
        ("ema", "rises from step {:,} on, from {:.1f} to {:.1f}."),
        ("ksom", "is lowest at step {:,}, {:.1f}; in the last third"),
    ):
        seen = curve(method, 262_144)
        lowest = min(seen, key=lambda step: seen[step]["loss"])
        assert said.format(lowest, seen[lowest]["loss"], seen[30_000]["loss"]) in text
    assert f"the last step jumps to {seen[30_000]['loss']:.1f}." in text
    runs = [run for run in Library([ROOT / "records" / "scale"]).all() if run.config["quantizer"] == "kohonen"]
    at = {
        (run.config["codebook_size"], run.config["seed"], run.config["quantizer_options"]["neighborhood"]): run
        for run in runs
        if run.config["steps"] == 30_000
    }
    late = [1e3 * median(late_losses(at[size, 0, "gaussian"])) for size in (262_144, 65_536)]
    assert "its median is {:.1f}, against {:.1f} with 65,536 codes".format(*late) in text
    last = [1e3 * at[size, 1, "gaussian"].validations()[-1]["loss"] for size in LARGE]
    assert "ended with losses of {:.1f} and {:.1f}.".format(*last) in text


def test_the_map_says_how_many_codes_do_not_occur() -> None:
    seen = {row["run"]: float(row["used"]) for row in in_use() if row["over"] == SEEN}
    library = Library([ROOT / "records"])
    never = {}
    for cell in cells("scale", codebooks=[16_384]):
        run = library.finished(cell.config(2))
        if run is not None and run.config["id"] in seen:
            never[cell.method] = round(16_384 * (1 - seen[run.config["id"]]))
    said = "all codes but {ksom:,} occur among the validation tokens. On the right {ema:,} do not"
    assert said.format(**never) in " ".join(PAGE.split())


def test_codes_that_stay_do_not_fall_out_of_use() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in empty_table()[2:]]
    losses = {
        tuple(row[:3]): [float(cell.split()[0]) for cell in row[4:6]] for row in rows if row[2] in ("30,000", "10,000")
    }
    assert max(abs(one - other) for one, other in losses.values()) < 0.35
    (largest,) = (row for row in rows if row[1:3] == ["262,144", "30,000"])
    text = " ".join(PAGE.split())
    assert f"1.6 million tokens, {largest[9]} of the 262,144 codes were chosen;" in text
    assert f"of those of the setting before, {largest[8]}." in text
    assert 1 - float(largest[8].strip("%")) / 100 == pytest.approx(2 / 5, abs=0.01)
    assert f"and now {100 - float(largest[9].strip('%')):.1f}% do" in text
    (shorter,) = (row for row in rows if row[1:3] == ["262,144", "6,000"])
    assert round(float(shorter[5]) - float(shorter[4])) == 2
    (again,) = (run for run in Library([ROOT / "records" / "check"]).all() if run.config["codebook_size"] == 262_144)
    assert f"records/check/{again.config['id']}.jsonl" in PAGE
    assert again.config["quantizer_options"]["update_empty"]
    lately, loss = again.validations()[-1]["train_usage"], 1e3 * median(late_losses(again))
    assert f"and {lately:.1%} of its codes were chosen lately, with a loss of {loss:.1f}." in text


def test_who_is_best_at_the_largest_sizes(sheet: Sheet) -> None:
    rows = [dict(zip(sheet.columns, row)) for row in sheet.values if int(row[2]) in LARGE]
    best: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in rows:
        best.setdefault((row["codebook_size"], row["steps"]), []).append((float(row["loss_mean"]), row["method"]))
    first = {key: min(found)[1] for key, found in best.items()}
    assert {key for key, method in first.items() if method == "ksom"} == {
        (size, steps) for size in ("65536", "262144") for steps in ("30000", "6000")
    }
    assert {key for key, method in first.items() if method == "vqp"} == {
        ("65536", "2000"), ("65536", "500"), ("262144", "100")
    }  # fmt: skip
    assert len(first) == 7
    at = {(row["codebook_size"], row["steps"], row["method"]): row for row in rows}
    vqp, ksom = (at["65536", "2000", name] for name in ("vqp", "ksom"))
    assert f"`ksom` is {float(ksom['loss_mean']) - float(vqp['loss_mean']):.1f} above it" in PAGE
    assert 2_000 * float(vqp["ms_per_step"]) > 30_000 * float(ksom["ms_per_step"])
    vqp, ksom = at["262144", "100", "vqp"], at["262144", "6000", "ksom"]
    slower, larger = (float(vqp[name]) / float(ksom[name]) for name in ("ms_per_step", "peak_mib"))
    assert f"takes {slower:.0f} times as long as one of `ksom` and {larger:.0f} times the memory, " in PAGE
    assert f"the memory, {float(vqp['peak_mib']) / 1024:.0f} of the" in PAGE
    lfq = at["262144", "100", "lfq"]
    slower = float(lfq["ms_per_step"]) / float(ksom["ms_per_step"])
    assert f"LFQ takes {slower:.0f} times as long, and {float(lfq['peak_mib']) / 1024:.0f} GiB." in PAGE
    timed = {row["method"]: float(row["ms_per_step"]) for row in rows if row["ms_per_step"]}
    assert min(timed, key=lambda name: timed[name]) == "fsq"


def test_faces_have_as_many_tokens_as_the_page_says(faces: Sheet) -> None:
    runs = [run for run in Library([ROOT / "records" / "scale"]).all() if run.config["data"] == "faces"]
    assert len(runs) == len(faces.rows) == 2
    for run in runs:
        images = run.config["source_train_images"], run.config["source_validation_images"]
        assert images == (5_753, 500)
        side = run.config["image_size"] // run.config["model_options"]["stride"]
        assert f"over {500 * side * side:,} tokens, {500 * side * side / 16_384:.0f} a code" in PAGE


def test_in_short_trainings_lower_decays_are_better() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in short_table()[2:]]
    losses = {
        row[1]: [float(cell.split(",")[0]) for cell in row[2:]] for row in rows if row[0] == "recommended" and all(row)
    }
    assert set(losses) == {"0.99", "0.97", "0.95"}
    assert len(losses["0.99"]) == 4
    assert all(low < high for name in ("0.97", "0.95") for low, high in zip(losses[name], losses["0.99"]))


def test_smaller_eps_keeps_codes_in_use() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in smoothing_table()[2:]]
    at = {(row[0], row[1].split(":")[0]): (float(row[3].split()[0]), float(row[4].strip("%"))) for row in rows}
    for name, smoothings in (("recommended", ("eps = 1e-12", "none")), ("recommended, without `steps`", ("none",))):
        usual = at[name, "eps = 1e-5"]
        assert 1 - usual[1] / 100 == pytest.approx(1 / 7, abs=0.005)
        for smoothing in smoothings:
            assert 0.9 < usual[0] - at[name, smoothing][0] < 2.1
            assert at[name, smoothing][1] > 99
    assert at["EMA-VQ", "eps = 1e-12"][1] < 5
    config = next(iter(Library([ROOT / "records" / "smoothing"]).all())).config
    tokens = config["batch_size"] * (config["source_size"] // config["model_options"].get("stride", 4)) ** 2
    assert config["codebook_size"] == 16 * tokens
    assert 262_144 == 16 * 256 * 64


def test_rarely_chosen_codes_are_pulled_to_the_origin() -> None:
    """The page's c / (c + 0.001), where the other codes make up nearly all of the counts."""
    c, size = 0.001, 64
    batch_counts = torch.full((size,), 100.0, dtype=torch.float64)
    batch_counts[0] = c
    codes = torch.ones(size, 1, dtype=torch.float64)
    counted = [torch.ones(size, dtype=torch.float64), torch.zeros(size), torch.zeros(size, dtype=torch.int32)]
    state = State(codes, codes.clone(), *counted, torch.tensor(0), torch.zeros(size, dtype=torch.bool))
    batch = Batch(batch_counts[:, None] * 1.0, batch_counts)
    rule = Rule(decay=0.99, eps=1e-5, update_empty=True, carried=True, cosine=False)
    for _ in range(3000):
        update(state, batch, Neighborhood("none", Grid(size)), rule)
    assert codes[0].item() == pytest.approx(c / (c + 0.001), rel=1e-3)
    assert codes[1].item() == pytest.approx(1, rel=1e-3)


def test_the_map_is_compared_with_others_after_as_many_steps(sheet: Sheet) -> None:
    rows = by_method(sheet, 6_000)
    assert {size for name, size in rows if name in PEERS and name != "fsq"} == set(COMPARED)
    assert {rows["ksom", size]["run_steps"] for size in COMPARED} == {"6000"}
    assert {rows[name, size]["n"] for name in ("ksom", *PEERS) for size in COMPARED} == {"1"}
    over = {
        name: [float(rows[name, size]["loss_mean"]) - float(rows["ksom", size]["loss_mean"]) for size in COMPARED]
        for name in ("ksom-paper", *PEERS)
    }
    said = "({:.1f} more than `ksom` at 512 codes, {:.1f} less at 1,024, {:.1f} less at 4,096)"
    vqp = over["vqp"]
    assert said.format(vqp[0], -vqp[1], -vqp[2]) in PAGE
    assert f"At 16,384 codes `vqp` is {vqp[3]:.1f} above `ksom`" in PAGE
    assert [more < min(0, vqp[i]) for i, more in enumerate(over["ksom-paper"])] == [True, False, True, False]
    assert max(map(abs, over["ksom-paper"][:3])) < 1.05
    assert f"SimVQ is {min(over['simvq']):.1f} to {max(over['simvq']):.1f} above it" in " ".join(PAGE.split())
    assert min(over[name][i] for name in ("vqp-rotation", "fsq", "lfq") for i in range(4)) > 5
    assert [math.prod(FSQ_LEVELS[size]) for size in SIZES] == [512, 1_000, 4_375, 15_360, 64_000, 262_144]


def test_others_that_are_more_even_or_faster_are_named(sheet: Sheet) -> None:
    rows = by_method(sheet, 6_000)

    def ratio(name: str, size: int, value: str) -> float | None:
        mine = rows[name, size][value]
        return float(mine) / float(rows["ksom", size][value]) if mine else None

    more = {(name, size): ratio(name, size, "perplexity_mean") or 0 for name in PEERS for size in COMPARED}
    assert {name for (name, _), times in more.items() if times > 1} == {"vqp", "lfq"}
    assert min(more[name, size] for name in ("vqp", "lfq") for size in COMPARED) > 1
    assert min(more["vqp", 4_096], more["lfq", 4_096]) > 1.2
    used = {(name, size): float(rows[name, size]["codes_used_percent_mean"]) for name in PEERS for size in COMPARED}
    assert [key for key, share in used.items() if share < 98] == [("vqp-rotation", 16_384)]
    time = {(name, size): ratio(name, size, "ms_per_step") for name in PEERS for size in COMPARED}
    unknown = {key for key, times in time.items() if times is None}
    assert unknown == {*((name, 512) for name in PEERS), ("lfq", 1_024)}
    slower = [times for (name, _), times in time.items() if name == "vqp" and times is not None]
    assert f"{min(slower):.0f} to {max(slower):.0f} times as long" in PAGE


def test_the_loss_of_the_rotation_trick_rises() -> None:
    found = Library([ROOT / "records" / "scale"]).all()
    losses = {
        run.config["codebook_size"]: [1e3 * seen["loss"] for seen in run.validations()]
        for run in found
        if run.config["quantizer"] == "vqp-rotation"
    }
    rises = {size: (seen[1], seen[-1]) for size, seen in losses.items() if seen[-1] - min(seen) > 1}
    assert all(min(losses[size]) == before for size, (before, _) in rises.items())
    said = "from {:.1f} to {:.1f} at 512 codes and from {:.1f} to {:.1f} at 1,024"
    assert sorted(rises) == [512, 1_024]
    assert said.format(*rises[512], *rises[1_024]) in " ".join(PAGE.split())


def test_the_recommended_schedule_is_near_the_best_of_every_size() -> None:
    library = Library([ROOT / "records"])
    last = {
        name: [run.validations()[-1] for run in map(library.finished, configs) if run is not None]
        for name, configs in schedules.rows()
    }
    last = {name: seen for name, seen in last.items() if seen}
    losses = {name: [1e3 * one["loss"] for one in seen] for name, seen in last.items()}
    assert {len(seen) for seen in last.values()} == {len(schedules.SIZES)}
    first, shorter = "side / 16 to 0.3 over 0.5 of the steps", "side / 16 to 0.3 over 0.3 of the steps"
    gaps = [losses[first][i] - min(seen[i] for seen in losses.values()) for i in range(len(schedules.SIZES))]
    assert f"at most {gaps[2]:.1f} above the best of a size (at 16,384 codes)" in PAGE
    assert max(gaps) == gaps[2]
    chosen = losses["the first of these with update_empty False"]
    gaps = [loss - min(seen[i] for seen in losses.values()) for i, loss in enumerate(chosen)]
    assert f"at most {gaps[1]:.1f} (at 4,096)" in PAGE
    assert max(gaps) == gaps[1]
    large = {name: seen[-1] for name, seen in losses.items() if name.startswith("side")}
    assert min(large, key=lambda name: large[name]) == shorter
    used = {name: last[name][-1]["usage"] for name in large}
    text = " ".join(PAGE.split())
    assert f"{large[shorter]:.2f} with {used[shorter]:.0%} of the codes in use; the first row has" in text
    assert f"the first row has {large[first]:.2f} with {used[first]:.0%}" in text
    above = {name: loss - large[first] for name, loss in large.items()}
    assert f"{above.pop('side / 32 to 0.3 over 0.5 of the steps'):.1f} above the first row" in text
    assert f"the rest at most {max(above.values()):.1f}" in text
    assert max(used, key=lambda name: used[name]) == "side / 16 to 0.5 over 0.5 of the steps"
    assert f"leaves the most codes in use, {max(used.values()):.0%}" in text
    gaussian = [name for name in last if name.startswith(("side", "the first"))]
    assert all(one["usage"] > 0.99 for name in gaussian for one in last[name][:-1])
    assert all(one["usage"] < 0.5 for one in last["`exponential`, the paper's"][1:])
    for decay in ("0.97", "0.95"):
        lower = losses[f"the first of these with decay {decay}"]
        assert all(0.5 < losses[first][i] - lower[i] < 2.3 for i in (1, 2))
        assert 1 - last[f"the first of these with decay {decay}"][-1]["usage"] == pytest.approx(0.1, abs=0.015)


def test_schedules_that_were_not_run_are_dashes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "records" / "schedule" / "f9387dd26a23.jsonl", tmp_path)
    assert table(tmp_path)[2:] == ["| side / 16 to 0.3 over 0.5 of the steps | - | - | - | 29.9, 98.0% |"]
    number = sum(len(configs) for _, configs in schedules.rows())
    assert f"of {number} short runs" in (schedules.__doc__ or "")


def test_the_picture_compares_methods_at_the_same_step() -> None:
    columns = ["codebook_size", "method", "n", "steps", "loss_mean", "loss_std"]
    columns += ["codes_used_percent_mean", "codes_used_percent_std"]
    values = [
        ["512", "ema", "3", "100", "60", "1", "90", "2"],
        ["1024", "ema", "3", "100", "50", "1", "40", "2"],
        ["1024", "ksom", "1", "100", "30", "", "99", ""],
        ["1024", "simvq", "1", "50", "45", "", "98", ""],
        ["1024", "ema", "3", "50", "70", "1", "80", "2"],
        ["1024", "ksom", "1", "50", "40", "", "97", ""],
    ]
    figure = draw_scale(Sheet("scale", "", [], [], [], columns, values))
    losses, uses = figure.axes
    drawn = {
        (line[0].get_color(), line[0].get_markerfacecolor() == "white"): line[0].get_xydata().tolist()
        for line in losses.containers
    }
    ema, ksom, simvq = (LOOKS[name][1] for name in ("ema", "ksom", "simvq"))
    assert drawn == {
        (ema, False): [[512, 60], [1024, 50]],
        (ema, True): [[1024, 70]],
        (ksom, False): [[1024, 30]],
        (ksom, True): [[1024, 40]],
        (simvq, True): [[1024, 45]],
    }
    assert len(uses.containers) == 5
    said = [text.get_text() for text in losses.get_legend().get_texts()]
    assert said == ["EMA-VQ", "KSOM, recommended schedule", "SimVQ"]
    assert "hollow: after 50 steps, every method with as many" in " ".join(t.get_text() for t in figure.texts)


def test_the_readme_quotes_the_same_records(sheet: Sheet) -> None:
    rows = by_method(sheet)
    said = " ".join((ROOT / "README.md").read_text().split())
    costs = [
        (float(row["ms_per_step"]), float(row["peak_mib"]) / 1024)
        for row in (by_method(sheet, 6_000)["ksom", 262_144], by_method(sheet, 100)["vqp", 262_144])
    ]
    assert "takes {:.1f} ms and {:.1f} GiB, and with".format(*costs[0]) in said
    assert "in its place {:.0f} ms and {:.0f} GiB (".format(*costs[1]) in said
    for size, text in (
        (16_384, "Of 16,384 codes EMA-VQ uses {:.0f}%, the map {:.1f}%, with {:.0f}% less error"),
        (65_536, "of 65,536 codes {:.0f}% and {:.0f}%, with {:.0f}% less (one seed)"),
    ):
        ema, ksom = rows["ema", size], rows["ksom", size]
        less = 100 * (1 - float(ksom["loss_mean"]) / float(ema["loss_mean"]))
        used = [float(row["codes_used_percent_mean"]) for row in (ema, ksom)]
        assert text.format(*used, less) in said
    assert {rows[name, size]["n"] for name in ("ema", "ksom") for size in COMPARED} == {"3"}
