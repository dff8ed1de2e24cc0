"""Training as a person watches it: real processes in a pseudo-terminal, at 80 and at 120 columns."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from terminal import Screen, Terminal

from topovq.tokenizer.training import read_record
from topovq.tokenizer.training.checkpoint import checkpoints, step_of


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(40):
        pixels = np.random.default_rng(i).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((80, 60)).save(folder / f"{i}.png")
    return folder


def test_a_screen_sees_a_line_that_is_too_long() -> None:
    screen = Screen(10)
    screen.feed("0123456789\r\n\x1b[1mabc\x1b[0m\r\x1b[2Kde\r\n")
    assert (screen.lines, screen.wrapped) == (["0123456789", "de", ""], [])
    screen.feed("0123456789!")
    assert (screen.lines[2:], screen.wrapped) == (["0123456789", "!"], ["0123456789"])


@pytest.mark.parametrize("width", [80, 120])
def test_training_on_a_cpu_with_its_defaults(width: int, pictures: Path, tmp_path: Path) -> None:
    small = ["--steps", "20", "--batch-size", "8", "--workers", "0", "--device", "cpu"]
    terminal = Terminal(width, tmp_path, "train", str(pictures), "--out", "run", *small)
    assert terminal.end() == 0, terminal.raw
    lines = terminal.screen.lines
    assert terminal.screen.wrapped == []
    assert lines[:3] == [
        "On a CPU: a small model; --preset full trains the full one.",
        "39 training and 1 validation images of 64x64 pixels",
        "vqvae, kohonen: 512 codes, 20 steps on the CPU, 1 thread",
    ]
    assert any(re.fullmatch(r"about \d+ s for 20 steps \([\d.]+ s a step\)", line) for line in lines)
    said = [line for line in lines if line.startswith("validation at " if width == 80 else "step ")]
    assert len(said) == 10
    assert re.search(r"usage [\d.]+%(/256| of 256 tokens)", said[-1])
    # The bar: it moves at the first steps, says how long the rest takes from the second on, and has all its figures.
    frames = {step: [f for f in terminal.frames if re.search(rf"\b{step}/20", f)] for step in (1, 2, 3, 20)}
    assert all(frames.values())
    assert any(re.search(r" \d+ s *$", frame) for frame in frames[2])
    last = lines[max(i for i, line in enumerate(lines) if "20/20" in line)]
    for part in ("loss 0.", "use ", "perp ", "dead ", "drift ", "done"):
        assert part in last
    assert ("kohonen" in last and "img/s" in last) == (width == 120)
    assert (tmp_path / "run" / "report.html").exists()


def test_ctrl_c_answers_and_acts_in_the_middle_of_a_slow_step(pictures: Path, tmp_path: Path) -> None:
    large = ["--preset", "full", "--image-size", "64", "--batch-size", "128", "--workers", "0", "--device", "cpu"]
    terminal = Terminal(80, tmp_path, "train", str(pictures), "--out", "run", *large)
    terminal.until("0/30000")
    terminal.until("1/30000")  # the first step is over, and another one begun
    step = terminal.until("2/30000")
    terminal.press(b"\x03")
    answered = terminal.until("finishing this step, then saving; press again to quit without saving")
    stopped = terminal.until("stopped at step 2 of 30,000")
    assert terminal.end() == 130
    assert answered < max(1, step / 2)
    assert stopped < max(2, step), "the step was not dropped"
    assert terminal.screen.wrapped == []
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")] == [2]
    assert [line["event"] for line in read_record(tmp_path / "run" / "record.jsonl")] == ["config"]
