"""The health of a run's codebook: in the bar, in the record, and as a warning that says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinySource, tiny_config

from topovq import KohonenVQ, ResidualVQ, Schedule
from topovq.metrics import Health
from topovq.tokenizer.models import VQVAE
from topovq.tokenizer.training import info, load_run, read_record, train
from topovq.tokenizer.training.progress import Reporter
from topovq.tokenizer.training.step import Figures, Reading
from topovq.tokenizer.training.watch import UsageWatch


def health(usage: float, tokens: int = 100_000, size: int = 1_000) -> Health:
    return Health(usage, 10.0, round((1 - usage) * size), 0.01, tokens)


def ema(size: int = 1_000) -> KohonenVQ:
    return KohonenVQ(2, size, neighborhood="none")


def watch(quantizers: list[Any] | None = None, kind: str = "ema", **options: Any) -> UsageWatch:
    return UsageWatch(quantizers or [ema()], kind, options)


# The warning


def test_it_says_the_numbers_and_what_to_do() -> None:
    text = watch().look(1_200, [health(0.031, tokens=101_234)])
    assert text is not None
    for part in (
        "step 1,200",
        "3.1%",
        "1,000 codes",
        "969",
        "100,000 tokens",
        "--quantizer kohonen",
        "--codebook-size",
    ):
        assert part in text


def test_it_speaks_once_and_again_below_a_tenth() -> None:
    watching = watch()
    spoken = [watching.look(step, [health(usage)]) for step, usage in zip(range(600, 1_300, 100), USES)]
    assert [text is not None for text in spoken] == [False, True, False, False, True, False, False]


USES = (0.51, 0.49, 0.3, 0.11, 0.09, 0.01, 0.4)


def test_a_run_that_starts_below_a_tenth_is_warned_of_once() -> None:
    watching = watch()
    assert watching.look(600, [health(0.05)]) is not None
    assert watching.look(700, [health(0.3)]) is None


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (499, health(0.01)),  # codes are still finding their places
        (600, health(0.5)),  # half of them is enough
        (600, health(0.4, tokens=4_999)),  # five tokens a code could not show that half of them are in use
        (600, health(0.05, tokens=999)),
    ],
)
def test_it_keeps_quiet(step: int, found: Health) -> None:
    assert watch().look(step, [found]) is None


def test_tokens_for_a_tenth_of_the_codes_are_enough_to_see_that_a_tenth_is_not_in_use() -> None:
    assert watch().look(600, [health(0.05, tokens=1_000)]) is not None


def test_a_wide_neighborhood_is_given_time() -> None:
    schedule = Schedule.exponential(8, 0.5, 4_000)  # 2 cells wide after half of it
    watching = watch([KohonenVQ(2, 1_024, neighborhood="gaussian", schedule=schedule)], "kohonen")
    assert watching.look(1_990, [health(0.2)]) is None
    assert watching.look(2_010, [health(0.2)]) is not None
    stages = watch([ResidualVQ(2, 1_024, 2, neighborhood="gaussian", schedule=schedule)], "residual")
    assert stages.look(1_990, [health(0.2)]) is None


def test_the_worst_level_is_the_one_it_names() -> None:
    text = watch([ema(), ema(500)]).look(600, [health(0.4), health(0.2, size=500)])
    assert text is not None
    assert "20.0% of the 500 codes of level 1" in text


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("ema", {}, "use --quantizer kohonen"),
        ("gradient", {}, "use --quantizer kohonen"),
        ("kohonen", {"neighborhood": "hard", "tau": 0.5}, "leave neighborhood and tau out of --quantizer-options"),
        ("residual", {"neighborhood": "none"}, "leave neighborhood out of --quantizer-options"),
        ("kohonen", {"decay": 0.9}, "more --steps"),
    ],
)
def test_what_to_do_depends_on_what_is_done(kind: str, options: dict[str, Any], said: str) -> None:
    text = watch(None, kind, **options).look(600, [health(0.2)])
    assert text is not None
    assert said in text


# A run


def run(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[list[dict[str, Any]], str]:
    train(tiny_config(folder, **changes), source=TinySource())
    lines = read_record(folder / "record.jsonl")
    return [line for line in lines if line["event"] == "validation"], " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("options", [{}, {"model": "vqvae2", "model_options": {"hidden": 8, "residual_hidden": 4}}])
def test_the_record_has_the_health_of_the_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    validations, said = run(tmp_path, capsys, validate_every=6, log_every=4, **options)
    total = 32 if options else 16
    for line in validations:
        assert 0 <= line["train_usage"] <= 1
        assert 1 <= line["train_perplexity"] <= 16
        assert line["dead_codes"] == pytest.approx((1 - line["train_usage"]) * total)
        assert line["drift"] > 0
    assert [line["drift_steps"] for line in validations] == [2, 4]  # read at 4, 6, 8 and 12
    assert "warning" not in said


def test_the_record_says_what_health_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validations, _ = run(tmp_path, capsys)
    now = VQVAE.from_pretrained(tmp_path).quantizers[0].health()
    last = validations[-1]
    assert (last["train_usage"], last["dead_codes"]) == pytest.approx((now.usage, now.dead_codes))
    assert last["train_perplexity"] == pytest.approx(now.perplexity, rel=1e-5)


def test_a_collapsed_run_warns_and_a_healthy_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topovq.tokenizer.training.watch.WARM_UP", 10)
    # Codes that never move lie all over; a few are closest to what an untrained encoder gives.
    _, said = run(tmp_path / "stuck", capsys, quantizer="ema", quantizer_options={"ema_update": False})
    assert said.count("warning:") == 1
    assert "step 12" in said
    assert "of the 16 codes are in use" in said
    assert "--quantizer kohonen" in said
    _, said = run(tmp_path / "fresh", capsys, quantizer="ema", quantizer_options={"kmeans_init": True})
    assert "warning:" not in said


# What is read, and what is shown


def test_reading_has_each_level_and_all_of_them() -> None:
    top, bottom = [0.5, 4.0, 8.0, 0.1, 100.0, 2.0, 3.0], [1.0, 8.0, 0.0, 0.3, 400.0, 1.0, 4.0]
    reading = Reading(torch.tensor([6.0, 4.0, 2.0, *top, *bottom]))
    values = reading.values()
    assert values == pytest.approx(
        {
            "loss": 3,
            "reconstruction_loss": 2,
            "steps": 2,
            "usage": 0.75,
            "perplexity": 6,
            "tokens": 500,
            "dead_codes": 8,
            "drift": 0.2,
            "skipped": 7,
            "usage_0": 0.5,
            "usage_1": 1,
        }
    )
    assert [(level.tokens, level.stray_codes) for level in reading.levels()] == [(100, 2), (400, 1)]


FIGURES = {
    "loss": 0.0123,
    "reconstruction_loss": 0.0111,
    "steps": 100,
    "usage": 0.98,
    "tokens": 1_638_400,
    "perplexity": 12_345,
    "dead_codes": 289,
    "drift": 0.0031,
    "skipped": 0,
}


def shown(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bar's lines on a terminal of that width, halfway through 30,000 steps."""
    for name, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    with Reporter("kohonen", 30_000, 14_900, 256, [], False) as reporter:
        reporter.interval(15_000, FIGURES, 1_000, [])
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    return [line.rstrip() for line in re.split("[\r\n]", drawn) if "15000" in line]


def test_the_bar_says_it_in_full_where_there_is_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = shown(160, capsys, monkeypatch)[-1]
    for part in (
        "loss 0.0123",
        "usage 98% of 2M tokens",
        "perplexity 12,345",
        "dead codes 289",
        "drift 0.3%",
        "256,000 images/s",
    ):
        assert part in line
    assert len(line) <= 160


@pytest.mark.parametrize("width", [80, 100, 139])
def test_the_bar_fits_a_narrow_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(width, capsys, monkeypatch)
    for part in ("15000/30000", "loss 0.0123", "use 98%/2M", "perp 12k", "dead 289", "drift 0.3%"):
        assert part in lines[-1]
    assert ("256k img/s" in lines[-1]) == (width >= 100)
    assert all(len(line) <= width for line in lines)


def test_speed_is_that_of_all_steps_since_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are shown an interval late, and two at once before a validation: the second took no time of its own."""

    class Late:
        arrived = "an event"

        def values(self) -> dict[str, float]:
            return {"steps": 100.0}

        def levels(self) -> list[Health]:
            return []

    class Heard:
        def __init__(self) -> None:
            self.speeds: list[float] = []

        def interval(self, step: int, values: dict[str, float], speed: float, levels: list[Health]) -> None:
            self.speeds.append(speed)

    now = [10.0]
    monkeypatch.setattr("topovq.tokenizer.training.step.time.monotonic", lambda: now[0])
    heard = Heard()
    figures = Figures(heard)  # type: ignore[arg-type]
    now[0] = 11.0
    figures.send(100, Late())  # type: ignore[arg-type]
    now[0] = 12.0
    figures.send(200, Late())  # type: ignore[arg-type]
    figures.show()
    now[0] = 20.0  # a validation
    figures.restart()
    now[0] = 24.0
    figures.send(300, Late())  # type: ignore[arg-type]
    figures.show()
    assert heard.speeds == [50.0, 100.0, 25.0]


def test_usage_is_one_thing_in_bar_record_validation_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of the codes that are chosen at least once in a stated number of tokens: counted here by hand."""
    from topovq.tokenizer.training.runs import summary
    from topovq.view.report import write_report

    validations, said = run(tmp_path, capsys)
    last, model = validations[-1], load_run(tmp_path)
    tokens = model.encode(TinySource().held_out)
    chosen = len(tokens.unique()) / 16
    assert (last["usage"], last["tokens"]) == (chosen, tokens.numel())
    assert f"usage {chosen:.1%} of {tokens.numel():,} tokens" in said
    assert summary(info(tmp_path))[-1].endswith(f"{chosen:.1%} of the codes in the 160 tokens of these images")
    health = model.quantizers[0].health()
    assert (last["train_usage"], last["train_tokens"]) == (health.usage, health.tokens)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert f"{chosen:.1%} of 160 tokens" in page
    assert "Usage is the share of the codes that are chosen at least once in so many tokens." in page
    used, counted = re.findall(r"Hits: usage ([\d.]+)%, (\d+) of 16 codes in [\d,]+ tokens", page)[0]
    assert float(used) == pytest.approx(100 * int(counted) / 16, abs=0.1)
